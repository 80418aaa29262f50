"""The whole search: stages, strategies that differ by layer, and what people do by hand."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from drawn import graph_of
from planner_toy import cluster, profile, toy, workload
from polyreme.errors import ConfigError
from polyreme.plan.check import check
from polyreme.plan.explain import summary, text, unused
from polyreme.plan.grid import Degrees
from polyreme.plan.ir import Costs
from polyreme.plan.options import Parallel
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import bottleneck_s
from polyreme.plan.order.one_f_one_b import OneFOneB
from polyreme.planner import judge
from polyreme.planner import search as search_module
from polyreme.planner.cost import pipeline
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.exchange import usual
from polyreme.planner.cost.layers import in_flight
from polyreme.planner.cost.memory import Memory
from polyreme.planner.draft import Strategy
from polyreme.planner.hybrid import spaces
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.planner.space import write_plan

GRAPH = toy(4, tied=False)
replace = msgspec.structs.replace


def _search(parallel=None, *, n=4, batch=12, memory=2**30, graph=GRAPH, top=1, **figures):
    return search(
        graph,
        cluster(n, memory_bytes=memory),
        profile(**figures),
        workload(batch),
        parallel or Parallel(),
        top=top,
    )


def _need(plan):
    return max(sum(causes.values()) for causes in plan.estimate.memory)


def test_what_one_sample_leaves_no_other_way_is_split_into_stages():
    """One sample has one data rank, and these layers have no tensor parts."""
    whole = _search(Parallel(pp=1), batch=1)[0]
    (plan,) = _search(batch=1, memory=_need(whole) * 9 // 10)
    assert len(plan.stages) > 1
    assert _need(plan) < _need(whole)
    assert plan.search.proved


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slice(4)
def test_no_plan_by_hand_is_faster(seed):
    rng = np.random.default_rng(seed)
    n, batch = int(rng.integers(2, 9)), int(rng.integers(4, 17))
    figures = {
        "saved_bytes": int(rng.integers(100, 5000)),
        "collective_ms": float(rng.uniform(0, 3)),
        "overlap": float(rng.uniform()),
    }
    where = cluster(n, memory_bytes=int(rng.integers(15_000, 60_000)))
    given = GRAPH, where, profile(**figures), workload(batch)
    best = search(*given, Parallel(), top=1)[0].estimate.step_s
    by_hand = []
    ordered = Prices(*given).of(1).cost.ordered
    for space in spaces(GRAPH, where, workload(batch), Parallel()):
        for draft in itertools.islice(space.drafts(), 0, None, 5):
            plan = price(*given, write_plan(ordered(draft), workload(batch)))
            if _need(plan) <= where.device_types["round"].memory_bytes:
                by_hand.append(plan.estimate.step_s)
    assert by_hand
    assert best <= min(by_hand) * (1 + 1e-9)


def test_layers_run_unlike_where_memory_is_left_for_some():
    """Between what all layers need and what all need recomputed, some are recomputed."""
    fixed = Parallel(replica=1, shard=1, pp=1, microbatch=12)
    figures = {"saved_bytes": 20_000}
    kept = _search(replace(fixed, recompute="none"), n=1, **figures)[0]
    again = _search(replace(fixed, recompute="all"), n=1, **figures)[0]
    between = (_need(kept) + _need(again)) // 2
    (plan,) = _search(fixed, n=1, memory=between, **figures)
    recomputed = sum(each.recompute for each in plan.layer_plans.values())
    assert 0 < recomputed < len(GRAPH.layers)
    assert kept.estimate.step_s < plan.estimate.step_s < again.estimate.step_s


def test_strategies_that_make_no_difference_are_not_mixed():
    """A level costs the same in each microbatch where there is one."""
    for memory in (2**30, 40_000, 25_000):
        (plan,) = _search(Parallel(shard=4, recompute="none"), memory=memory, top=1)
        assert len({each.level for each in plan.layer_plans.values()}) == 1


def test_stages_that_the_user_fixed_stay():
    with pytest.raises(ConfigError, match=r"has 8 layers, and the model has 7"):
        _search(Parallel(pp=3, stages=(1, 5, 2)))
    (plan,) = _search(Parallel(pp=3, stages=(1, 4, 2)))
    assert [len(stage.layers) for stage in plan.stages] == [1, 4, 2]


def test_devices_that_were_asked_for_are_all_used():
    given = GRAPH, cluster(4), profile(collective_ms=1000), workload(12)
    (lone,) = search(*given, Parallel(), top=1)
    (plan,) = search(*given, Parallel(), top=1, all_devices=True)
    assert lone.search.unused_devices
    assert not plan.search.unused_devices
    assert check(plan, GRAPH, cluster(4), workload(12)) == []


def test_of_equal_plans_the_plainer_wins():
    """Where exchanges take no time, neither shards nor stages gain anything."""
    (plan,) = _search(Parallel(replica=2), n=2, collective_ms=0)
    assert len(plan.stages) == 1
    assert {(each.level, each.recompute) for each in plan.layer_plans.values()} == {("none", False)}


def test_train_says_which_devices_it_leaves_unused():
    (plan,) = _search(collective_ms=1000)
    assert unused(plan) == ("3 devices stay unused (1 to 3)",)
    assert unused(_search(Parallel(replica=4), collective_ms=1000)[0]) == ()


def test_groups_spread_over_the_hosts_that_they_lie_on():
    """Tensor parts lie beside each other, replicas a host apart, stages farthest."""
    memory = Memory(GRAPH, workload())
    cost = DataCost(memory, profile(), cluster(4, 4, 4, 4))

    def hosts(pp: int = 1, **degrees: int) -> dict[str, int]:
        return dict(cost._n_hosts(Degrees(**degrees), pp))

    assert hosts(replica=2, tp=4) | {"holders": 0} == {
        "parts": 1,
        "contexts": 1,
        "shards": 1,
        "replicas": 2,
        "data": 2,
        "stages": 1,
        "holders": 0,
    }
    assert hosts(2, shard=4, tp=2)["shards"] == 2
    assert hosts(2, tp=8)["parts"] == 2
    assert hosts(2, shard=2, tp=2)["stages"] == 2
    assert hosts(2, shard=2)["stages"] == 1
    assert hosts(cp=2, tp=4)["contexts"] == 2
    assert hosts(replica=2, cp=2, tp=2)["contexts"] == 1


@pytest.mark.parametrize("name", [n for n, o in ORDERS.items() if o.in_flight(0, 4, 8) is None])
def test_of_many_microbatches_as_many_are_alive_as_of_some(name):
    """Orders that are listed took minutes for hundreds of microbatches, to say the same."""
    order, pp = ORDERS[name], 2
    n_stages = len(order.placements(pp))
    counts = [n for n in (25, 26, 31, 40, 41) if not order.refused(pp, n)]
    for n in counts:
        most = [1] * n_stages
        for own in order.actions(pp, n, Costs.equal(n_stages)):
            held = [0] * n_stages
            for action in own:
                held[action.stage] += (action.kind == "F") - (action.kind in "BW")
                most[action.stage] = max(most[action.stage], held[action.stage])
        assert in_flight(order, pp, n_stages, n) == most
    assert counts


def test_every_number_of_pipeline_ranks_is_offered():
    found = list(spaces(GRAPH, cluster(6), workload(), Parallel()))
    assert [space.pp for space in found] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("slope", "gain"), [(0.0, 1.0), (1.0, 2.0)])
def test_tensor_parts_save_only_what_shrinks_with_the_work(slope, gain):
    """Where starting kernels takes all the time, half the features take as long."""
    graph = graph_of("llama tied")
    figures = profile(collective_ms=0)
    sizes = (1, 2, 64)
    seconds = tuple(1 + slope * (size - 1) for size in sizes)
    times = replace(
        figures.layers["block"], microbatch=sizes, forward_s=seconds, backward_s=seconds
    )
    kinds = {layer.kind for layer in graph.layers}
    given = replace(figures, layers=dict.fromkeys(kinds, times))
    costs = Prices(graph, cluster(2), given, workload())
    block = graph.layers[1].name
    for size in (1, 4):
        whole, part = (
            sum(costs.of(tp).cost.passes_s(block, Strategy(tp=tp), size, 1)) for tp in (1, 2)
        )
        assert whole / part == pytest.approx(gain)


def test_a_sketch_is_near_what_is_played_and_never_below():
    """Long steps are ranked by it: 1F1B's closed form, with the same exchanges."""
    given = GRAPH, cluster(4), profile(collective_ms=0), workload(24)
    cost = Prices(*given).of(1).cost
    for space in spaces(*given[:2], workload(24), Parallel(pp=2, replica=2)):
        for draft in space.drafts():
            draft = usual(draft)
            assert cost.sketched(draft).step_s == pytest.approx(cost(draft).step_s, rel=0.2)
            assert cost.sketched(draft).step_s >= cost(draft).step_s * (1 - 1e-9)


