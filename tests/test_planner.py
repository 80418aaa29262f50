"""The planner: what is offered, what it costs by hand, which plan wins and why others lose."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec
import pytest

from planner_toy import MS, cluster, profile, toy, toy_draft, workload
from polyreme.api import steps
from polyreme.errors import ConfigError, Infeasible
from polyreme.graph.layer import LayerGraph
from polyreme.plan.check import check
from polyreme.plan.explain import HEADER, lost, rows, summary, text
from polyreme.plan.ir import MEMORY_CAUSES, LayerPlan, Plan
from polyreme.plan.options import Parallel
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.planner.draft import Strategy, read_draft
from polyreme.planner.room import Fitting
from polyreme.planner.search import price, search
from polyreme.planner.space import offer, write_plan
from polyreme.units import show_bytes

GRAPH = toy()  # embed, block, normed block, head tied to embed: 4 layers, 3 units
replace = msgspec.structs.replace


def _search(parallel: Parallel | None = None, *, n=4, batch=12, top=5, memory=2**30, **figures):
    return search(
        GRAPH,
        cluster(n, memory_bytes=memory),
        profile(**figures),
        workload(batch),
        parallel or Parallel(),
        top=top,
    )


# The space


def test_only_what_the_user_left_open_is_offered():
    parallel = Parallel(replica=1, shard=3, level="grads", recompute="all", microbatch=2)
    drafts = list(offer(GRAPH, cluster(4), workload(), parallel).drafts())
    assert len(drafts) == 1
    strategy = drafts[0].strategies["embed"]
    assert strategy == Strategy(replica=1, shard=3, level="grads", recompute=True)
    assert (drafts[0].microbatches, drafts[0].microbatch) == (2, 2)


def test_a_layer_with_batch_statistics_sees_all_samples_of_a_rank_once():
    """Smaller microbatches or a second forward pass would change what BatchNorm computes."""
    first, *rest = GRAPH.layers
    normed = LayerGraph(
        name="normed",
        layers=(replace(first, batch_statistics=True), *rest),
        inputs=GRAPH.inputs,
        output=GRAPH.output,
        builder=GRAPH,
    )
    drafts = list(offer(normed, cluster(2), workload(), Parallel(recompute="all")).drafts())
    assert {draft.microbatches for draft in drafts} == {1}
    for draft in drafts:
        recomputed = {name for name, how in draft.strategies.items() if how.recompute}
        assert recomputed == {layer.name for layer in rest}
    fixed = offer(normed, cluster(2), workload(), Parallel(microbatch=2))
    assert {draft.microbatch for draft in fixed.drafts()} == {2}
    plan = write_plan(next(iter(drafts)), workload())
    again = replace(plan.layer_plans[first.name], recompute=True)
    wrong = replace(plan, layer_plans={**plan.layer_plans, first.name: again})
    assert [v.path for v in check(wrong, normed, cluster(2))] == [
        f"plan.layer_plans.{first.name}.recompute"
    ]


def test_degrees_need_not_be_powers_of_two_and_devices_may_stay_unused():
    drafts = list(offer(GRAPH, cluster(6), workload(), Parallel()).drafts())
    meshes = {(s.replica, s.shard) for d in drafts for s in d.strategies.values()}
    assert {(6, 1), (2, 3), (3, 2), (1, 6), (5, 1), (1, 5)} <= meshes
    assert all(d.microbatches <= 12 // d.n_devices for d in drafts)
    levels = {(s.shard > 1, s.level) for d in drafts for s in d.strategies.values()}
    assert (True, "none") not in levels
    assert (False, "params") not in levels


def test_what_a_layer_forbids_is_never_offered():
    head = GRAPH.layers[-1]
    layers = (*GRAPH.layers[:-1], replace(head, splits={"shard": 2}))
    builder = GRAPH._builder
    graph = type(GRAPH)(
        name="toy", layers=layers, inputs=GRAPH.inputs, output=GRAPH.output, builder=builder
    )
    drafts = offer(graph, cluster(4), workload(), Parallel()).drafts()
    assert {s.shard for d in drafts for s in d.strategies.values()} == {1, 2}
    with pytest.raises(ConfigError, match=r"parallel\.shard: 4 exceeds what layer"):
        offer(graph, cluster(4), workload(), Parallel(shard=4))


@pytest.mark.parametrize(
    ("parallel", "paths"),
    [
        (Parallel(tp=2, sp=True), {"parallel.tp"}),
        (Parallel(cp=2, ep=2), {"parallel.cp", "parallel.ep"}),
        (Parallel(pp=8), {"parallel.pp"}),
        (Parallel(pp=4, stages=(1, 1, 1, 9)), {"parallel.stages"}),
        (Parallel(order="1F1B", shard=5), {"parallel.order", "parallel.shard"}),
        (Parallel(replica=2, shard=3), {"parallel.shard"}),
        (Parallel(level="params", shard=1), {"parallel.level"}),
        (Parallel(microbatch=13), {"parallel.microbatch"}),
        (Parallel(replica=3, shard=1, microbatch=5), {"parallel.microbatch"}),
    ],
)
def test_impossible_fixes_are_all_reported(parallel, paths):
    with pytest.raises(ConfigError) as caught:
        offer(GRAPH, cluster(4), workload(), parallel)
    assert {violation.path for violation in caught.value.violations} == paths


def test_a_batch_smaller_than_the_degrees_is_reported():
    with pytest.raises(ConfigError, match=r"parallel\.replica: 4 leaves a device without a sample"):
        offer(GRAPH, cluster(4), workload(3), Parallel(replica=4))


def test_a_fixed_microbatch_is_met_exactly():
    drafts = offer(GRAPH, cluster(4), workload(), Parallel(microbatch=3)).drafts()
    assert {(d.n_devices, d.microbatches) for d in drafts} == {(1, 4), (2, 2), (4, 1)}


# The search


def test_plans_are_best_first_pass_the_check_and_carry_their_record():
    plans = _search(collective_ms=0.01)
    times = [plan.estimate.step_s for plan in plans]
    assert len(plans) == 5
    assert times == sorted(times)
    for plan in plans:
        assert check(plan, GRAPH, cluster(4), workload()) == []
        assert len(plan.estimate.memory) == len(plan.order)
    record = plans[0].search
    assert record.proved
    assert record.objective_s <= record.bound_s * (1 + 1e-9)
    assert len(record.rejected) == record.candidates - 1
    assert all(plan.search is None for plan in plans[1:])


def test_ties_go_to_the_simpler_plan():
    (plan,) = _search(top=1, collective_ms=0)
    draft = read_draft(plan)
    assert draft.strategies["embed"] == Strategy(replica=4)
    assert draft.microbatches == 1
    reasons = {entry.reason for entry in plan.search.rejected}
    assert any(reason.startswith("as fast") for reason in reasons)


def test_slow_links_leave_devices_unused_and_say_so():
    (plan,) = _search(top=1, collective_ms=1000)
    assert read_draft(plan).n_devices == 1
    assert plan.search.unused_devices == (1, 2, 3)
    assert "3 devices stay unused (1 to 3)" in summary([plan])


def test_what_does_not_fit_loses_by_name():
    wide = _search(top=1, saved_bytes=10000)[0].estimate
    need = sum(wide.peak_bytes.values())
    (plan,) = _search(top=1, saved_bytes=10000, memory=need - 1)
    assert sum(plan.estimate.peak_bytes.values()) < need
    reasons = [entry.reason for entry in plan.search.rejected]
    assert any(
        reason.startswith("does not fit: ") and "on device 0 (activations" in reason
        for reason in reasons
    )
    assert any(reason.startswith("slower: ") for reason in reasons)


def test_no_other_plan_of_the_space_is_faster_and_fits():
    """Against a plain loop over plans, each priced on its own."""
    memory = 30_000
    best = _search(top=1, memory=memory, saved_bytes=2000, collective_ms=2)[0]
    space = offer(GRAPH, cluster(4), workload(), Parallel())
    figures = profile(saved_bytes=2000, collective_ms=2)
    prices = []
    for draft in space.drafts():
        plan = price(GRAPH, cluster(4), figures, workload(), write_plan(draft, workload()))
        if max(sum(causes.values()) for causes in plan.estimate.memory) <= memory:
            prices.append(plan.estimate.step_s)
    assert 0 < len(prices) < best.search.candidates
    assert best.estimate.step_s == pytest.approx(min(prices))


def test_infeasible_names_layer_causes_and_ways_that_work():
    fixed = Parallel(microbatch=3, recompute="none", level="none", pp=1)
    with pytest.raises(Infeasible) as caught:
        _search(fixed, saved_bytes=20000, memory=200_000)
    error = caught.value
    assert error.layer in {layer.name for layer in GRAPH.layers}
    assert error.device == "device 0 (round)"
    assert tuple(error.need_bytes) == MEMORY_CAUSES
    assert sum(error.need_bytes.values()) > error.have_bytes == 200_000
    assert "parallel.microbatch = 2" in error.ways_out
    assert 'parallel.recompute = "all"' in error.ways_out
    assert not any("level" in way for way in error.ways_out)
    assert _search(replace(fixed, microbatch=2), saved_bytes=20000, memory=200_000)
    assert _search(replace(fixed, recompute="all"), saved_bytes=20000, memory=200_000)
    with pytest.raises(Infeasible):
        _search(replace(fixed, level=None), saved_bytes=20000, memory=200_000)


def test_infeasible_offers_devices_and_memory_that_suffice():
    deep = toy(6)

    def find(n_devices: int, memory_bytes: int) -> tuple[Plan, ...]:
        where = cluster(n_devices, memory_bytes=memory_bytes)
        return search(deep, where, profile(saved_bytes=10), workload(64), Parallel(), top=1)

    def need(batch: int) -> int:
        fitting = Fitting(Memory(deep, workload(batch)), profile(saved_bytes=10), cluster(1))
        drafts = offer(deep, cluster(1), workload(batch), Parallel()).drafts()
        return min(sum(fitting(draft).need_bytes.values()) for draft in drafts)

    least, of_one_sample = need(64), need(1)
    assert of_one_sample < least  # its gradients come when saved tensors go
    with pytest.raises(Infeasible) as caught:
        find(1, of_one_sample - 1)
    ways = caught.value.ways_out
    assert "2 devices" in ways
    assert len(ways) >= 3
    (both,) = [way for way in ways if way.endswith("memory each")]
    assert both.startswith("2 devices with at least")
    assert ways[-1] == f"devices with at least {show_bytes(least)} of memory"
    assert find(2, of_one_sample - 1)
    assert find(1, least)


def test_a_given_plan_is_priced_as_the_search_prices_it():
    plan = _search(top=1)[0]
    bare = replace(plan, estimate=None, search=None, inputs_hash="")
    priced = price(GRAPH, cluster(4), profile(), workload(), bare)
    assert priced.estimate == plan.estimate
    assert priced.inputs_hash == plan.inputs_hash


def test_layers_that_differ_are_priced_each_its_own_way():
    names = [layer.name for layer in GRAPH.layers]
    plain, again = Strategy(replica=2), Strategy(replica=2, recompute=True)
    mixed = replace(
        toy_draft(replica=2), strategies={**dict.fromkeys(names, plain), "block.0": again}
    )
    figures = {"collective_ms": 0}
    memory = Memory(GRAPH, workload(mixed.global_batch))
    cost = DataCost(memory, profile(**figures), cluster(8))
    assert cost(mixed).step_s == pytest.approx((4 * 6 * 4 + 6) * MS)
    assert read_draft(write_plan(mixed, workload())) == mixed


def test_a_plan_over_other_axes_cannot_be_priced():
    plan = _search(top=1)[0]
    odd = {**plan.layer_plans}
    split = odd["embed"].split
    odd["embed"] = LayerPlan(split=replace(split, axis="rows"))
    with pytest.raises(ConfigError, match=r"plan\.layer_plans\.embed\.split"):
        price(GRAPH, cluster(4), profile(), workload(), replace(plan, layer_plans=odd))


# In words


def test_every_candidate_is_explained():
    plans = _search(collective_ms=2)
    table = rows(plans)
    assert len(table) == 5
    assert all(len(row) == len(HEADER) for row in table)
    assert [row[-1] == "" for row in table] == [True, False, False, False, False]
    assert len(lost(plans)) == plans[0].search.candidates - 5
    said = text(plans, most_lost=3)
    assert f"and {plans[0].search.candidates - 8} more" in said
    assert "objective proved least" in said


def test_a_plan_without_estimate_has_an_empty_row():
    plan: Plan = replace(_search(top=1)[0], estimate=None, search=None)
    assert rows([plan])[0][1:] == ("",) * (len(HEADER) - 1)
    assert lost([plan]) == []
    assert summary([plan]) == "priced, not searched"


def test_a_search_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(steps, "_SAID_EVERY_S", 0.0)
    spec = SimpleNamespace(parallel=Parallel())
    posed = SimpleNamespace(graph=GRAPH, cluster=cluster(4), workload=workload(12), spec=spec)
    steps.best_plans(posed, profile(), all_devices=False)
    assert not capsys.readouterr().err
    steps.best_plans(posed, profile(), all_devices=False, progress=True)
    said = capsys.readouterr().err.splitlines()
    assert "0 of at most 20 plans found" in said[0]
    later = r"searching for \d+ s: [1-9]\d* of at most 20 plans found, \d+ ways open"
    assert any(re.search(later, line) for line in said)
    assert "tuning what is exchanged in " in said[-1]
