"""Experts dealt out to several devices: what these hold, exchange and take."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest

from drawn import graph_of
from experts_toy import DENSE, EXPERT, EXPERTS, TABLE, TOP, D, T, draft, figures, routed
from planner_toy import cluster, workload
from polyreme.cluster.parse import parse
from polyreme.plan.grid import Cell, Degrees, even_degrees, even_split
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.message import Message
from polyreme.planner.cost.traffic import Traffic
from polyreme.planner.draft import Strategy
from polyreme.planner.prices import Prices
from polyreme.profile.assume import LINK_SHARE, START_S, assume
from polyreme.profile.fit import Fit

replace = msgspec.structs.replace
GRAPH = routed()
WIDTH = 4  # bytes of an element in fp32
N_TENSORS = 9  # of a block, each with a count of steps of 4 bytes
LEVELS = ("none", "optimizer", "grads", "params")


# Places


def test_every_way_to_deal_out_experts_is_a_split_of_its_own():
    found = {}
    for replica, shard, cp, tp in itertools.product((1, 2), (1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2)):
        for ep in (n for n in range(1, shard * cp + 1) if shard * cp % n == 0):
            degrees = Degrees(replica=replica, shard=shard, cp=cp, tp=tp, ep=ep)
            split = even_split(range(degrees.n_devices), degrees)
            assert even_degrees(split) == degrees
            assert found.setdefault(split, degrees) == degrees
            assert degrees.ep_shards * degrees.ep_contexts == ep
            assert shard % degrees.ep_shards == cp % degrees.ep_contexts == 0


def test_neighbours_share_experts_and_strided_devices_hold_the_same():
    """Two hosts of two devices: among neighbours exchanges stay on a host, gradients do not."""
    cost = DataCost(Memory(GRAPH, workload(8)), figures(GRAPH), cluster(2, 2))

    def hosts(**degrees: int) -> dict[str, int]:
        found = cost._n_hosts(Degrees(**degrees), 1)
        return {over: found[over] for over in ("experts", "shards", "replicas", "data")}

    assert hosts(shard=4, ep=2) == {"experts": 1, "shards": 2, "replicas": 1, "data": 2}
    assert hosts(shard=4, ep=4) == {"experts": 2, "shards": 1, "replicas": 1, "data": 1}
    assert hosts(replica=2, shard=2, ep=2) == {"experts": 1, "shards": 1, "replicas": 2, "data": 2}
    assert hosts(shard=2, cp=2, ep=2) == {"experts": 1, "shards": 2, "replicas": 1, "data": 2}
    assert hosts(shard=2, cp=2, ep=4) == {"experts": 2, "shards": 1, "replicas": 1, "data": 1}


# Memory


@pytest.mark.parametrize(
    ("how", "dense", "experts"),
    [
        (Strategy(shard=4), DENSE, 4 * EXPERT),
        (Strategy(shard=4, ep=2), DENSE, 2 * EXPERT),
        (Strategy(shard=4, ep=4), DENSE, EXPERT),
        (Strategy(shard=4, level="params"), DENSE // 4, EXPERT),
        (Strategy(shard=4, level="params", ep=2), DENSE // 4, EXPERT),
        (Strategy(shard=4, level="params", ep=4), DENSE // 4, EXPERT),
        (Strategy(replica=2, shard=4, level="grads", ep=2), DENSE // 4, EXPERT),
        (Strategy(shard=8, level="grads"), DENSE // 8, EXPERT),  # rows of whole experts: padding
        (Strategy(shard=8, level="grads", ep=4), DENSE // 8, EXPERT // 2),
        (Strategy(cp=2, ep=2), DENSE, 2 * EXPERT),
        (Strategy(shard=2, cp=2, level="params", ep=4), DENSE // 2, EXPERT),
        (Strategy(shard=2, cp=2, level="params", ep=2), DENSE // 2, EXPERT),
    ],
    ids=str,
)
def test_a_device_stores_its_own_experts_and_its_share_of_the_rest(how, dense, experts):
    """By hand: of E / ep experts the shards that hold the same ones share the states."""
    if how.shard == 8:
        dense += _padding(8)
    held = Memory(GRAPH, workload(8)).layer_storage("block.0", how, 0)
    assert held.parameters == held.gradients == (dense + experts) * WIDTH
    assert held.optimizer == 2 * held.parameters + N_TENSORS * 4


def _padding(parts: int) -> int:
    """Elements that the router's four rows lack to as many parts, of one part."""
    return D - EXPERTS * D // parts