def test_long_steps_are_ranked_by_sketches_and_the_best_played(monkeypatch):
    by_play = _search(Parallel(pp=2), collective_ms=0.1, top=3)
    for module in (judge, pipeline):
        monkeypatch.setattr(module, "is_long", lambda draft: len(draft.stages) > 1)
    by_sketch = _search(Parallel(pp=2), collective_ms=0.1, top=3)
    assert by_sketch[0].estimate.step_s == pytest.approx(by_play[0].estimate.step_s, rel=1e-9)


def test_no_plan_wins_by_a_sketch_that_leaves_its_sends_out(monkeypatch):
    """What was played must not lose to a closed form that knows no sends, as some orders' do."""
    for module in (judge, pipeline):
        monkeypatch.setattr(module, "is_long", lambda draft: len(draft.stages) > 1)
    sendless = lambda *given: bottleneck_s(given[-1], given[-2])  # noqa: E731
    monkeypatch.setattr(OneFOneB, "closed_form_s", sendless)
    given = GRAPH, cluster(4), profile(collective_ms=5), workload(12)
    (plan,) = search(*given, Parallel(pp=2), top=1)
    assert plan.estimate.step_s == price(*given, plan).estimate.step_s
    assert plan.search.played >= 1


def test_fixed_tensor_parts_leave_open_whether_tokens_are_split():
    """The search of `sp` ended where `tp` was fixed, and the worse plan was called proved."""
    graph = graph_of("llama tied")
    offered = {
        parallel.sp: [
            strategy.sp
            for space in spaces(graph, cluster(4), workload(8), parallel)
            for strategy in space.strategies
        ]
        for parallel in (Parallel(tp=2), Parallel(tp=2, sp=False), Parallel(tp=2, sp=True))
    }
    assert set(offered[None]) == {False, True}
    assert set(offered[False]) == {False}
    assert set(offered[True]) == {True}


