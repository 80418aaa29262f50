"""Models that keepers average while workers compute: AD-PSGD and asynchronous push-sum."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import ADPSGD, AsyncPushSum
from polyreme.algo.sync.ad_psgd import partners
from polyreme.algo.topology import Gossip
from polyreme.algo.topology.graph import (
    Complete,
    Exponential,
    RandomMatching,
    RingGraph,
    TorusGraph,
)
from polyreme.algo.topology.graph.kind import unreached
from polyreme.sim.compute import Constant, Heterogeneous
from polyreme.sim.network import Hosts, SlowLinks, Uniform
from scattered import Scattered
from served import simulated

torch.set_num_threads(1)
MEMBERS = [ADPSGD(), AsyncPushSum()]
GRAPHS = [RingGraph(), TorusGraph(), Complete(), Exponential(), Exponential(peers="all")]
each_member = pytest.mark.parametrize("sync", MEMBERS, ids=lambda sync: type(sync).__name__)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _nothing(_rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(w)


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _starts(n: int) -> list[torch.Tensor]:
    return [_start() * (1 + worker) + worker for worker in range(n)]


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _between_keepers(played: Scattered) -> list[tuple[list[float], torch.Tensor]]:
    """Numbers and vector of what is under way from keeper to keeper."""
    return [
        (message.packets[0].decode().tolist(), message.packets[1].decode())
        for source, to, message in played.under_way
        if source >= played.n and to >= played.n
    ]


@each_member
@pytest.mark.parametrize("rule", [SGD(momentum=0.9, weight_decay=0.01), AdamW()])
def test_one_worker_takes_the_steps_of_the_rule(sync, rule) -> None:
    w = torch.nn.Parameter(_start())
    optimizer = (
        torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)
        if isinstance(rule, SGD)
        else torch.optim.AdamW([w], lr=0.1, weight_decay=rule.weight_decay)
    )
    clock = simulated(_of(sync, rule=rule), _gradient, _start(), 1)
    for batch in range(9):
        w.grad = _gradient(0, batch, w.detach())
        optimizer.step()
        clock.play(batch + 1)
        _close(sync.whole(clock.states[1:], clock.states[:1]), w.detach())


@each_member
@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_messages_holds_anyone_up(sync, seed: int) -> None:
    """Every worker computes all its gradients, and all that was sent is read."""
    n = 1 + seed % 7
    played = Scattered(_of(sync), _gradient, _starts(n), seed=seed, batches=8, lr=0.01).run()
    assert [state["step"] for state in played.states] == [8] * (2 * n)
    assert not played.under_way
    assert len(played.records) == 8 * n
    assert sync.whole(played.servers, played.states[:n]).isfinite().all()


# AD-PSGD ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_averages_keep_the_sum_of_models_and_bring_them_together(seed: int) -> None:
    n = 2 + seed % 5
    starts = _starts(n)
    total = torch.stack(starts).sum(0)

    def kept(played: Scattered) -> None:
        said = _between_keepers(played)
        assert len(said) == sum(state["asks"] for state in played.servers)  # one question each
        answers = [vector for (what, *_), vector in said if what == 2.0]
        _close(sum([s["params"] for s in played.servers] + answers), total, atol=1e-11)

    algorithm = _of(ADPSGD())
    played = Scattered(algorithm, _nothing, starts, seed=seed, batches=60, after=kept).run()
    mean, models = total / n, torch.stack([state["params"] for state in played.servers])
    assert (models - mean).norm() < 0.01 * (torch.stack(starts) - mean).norm()


def test_two_models_are_their_mean_after_one_average() -> None:
    starts = _starts(2)
    played = Scattered(_of(ADPSGD()), _nothing, starts, seed=0, batches=1).run()
    assert [state["version"] for state in played.servers] == [2, 2]  # a step and an average
    for state in played.servers:
        _close(state["params"], (starts[0] + starts[1]) / 2)


@pytest.mark.parametrize("seed", range(10))
def test_an_average_takes_no_gradient_away_that_came_while_it_was_made(seed: int) -> None:
    """The sum of models is that of starts less all steps, whatever is under way."""
    n = 2 + seed % 4
    steps = torch.zeros(12, dtype=torch.float64)

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        found = _gradient(rank, batch, w)
        steps.add_(found, alpha=0.02)
        return found

    played = Scattered(_of(ADPSGD()), gradient, _starts(n), seed=seed, batches=10, lr=0.02).run()
    ours = torch.stack([state["params"] for state in played.servers]).sum(0)
    _close(ours, torch.stack(_starts(n)).sum(0) - steps, atol=1e-11)


@pytest.mark.parametrize("graph", [*GRAPHS, RandomMatching()], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9, 16])
def test_active_ones_ask_passive_neighbours_alone_and_all_are_connected(graph, n: int) -> None:
    asks = partners(graph, n)
    takes = graph.ever(n)
    linked = torch.zeros(n, n, dtype=torch.bool)
    for active, passive in enumerate(asks):
        for other in passive:
            assert not asks[other]
            assert takes[active, other] or takes[other, active]
            linked[active, other] = linked[other, active] = True
    assert unreached(linked) is None


def test_a_ring_has_active_and_passive_workers_in_turn() -> None:
    assert partners(RingGraph(), 6) == ((1, 5), (), (1, 3), (), (3, 5), ())
    assert partners(RingGraph(), 5) == ((1,), (), (1, 3), (), (3,))
    checkered = partners(TorusGraph(), 16)
    assert sorted(map(len, checkered)) == [0] * 8 + [4] * 8


# Push-sum --------------------------------------------------------------------------------------


@pytest.mark.slice(4)
@pytest.mark.parametrize("graph", [*GRAPHS, RandomMatching()], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize("least", [0.01, 0.5])
def test_weights_sum_to_the_number_of_workers_at_every_moment(graph, least: float) -> None:
    n, starts = 6, _starts(6)
    total = torch.stack(starts).sum(0)

    def kept(played: Scattered) -> None:
        said = _between_keepers(played)
        weights = [s["weight"] for s in played.servers] + [numbers[0] for numbers, _ in said]
        assert abs(math.fsum(weights) - n) < 1e-12
        assert min(weights) >= least
        sums = [state["params"] for state in played.servers] + [vector for _, vector in said]
        _close(sum(sums), total, atol=1e-11)

    algorithm = _of(AsyncPushSum(graph=graph, least_weight=least))
    played = Scattered(algorithm, _nothing, starts, seed=3, batches=120, after=kept).run()
    models = torch.stack([algorithm.sync.model(state) for state in played.servers])
    mean = total / n
    assert sum(state["pushes"] for state in played.servers) > 100
    assert (models - mean).norm() < 1e-3 * (torch.stack(starts) - mean).norm()
    _close(algorithm.sync.whole(played.servers, played.states[:n]), mean, atol=1e-11)


def test_the_rule_steps_from_the_model_and_moves_the_sum() -> None:
    n = 3
    steps = torch.zeros(12, dtype=torch.float64)

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        found = _gradient(rank, batch, w)
        steps.add_(found, alpha=0.02)
        return found

    algorithm = _of(AsyncPushSum())
    played = Scattered(algorithm, gradient, _starts(n), seed=5, batches=12, lr=0.02).run()
    whole = algorithm.sync.whole(played.servers, played.states[:n])
    _close(whole, (torch.stack(_starts(n)).sum(0) - steps) / n, atol=1e-11)


def test_weight_decay_is_of_the_model_and_not_of_the_sum() -> None:
    algorithm = _of(AsyncPushSum(), rule=SGD(weight_decay=0.5))
    clock = simulated(algorithm, _nothing, _start(), 1, lr=0.1)
    clock.states[1].update(weight=2.0, params=2 * _start())
    clock.play(1)
    _close(clock.states[1]["params"], (2 - 0.05) * _start())


def test_a_worker_far_ahead_keeps_what_its_steps_are_divided_by() -> None:
    compute = Heterogeneous(seconds=1.0, slow_fraction=0.5, slow_factor=500.0)
    clock = simulated(_of(AsyncPushSum()), _gradient, _start(), 2, compute=compute)
    clock.play(100)
    assert max(state["step"] for state in clock.states[2:]) > 190
    assert min(state["weight"] for state in clock.states[2:]) >= 0.25
    models = [clock.algorithm.sync.model(state) for state in clock.states[2:]]
    assert torch.stack(models).norm() < 10


# The run ---------------------------------------------------------------------------------------


@each_member
def test_nobody_waits_and_the_rate_goes_by_the_steps_of_all(sync) -> None:
    """All keepers reckon about the steps that the run did, however fast their workers are."""
    records = []
    clock = simulated(
        _of(sync),
        _gradient,
        _start(),
        4,
        compute=Heterogeneous(seconds=1.0, slow_fraction=0.25, slow_factor=5.0),
        lr=lambda step: 1e-3 / (1 + step),
        on_record=lambda _me, record, _now_s: records.append(record),
    )
    clock.play(40)
    steps = sorted(state["step"] for state in clock.states[4:])
    assert steps[0] * 4 < steps[1]
    assert sum(steps) == len(records) == 160
    for record in records[-8:]:
        assert 30 <= record.step <= 50
        assert record.lr == pytest.approx(1e-3 / record.step)
    assert all(record.delays[0] >= 0 for record in records)
    assert any(record.delays[0] > 0 for record in records)


@each_member
def test_between_a_worker_and_its_keeper_nothing_is_sent(sync) -> None:
    clock = simulated(
        _of(sync),
        _gradient,
        _start(),
        1,
        compute=Constant(seconds=1.0),
        network=Uniform(latency_s=9.0),
    )
    clock.play(5)
    assert clock.clock.now_s == 5.0
    assert clock.sent_bytes == [0, 0]


@each_member
def test_keepers_use_the_links_of_their_workers(sync) -> None:
    def took(network) -> list[float]:
        clock = simulated(_of(sync), _gradient, _start(), 4, network=network)
        clock.play(20)
        clock.drain()
        return [state["version"] - state["step"] for state in clock.states[4:]]

    apart = Hosts(per_host=2, latency_s=1e4, inside_latency_s=1e-4)
    one = Hosts(per_host=4, latency_s=1e4, inside_latency_s=1e-4)
    fast = SlowLinks(latency_s=0.0, slow=())
    slow = SlowLinks(latency_s=0.0, slow=(0,), slow_factor=1e12)
    assert sum(took(apart)) < sum(took(one))
    assert sum(took(slow)) < sum(took(fast))


@each_member
def test_what_is_of_gradients_that_travel_is_refused(sync) -> None:
    for more, path in (
        ({"topology": Gossip()}, "topology"),
        ({"aggregate": MajorityVote()}, "aggregate"),
        ({"feedback": ErrorFeedback()}, "feedback"),
        ({"compress": TopK()}, "compress"),
    ):
        (found,) = _of(sync, **more).check()
        assert found.path == f"data_parallel.{path}.kind"
    assert not _of(sync, rule=AdamW()).check()
    (found,) = _of(type(sync)(graph=TorusGraph(rows=4))).refused(6)
    assert found.path == "data_parallel.sync.graph.rows"
