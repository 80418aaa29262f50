"""Optimizer states in hosts' memory: priced, searched, read again, and not run."""

from __future__ import annotations

import msgspec
import pytest

from planner_toy import cluster, workload
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.check import check
from polyreme.plan.explain import text
from polyreme.plan.options import Parallel
from polyreme.planner.cost.memory import Storage
from polyreme.planner.draft import Draft, Strategy, read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.report.plan_words import glossary
from test_planner_unlike import GRAPH, _profile

replace = msgspec.structs.replace
ONE = Parallel(tp=1, pp=1, cp=1, layouts="unlike")
STATES = 2  # of Adam


def _cluster(n: int = 2, *, memory_bytes: int | None = None, host_bytes: int | None = None):
    """Devices that move 1 MB/s to their hosts, and have so much memory."""
    where = cluster(n)
    types = {
        name: replace(
            kind, host_bandwidth_bytes_s=1e6, memory_bytes=memory_bytes or kind.memory_bytes
        )
        for name, kind in where.device_types.items()
    }
    hosts = tuple(replace(host, memory_bytes=host_bytes) for host in where.hosts)
    return replace(where, device_types=types, hosts=hosts)


def _draft(strategy: Strategy) -> Draft:
    return Draft(
        strategies={layer.name: strategy for layer in GRAPH.layers},
        microbatches=1,
        global_batch=4,
        bucket_bytes=10**9,
        overlap=True,
    )


def test_states_leave_the_device_and_the_update_takes_their_way():
    prices = Prices(GRAPH, _cluster(), _profile(), workload(4))
    for how in (Strategy(replica=2), Strategy(shard=2, level="grads")):
        here, there = (
            prices.pricing(draft) for draft in map(_draft, (how, replace(how, offload="optimizer")))
        )
        kept, left = (
            prices.of(1).fitting.by_device(_draft(replace(how, offload=offload)))[0]
            for offload in ("none", "optimizer")
        )
        assert left == {**kept, "optimizer": 0}
        assert prices.of(1).fitting.on_host(
            _draft(replace(how, offload="optimizer")), 0, 0
        ) == Storage(optimizer=kept["optimizer"])
        slower_s = there.cost(_draft(replace(how, offload="optimizer"))).update_s
        assert here.cost(_draft(how)).update_s == 0.0
        n_elements = sum(layer.param_count for layer in GRAPH.layers) / how.parts
        assert slower_s == pytest.approx(n_elements * 4 * STATES / 1e6, rel=0.01)


def test_a_long_update_hides_the_way():
    figures = replace(_profile(), optimizer_s_per_byte=1e-3)
    cost = Prices(GRAPH, _cluster(), figures, workload(4)).of(1).cost
    here, there = (cost(_draft(Strategy(offload=each))) for each in ("none", "optimizer"))
    assert there == here


def test_a_search_offloads_where_states_would_not_fit():
    figures = _profile()
    roomy = Prices(GRAPH, _cluster(), figures, workload(4)).of(1).fitting
    whole = roomy.by_device(_draft(Strategy(replica=2)))[0]
    memory_bytes = sum(whole.values()) - whole["optimizer"] // 2
    given = _cluster(memory_bytes=memory_bytes)
    fixed = replace(ONE, replica=2, shard=1, recompute="none", microbatch=2)
    plans = search(GRAPH, given, figures, workload(4), fixed, top=1)
    found = [each.offload for each in read_draft(plans[0]).strategies.values()]
    assert "optimizer" in found
    assert "none" in found  # no more than has to be: it takes time
    assert plans[0].assumed
    assert "optimizer states lie in hosts' memory: planned" in text(plans)
    assert "optimizer offloaded" in dict(glossary(plans[0]))
    again = price(GRAPH, given, figures, workload(4), replace(plans[0], assumed=False))
    assert again.estimate == plans[0].estimate
    assert again.assumed
    with pytest.raises(Infeasible):
        search(GRAPH, given, figures, workload(4), replace(fixed, offload="none"), top=1)


def test_a_host_that_is_full_takes_no_more():
    figures, how = _profile(), _draft(Strategy(replica=2, offload="optimizer"))
    fitting = Prices(GRAPH, _cluster(), figures, workload(4)).of(1).fitting
    each = fitting.on_host(how, 0, 0).optimizer
    for host_bytes, fits in ((2 * each, True), (2 * each - 1, False)):
        prices = Prices(GRAPH, _cluster(host_bytes=host_bytes), figures, workload(4))
        for fitting in (prices.of(1).fitting, prices.unlike.fitting):
            room = fitting(how)
            assert room.fits == fits
            if not fits:
                assert room.over_bytes == 1
                assert "in the memory of" in room.largest_cause


def test_nothing_is_offloaded_where_the_way_is_unknown_or_plans_have_to_run():
    for where, parallel in ((cluster(2), ONE), (_cluster(), replace(ONE, layouts=None))):
        offered = spaces(GRAPH, where, workload(4), parallel)
        assert {each.offload for space in offered for each in space.strategies} == {"none"}
    offered = spaces(GRAPH, _cluster(), workload(4), ONE)
    assert {each.offload for space in offered for each in space.strategies} == {
        "none",
        "optimizer",
        "parameters",
    }
    with pytest.raises(ConfigError, match="needs the bandwidth between device type") as said:
        list(spaces(GRAPH, cluster(2), workload(4), replace(ONE, offload="optimizer")))
    assert said.value.violations[0].path == "parallel.offload"
    assert [each.path for each in Parallel(offload="optimizer").check()] == ["parallel.offload"]


def test_a_plan_that_offloads_is_priced_and_not_run():
    fixed = replace(ONE, offload="optimizer")
    plan = search(GRAPH, _cluster(), _profile(), workload(4), fixed, top=1)[0]
    assert not check(plan, GRAPH, _cluster(), unlike=True)
    found = check(plan, GRAPH, _cluster())
    assert any("is not executable yet" in each.rule and "offload" in each.path for each in found)