def test_a_search_that_ran_out_of_time_says_so_and_proves_nothing(monkeypatch):
    monkeypatch.setattr(search_module, "DEADLINE_S", 0.0)
    plan = _search()[0]
    assert plan.search.out_of_time
    assert not plan.search.proved
    assert "time ran out" in summary([plan])
    monkeypatch.undo()
    whole = _search()[0]
    assert not whole.search.out_of_time
    assert whole.search.proved


def test_a_priced_plan_tells_of_its_own_price_alone():
    """The old search's record stood beside the new price, and unused devices were not said."""
    plan = _search(n=2)[0]
    priced = price(GRAPH, cluster(4), profile(), workload(12), plan)
    assert priced.search is None
    said = text([priced])
    assert said.startswith("priced, not searched; 2 devices stay unused (2 to 3)")
    assert "candidates" not in said
    assert "slower" not in said


@pytest.mark.parametrize("memory", [2**30, 60_000])
def test_an_order_that_is_left_to_the_planner_is_never_slower(memory):
    given = GRAPH, cluster(4, memory_bytes=memory), profile(collective_ms=0.01), workload(12)
    fixed = {"pp": 2, "level": "none", "recompute": "none"}
    (usual,) = search(*given, Parallel(**fixed), top=1)
    plans = search(*given, Parallel(order="any", **fixed), top=3)
    assert usual.order_name == "1f1b"
    assert plans[0].order_name != "1f1b"
    assert plans[0].estimate.step_s < usual.estimate.step_s
    assert not plans[0].search.proved
    assert _need(plans[0]) <= memory
    for plan in plans:
        assert check(plan, GRAPH, given[1], workload(12)) == []
        assert plan.order_name in ORDERS
        assert ORDERS[plan.order_name].synchronous


def test_gradients_of_weights_wait_only_where_nothing_is_run_or_gathered_again():
    """The bubble of zero-bubble orders stays where layers are sharded or recomputed."""
    given = GRAPH, cluster(4), profile(collective_ms=0.0), workload(16)

    def step_s(order, **how):
        parallel = Parallel(pp=2, order=order, microbatch=1, tp=1, **how)
        return search(*given, parallel, top=1)[0].estimate.step_s

    for how in ({"recompute": "all"}, {"shard": 2, "level": "params", "recompute": "none"}):
        assert step_s("zb-h1", **how) == pytest.approx(step_s("1f1b", **how))
    kept = {"recompute": "none", "level": "none"}
    assert step_s("zb-h1", **kept) < 0.99 * step_s("1f1b", **kept)


def test_any_order_may_be_left_open_where_there_is_no_pipeline():
    (plan,) = _search(Parallel(order="any", pp=1))
    assert plan.order_name == ""
    (plan,) = _search(Parallel(order="any", pp=2, stages=(1, 2, 2, 2)))
    assert [len(stage.layers) for stage in plan.stages] == [1, 2, 2, 2]
    assert ORDERS[plan.order_name].chunks == 2
    with pytest.raises(ConfigError, match="is for 3 stages, and there are 2"):
        _search(Parallel(order="any", pp=2, stages=(3, 2, 2)))


def test_orders_that_take_long_to_list_end_with_the_time_that_there_is():
    """A search with any order took minutes more than the minute that it has."""
    prices = Prices(GRAPH, cluster(4), profile(collective_ms=0), workload(24))
    drafts = [
        draft
        for order in ("1f1b", "zb-auto")
        for space in spaces(GRAPH, cluster(4), workload(24), Parallel(pp=2, tp=1, order=order))
        for draft in space.drafts()
    ]
    heard = []
    late, early = judge.Judge(prices, 1, end_s=0.0), judge.Judge(prices, 1, tell=heard.append)
    assert {each.draft.order for each in late(drafts)} == {"1f1b"}
    assert not late.whole
    assert {each.draft.order for each in early(drafts)} == {"1f1b", "zb-auto"}
    assert early.whole
    assert any("zb-auto" in what for what in heard)
