"""Experts dealt out to several devices: searched, checked, written, explained, and not run."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from drawn import graph_of
from experts_toy import EXPERT, draft, figures, routed
from instances import brute_force_s
from planner_toy import cluster, workload
from polyreme import api
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan import store
from polyreme.plan.check import check
from polyreme.plan.describe import describe
from polyreme.plan.explain import text
from polyreme.plan.export import TOOLS, export
from polyreme.plan.grid import even_split, grid_of
from polyreme.plan.options import Parallel
from polyreme.planner.draft import Strategy, read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.outline import outlines
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.planner.solve import known
from polyreme.planner.solve.exact import exact
from polyreme.planner.space import write_plan
from polyreme.report.plan_words import glossary
from polyreme.runtime.making import grid_for

replace = msgspec.structs.replace
GRAPH = routed()
HEAVY = routed(inner=1024, experts=8)  # of 790 thousand elements a block, 3 are no expert's
UNLIKE = Parallel(layouts="unlike", tp=1, pp=1)
BLOCKS = ("block.0", "block.1")
DEALT = Strategy(shard=4, ep=4, level="grads")


def _dealt(plan) -> dict[str, int]:
    return {name: each.ep for name, each in read_draft(plan).strategies.items()}


def _searched(parallel: Parallel, *, batch: int = 8, memory_bytes: int = 2**30, **rates: float):
    where = cluster(4, memory_bytes=memory_bytes)
    return search(HEAVY, where, figures(HEAVY, **rates), workload(batch), parallel, top=2)


# What wins


def test_experts_that_do_not_fit_and_are_slow_to_gather_are_dealt_out():
    """25 MB of states; a fourth of them stays in its place, and few tokens go to it."""
    rates = {"bytes_s": 1e8, "routed_bytes_s": 1e8, "memory_bytes": 22 * 10**6}
    (best, *_) = _searched(UNLIKE, **rates)
    assert [_dealt(best)[name] for name in BLOCKS] == [4, 4]
    whole = _searched(replace(UNLIKE, ep=1), **rates)[0]
    assert set(_dealt(whole).values()) == {1}
    assert best.estimate.step_s < 0.5 * whole.estimate.step_s
    with pytest.raises(Infeasible):
        _searched(replace(UNLIKE, ep=1, level="none"), **rates)
    with pytest.raises(Infeasible, match=r"Ways out: parallel\.ep = [24];"):
        _searched(replace(UNLIKE, ep=1), memory_bytes=20 * 10**6)
    (alike, *_) = _searched(replace(UNLIKE, layouts=None), **rates)
    assert alike.estimate.step_s >= whole.estimate.step_s


def test_slow_links_keep_tokens_where_they_are():
    (best, *_) = _searched(UNLIKE, routed_bytes_s=1e5)
    assert set(_dealt(best).values()) == {1}
    (other, *_) = _searched(UNLIKE, routed_bytes_s=1e12)
    assert max(_dealt(other).values()) > 1


def test_a_fixed_number_holds_for_all_layers_that_have_experts():
    for ep in (1, 2, 4):
        plans = _searched(replace(UNLIKE, ep=ep), routed_bytes_s=1e5)
        for plan in plans:
            assert _dealt(plan) == {"embed": 1, "block.0": ep, "block.1": ep, "head": 1}
        assert f"{ep} ep" in describe(plans[0]) or ep == 1
    staged = _searched(replace(UNLIKE, ep=2, pp=2, replica=1, shard=2))[0]
    assert _dealt(staged) == {"embed": 1, "block.0": 2, "block.1": 2, "head": 1}
    assert len(staged.stages) == 2


def test_shards_that_split_nothing_but_experts_are_no_replicas():
    for parallel in (UNLIKE, replace(UNLIKE, level="none")):
        (space, *_) = spaces(GRAPH, cluster(4), workload(8), parallel)
        whole = {each.ep for each in space.strategies if each.level == "none" and each.shard == 4}
        assert whole == ({2, 4} if parallel.level is None else {1, 2, 4})
    (best, *_) = _searched(replace(UNLIKE, level="none", ep=4))
    assert _dealt(best)["block.0"] == 4
    (alike, *_) = spaces(GRAPH, cluster(4), workload(8), Parallel(level="none"))
    assert {each.shard for each in alike.strategies} == {1}


@pytest.mark.parametrize("name", sorted(known.SOLVERS))
def test_every_solver_gives_layers_what_they_may_have(name):
    fixed = replace(UNLIKE, replica=1, shard=4, microbatch=1, cp=1)
    given = GRAPH, cluster(4), figures(GRAPH, routed_bytes_s=1e9), workload(8)
    plans = search(*given, fixed, top=3, solver=name)
    best = search(*given, fixed, top=1)[0]
    for plan in plans:
        assert {_dealt(plan)[end] for end in ("embed", "head")} == {1}
        assert plan.estimate.step_s >= best.estimate.step_s * (1 - 1e-9)
    assert max(_dealt(plans[0]).values()) > 1


def test_layers_deal_out_as_their_own_experts_divide():
    offered = list(spaces(GRAPH, cluster(8), workload(8), UNLIKE))
    assert {each.ep for space in offered for each in space.strategies} == {1, 2, 4}
    (space, *_) = offered
    assert all(each.shard % each.ep == 0 for each in space.strategies)
    how = Strategy(shard=8, ep=4)
    assert space.allows("block.0", how)
    assert not space.allows("embed", how)
    drafts = [each for each in space.drafts() if each.deals_out]
    assert drafts
    assert {each.strategies["embed"].ep for each in drafts} == {1}


def test_no_other_search_deals_out_experts():
    for graph, parallel in ((GRAPH, Parallel()), (graph_of("llama"), UNLIKE)):
        offered = spaces(graph, cluster(4), workload(8), parallel)
        assert {each.ep for space in offered for each in space.strategies} == {1}


# The numbers that solvers are given


def _outlines(prices: Prices, pp: int = 1):
    fixed = replace(UNLIKE, pp=pp, cp=1, replica=1, shard=4 // pp)
    (space,) = spaces(GRAPH, cluster(4), workload(8), fixed)
    return list(outlines(space))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_best_assignment_is_that_of_every_one_tried(pp, share):
    """Strategies that no layer but the best has are left out, so that all can be tried."""
    prices = Prices(GRAPH, cluster(4), figures(GRAPH, routed_bytes_s=5e7), workload(8))
    kept = [
        Strategy(shard=4 // pp, ep=ep, level=level) for ep in (1, 2) for level in ("none", "params")
    ]
    kept.append(replace(kept[0], recompute=True))
    for outline in _outlines(prices, pp)[:2]:
        few = replace(outline, strategies=tuple(kept))
        instance = prices.of(1).instance(few)
        least, most = (
            choose(np.where(np.isfinite(instance.time), instance.memory, fill), axis=2).sum(axis=1)
            for choose, fill in ((np.min, np.inf), (np.max, -np.inf))
        )
        capacity = (least + share * (most - least)) / pp * (1.2 if pp > 1 else 1.0)
        tight = type(instance)(
            **{
                name: getattr(instance, name)
                for name in ("time", "memory", "inside", "between", "alpha", "beta")
            },
            capacity=capacity,
        )
        found = exact(tight)
        assert found.objective_s == pytest.approx(brute_force_s(tight))
        assert np.isfinite(found.objective_s)
        ways = {few.strategies[k].ep for k in found.strategies}
        assert ways <= {1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_an_instance_s_objective_is_what_the_step_of_its_draft_takes(seed):
    """Where nothing is hidden, and nothing takes time to start."""
    rng = np.random.default_rng(seed)
    prices = Prices(GRAPH, cluster(4), figures(GRAPH), workload(8))
    for outline in _outlines(prices):
        instance = prices.of(1).instance(outline)
        legal = [np.flatnonzero(np.isfinite(row)) for row in instance.time[0]]
        chosen = [int(rng.choice(ways)) for ways in legal]
        strategies = dict(
            zip(outline.space.layers, (outline.strategies[k] for k in chosen), strict=True)
        )
        given = outline.space.draft(strategies, outline.microbatches)
        if not given.deals_out:
            continue
        objective_s = instance.objective_s([0] * len(chosen), chosen)
        assert objective_s == pytest.approx(prices.of(1).cost(given).step_s, rel=1e-6)
        held = instance.stage_times([0] * len(chosen), chosen)[2]
        (lacking,) = prices.of(1).fitting.shortfalls(given)
        assert held[0] - instance.capacity[0] <= lacking + 1


def test_unlike_layouts_price_a_dealt_layer_as_it_is_alone():
    prices = Prices(GRAPH, cluster(4), figures(GRAPH), workload(8))
    given = draft(GRAPH, Strategy(shard=4, ep=4, recompute=True))
    mixed = replace(given, strategies={**given.strategies, "head": Strategy(replica=2, shard=2)})
    whole = {name: replace(each, ep=1) for name, each in mixed.strategies.items()}
    plain = replace(mixed, strategies=whole)
    assert not mixed.is_alike
    one = prices.of(1).cost

    def passes_s(of) -> float:
        return sum(sum(one.passes_s(each, of.strategies[each], 2, 1)) for each in BLOCKS)

    cost, fitting = prices.unlike.cost, prices.unlike.fitting
    before, after = cost.costs(plain), cost.costs(mixed)
    more_s = sum(after.forward + after.inputs + after.weights)
    more_s -= sum(before.forward + before.inputs + before.weights)
    assert more_s == pytest.approx(passes_s(mixed) - passes_s(plain))
    assert more_s > 0
    assert cost(mixed).compute_s == pytest.approx(cost(plain).compute_s)
    own, all_of_it = fitting(mixed).need_bytes, fitting(plain).need_bytes
    experts = 2 * 4 * EXPERT * 4  # of two blocks, in fp32
    assert all_of_it["parameters"] - own["parameters"] == experts * 3 // 4


# What is refused


@pytest.mark.parametrize(
    ("graph", "parallel", "says"),
    [
        (GRAPH, replace(UNLIKE, ep=3), r"does not divide the 4 experts .* Legal: 1, 2, 4\."),
        (graph_of("llama"), replace(UNLIKE, ep=2), r"no layer has experts\. Legal: 1\."),
        (
            GRAPH,
            replace(UNLIKE, ep=4, shard=2),
            r"does not divide the 2 devices that share .* Legal: 1, 2\.",
        ),
        (routed(experts=8), replace(UNLIKE, ep=8), r"exceeds the devices of a stage, 4"),
        (GRAPH, replace(UNLIKE, tp=2), r"cannot be split"),
        (GRAPH, Parallel(ep=2), r"is not executable yet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(graph, parallel, says):
    with pytest.raises(ConfigError, match=says):
        list(spaces(graph, cluster(4), workload(8), parallel))


def test_plans_alone_may_deal_out_experts():
    (said,) = Parallel(ep=2).check()
    assert said.path == "parallel.ep"
    assert "planned, but not executable yet" in said.rule
    assert not replace(UNLIKE, ep=2).check()


def _plan(how: Strategy = DEALT):
    return write_plan(draft(GRAPH, how), workload(8))


@pytest.mark.parametrize(
    ("name", "ep", "says"),
    [("embed", 2, "this layer has none"), ("block.1", 8, "does not divide this layer's 4 experts")],
)
def test_a_plan_that_deals_out_what_there_is_not_is_refused(name, ep, says):
    where = cluster(8)
    plan = _plan(Strategy(shard=8, ep=4, level="grads"))
    assert not check(plan, GRAPH, where, unlike=True)
    how = replace(Strategy(shard=8), ep=ep).degrees
    layer = replace(plan.layer_plans[name], split=even_split(range(8), how))
    wrong = replace(plan, layer_plans={**plan.layer_plans, name: layer})
    found = check(wrong, GRAPH, where, unlike=True)
    assert [each.path for each in found] == [f"plan.layer_plans.{name}.split"]
    assert says in found[0].rule


def test_nothing_runs_such_a_plan():
    plan = _plan()
    assert not check(plan, GRAPH, cluster(4), unlike=True)
    found = check(plan, GRAPH, cluster(4))
    assert found
    assert all("needs ep, which is not executable yet" in each.rule for each in found)
    with pytest.raises(ConfigError, match="deal out experts"):
        grid_for(plan)


# From a plan to its files


def test_a_plan_is_the_same_when_it_is_read_again(tmp_path):
    plans = _searched(replace(UNLIKE, ep=4, microbatch=1))
    given = HEAVY, cluster(4), figures(HEAVY), workload(8)
    assert price(*given, plans[0]).estimate == plans[0].estimate
    assert "experts are dealt out: planned, not executable yet" in text(plans)
    assert "unlike each other" not in text(plans)
    assert "4 ep" in dict(glossary(plans[0]))
    path = tmp_path / "plan.json"
    store.save(plans[0], path, plans)
    assert store.load(path) == plans[0]
    api.explain(path, out=tmp_path / "plan.html", trace=tmp_path / "trace.json")
    assert "4 ep" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert grid_of(plans[0]).shard == 4


def test_megatron_is_told_and_others_say_why_not(tmp_path):
    plan = _plan(Strategy(replica=2, shard=4, ep=2, level="optimizer"))
    flags = export(plan, TOOLS["megatron"]).text
    store.save(plan, tmp_path / "plan.json")
    assert api.export(tmp_path / "plan.json", "megatron").text == flags
    assert "--expert-model-parallel-size 2\n" in flags
    assert "--moe-token-dispatcher-type alltoall\n" in flags
    whole = export(_plan(Strategy(shard=4, level="optimizer")), TOOLS["megatron"]).text
    assert "expert" not in whole
    for name in ("torchtitan", "deepspeed", "accelerate"):
        with pytest.raises(ConfigError, match="devices have experts dealt out"):
            export(plan, TOOLS[name])
    odd = replace(plan, layer_plans={**plan.layer_plans, "block.0": plan.layer_plans["embed"]})
    with pytest.raises(ConfigError, match="numbers of ep differ by layer"):
        export(odd, TOOLS["megatron"])
