"""Tensor parts are measured as they are computed, not as passes over fewer samples."""

from __future__ import annotations

import math

import msgspec
import pytest

from drawn import graph_of
from planner_toy import cluster, workload
from polyreme.cluster.parse import parse
from polyreme.measure.measure import measure
from polyreme.plan.options import Parallel
from polyreme.planner.draft import Strategy
from polyreme.planner.prices import Prices
from polyreme.planner.search import search
from polyreme.profile.fit import Fit
from polyreme.profile.record import PassTimes
from polyreme.profile.store import load, save
from test_planner_unlike import GRAPH, _profile

replace = msgspec.structs.replace


def measured(world, family):
    return measure(graph_of(family), parse("preset:2xCPU"), "fp32", world, 64, budget_s=0.5)


@pytest.mark.slice("llama tied")
@pytest.mark.parametrize("family", ["llama tied", "t5", "swin", "resnet"])
def test_each_kind_that_is_cut_is_measured_in_parts(pool, family, tmp_path):
    """T5's bias has the heads of one part only, a split table the rows of one."""
    one, two = pool(2).run(measured, family, timeout_s=120)
    graph = graph_of(family)
    for kind, times in one.layers.items():
        layer = next(layer for layer in graph.layers if layer.kind == kind)
        plan = graph.tensor_plan(layer.name)
        cut = plan is not None and bool(plan.cuttings)
        assert set(times.parts) == ({2} if cut else set())
        for part in times.parts.values():
            assert len(part.microbatch) == len(part.forward_s) == len(part.backward_s) > 0
            assert all(math.isfinite(each) and each > 0 for each in part.forward_s)
        assert two.layers[kind] == times
    save(one, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == one


def _with_parts(factor: float):
    """Passes of one of two parts take so much of those of whole layers."""
    figures = _profile(bytes_s=1e12)
    kinds = {
        kind: replace(
            times,
            parts={
                2: PassTimes(
                    microbatch=times.microbatch,
                    forward_s=tuple(factor * each for each in times.forward_s),
                    backward_s=tuple(factor * each for each in times.backward_s),
                )
            },
        )
        for kind, times in figures.layers.items()
    }
    return replace(figures, layers=kinds)


def test_what_was_measured_is_what_a_part_costs():
    figures = _with_parts(0.9)
    fit, times = Fit(figures), figures.layers["block"]
    assert fit.passes_s("block", 8, 2) == (0.9 * times.forward_s[1], 0.9 * times.backward_s[1])
    assert fit.passes_s("block", 8, 4) == (fit.forward_s("block", 2), fit.backward_s("block", 2))
    assert fit.passes_s("block", 8) == (times.forward_s[1], times.backward_s[1])
    data = Prices(GRAPH, cluster(2), figures, workload(8)).of(2).cost.data
    assert data.layer_passes("block.0", Strategy(tp=2), 8, 2) == fit.passes_s("block", 8, 2)


@pytest.mark.parametrize(("factor", "wins"), [(0.4, True), (0.9, False)])
def test_parts_win_where_they_are_measured_to(factor, wins):
    given = GRAPH, cluster(2), _with_parts(factor), workload(2)
    best = search(*given, Parallel(pp=1, recompute="none"), top=1)[0]
    estimates = [
        search(*given, Parallel(pp=1, tp=tp, recompute="none"), top=1)[0].estimate.step_s
        for tp in (1, 2)
    ]
    assert (estimates[1] < estimates[0]) == wins
    assert best.estimate.step_s == min(estimates)