@pytest.mark.parametrize("level", ["optimizer", "grads", "params"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_shards_hold_each_state_once(ep, level):
    memory, how = Memory(GRAPH, workload(8)), Strategy(shard=4, level=level, ep=ep)
    held = [memory.layer_storage("block.0", how, index) for index in range(4)]
    assert sum(each.parameters for each in held) == (DENSE + 4 * EXPERT) * WIDTH


def test_dealt_experts_are_gathered_and_reduced_by_those_who_hold_them():
    memory = Memory(GRAPH, workload(8))
    how = Strategy(shard=4, level="params", ep=2)
    rest, own = memory.layer_units("block.0", how)
    assert (rest.gathered, rest.parts, rest.experts) == (DENSE, 4, False)
    assert (own.gathered, own.parts, own.experts) == (2 * EXPERT, 2, True)
    assert memory.passing_bytes("block.0", how) == (DENSE + 2 * EXPERT) * WIDTH
    rest, own = memory.layer_units("block.0", replace(how, ep=4))
    assert (own.gathered, own.loose, own.parts) == (0, EXPERT, 1)
    assert memory.passing_bytes("block.0", replace(how, ep=4)) == DENSE * WIDTH
    kept = memory.kept_bytes("block.0", Strategy(shard=4, level="grads", ep=2), 3)
    assert kept == (DENSE + 2 * EXPERT) * WIDTH


# Exchanges


def _messages(how: Strategy, *, microbatches: int = 1) -> Counter[Message]:
    given = draft(GRAPH, how, microbatches=microbatches)
    return Traffic(Memory(GRAPH, workload(8)))(given, Cell())


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_go_to_their_experts_and_back_each_way(recompute):
    """Two blocks, one microbatch of 2 samples: each token goes to as many experts as it has."""
    found = _messages(Strategy(shard=4, ep=2, recompute=recompute))
    (message,) = [each for each in found if each.operation == "all_to_all"]
    assert message == Message(
        operation="all_to_all",
        over="experts",
        n_ranks=2,
        n_bytes=2 * T * TOP * D * WIDTH,
        ep=2,
    )
    assert found[message] == 2 * (6 if recompute else 4)
    again = _messages(Strategy(shard=4, ep=2, recompute=recompute), microbatches=2)
    (half,) = [each for each in again if each.operation == "all_to_all"]
    assert (half.n_bytes, again[half]) == (message.n_bytes // 2, 2 * found[message])
    own = _messages(Strategy(shard=2, cp=2, ep=2))  # 4 samples, half of their tokens
    assert [each.n_bytes for each in own if each.over == "experts"] == [message.n_bytes]


def test_whole_experts_are_summed_over_those_who_hold_the_same():
    whole = {each for each in _messages(Strategy(shard=4)) if each.over == "data"}
    everything = 2 * (DENSE + 4 * EXPERT) + 2 * TABLE + D
    assert {(each.n_ranks, each.n_bytes, each.ep) for each in whole} == {(4, everything * WIDTH, 1)}
    dealt = {each for each in _messages(Strategy(shard=4, ep=2)) if each.over == "data"}
    assert {(each.n_ranks, each.n_bytes, each.ep) for each in dealt} == {
        (4, (2 * DENSE + 2 * TABLE + D) * WIDTH, 1),
        (2, 2 * 2 * EXPERT * WIDTH, 2),
    }
    alone = {each for each in _messages(Strategy(shard=4, ep=4)) if each.over == "data"}
    assert {each.ep for each in alone} == {1}  # nobody else has them
    over_replicas = _messages(Strategy(replica=2, shard=2, ep=2))
    assert {each.n_ranks for each in over_replicas if each.over == "data"} == {2, 4}


def test_shared_experts_are_gathered_and_reduced_among_the_same():
    found = _messages(Strategy(replica=2, shard=4, level="grads", ep=2))
    own = {
        (each.operation, each.over, each.n_ranks, each.n_bytes): count
        for each, count in found.items()
        if each.ep == 2 and each.over != "experts"
    }
    n_bytes = 2 * EXPERT * WIDTH
    assert own == {
        ("all_gather", "shards", 2, n_bytes): 2,
        ("reduce_scatter", "shards", 2, n_bytes): 2,
        ("all_reduce", "replicas", 2, n_bytes // 2): 2,
    }


# Time


@pytest.mark.parametrize(
    ("hosts", "ep", "rate"), [((4,), 2, 1e9), ((4,), 4, 1e9), ((2, 2), 2, 1e9), ((2, 2), 4, 5e8)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_takes_its_passes_and_what_it_exchanges(hosts, ep, rate, recompute):
    """From the profile's own times, by size and by the hosts that a group spreads over."""
    cost = Prices(GRAPH, cluster(*hosts), figures(GRAPH), workload(8)).of(1).cost
    how = Strategy(shard=4, ep=ep, recompute=recompute)
    forward_s, backward_s = cost.passes_s("block.0", how, 2, 1)
    once_s = 2 * T * TOP * D * WIDTH / rate
    assert forward_s == pytest.approx(2e-3 + 2 * once_s)
    again_s = 2e-3 + 2 * once_s if recompute else 0.0
    assert backward_s == pytest.approx(4e-3 + again_s + 2 * once_s)
    alone = replace(how, ep=1)
    assert cost.passes_s("block.0", alone, 2, 1) == pytest.approx(
        (2e-3, 4e-3 + (2e-3 if recompute else 0.0))
    )


def test_a_step_takes_what_its_parts_do():
    """By hand, with nothing hidden: passes, eight exchanges a microbatch, sums of gradients."""
    bytes_s, routed_bytes_s = 1e8, 1e9
    profile = figures(GRAPH, bytes_s=bytes_s, routed_bytes_s=routed_bytes_s)
    cost = Prices(GRAPH, cluster(4), profile, workload(8)).of(1).cost
    found = cost(draft(GRAPH, Strategy(shard=4, ep=2), microbatches=2))
    passes_s = 2 * 4 * (1e-3 + 2e-3)
    routed_s = 2 * 2 * 4 * (T * TOP * D * WIDTH) / routed_bytes_s
    summed = 2 * DENSE + 2 * TABLE + D + 2 * 2 * EXPERT
    assert found.compute_s == pytest.approx(passes_s)
    assert found.exposed_comm_s == pytest.approx(routed_s + summed * WIDTH / bytes_s)
    assert found.comm_s == pytest.approx(found.exposed_comm_s)


def test_a_profile_without_such_times_has_gathers_of_as_many_bytes():
    profile = figures(GRAPH)
    old = {op: each for op, each in profile.collectives.items() if op != "all_to_all"}
    fit = Fit(replace(profile, collectives=old))
    assert fit.all_to_all_s(4, 10**6, 1) == fit.collective_s("all_gather", 4, 10**6, 1)
    assert Fit(profile).all_to_all_s(4, 10**6, 2) == pytest.approx(2e-3)
    assert fit.all_to_all_s(1, 10**6) == 0.0


def test_assumed_exchanges_go_over_each_device_s_own_links():
    where = parse("preset:2x8xH100", "cluster")
    fit = Fit(assume(GRAPH, where, "bf16"))
    size = 2**30
    inside_s = size * 7 / 8 / (where.intra.bandwidth_bytes_s * LINK_SHARE)
    across_s = size * 8 / 16 / (where.inter.bandwidth_bytes_s * LINK_SHARE)
    for n, hosts, moved_s in ((8, 1, inside_s), (16, 2, across_s)):
        latency_s = (where.intra if hosts == 1 else where.inter).latency_s
        expected_s = START_S + (n - 1) * latency_s + moved_s
        assert fit.all_to_all_s(n, size, hosts) == pytest.approx(expected_s)
    assert "all_to_all" not in assume(graph_of("llama"), where, "bf16").collectives


@pytest.mark.parametrize("seed", range(4))
def test_devices_need_no_less_than_their_parts(seed):
    """The account of all devices names what each stores, exactly, and more beside."""
    rng = np.random.default_rng(seed)
    how = Strategy(
        shard=4, level=str(rng.choice(LEVELS)), ep=int(rng.choice((2, 4))), recompute=seed % 2 == 0
    )
    given = draft(GRAPH, how)
    fitting = Prices(GRAPH, cluster(4), figures(GRAPH), workload(8)).of(1).fitting
    for index, causes in enumerate(fitting.by_device(given)):
        held = [
            fitting.memory.layer_storage(name, strategy, index)
            for name, strategy in given.strategies.items()
        ]
        assert causes["parameters"] == sum(each.parameters for each in held)
        assert causes["optimizer"] == sum(each.optimizer for each in held)
