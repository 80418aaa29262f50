"""Memory that is no sum over layers: bounds hold, and what is found is the best where they meet."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from planner_toy import cluster, profile, toy, workload
from polyreme.plan.options import Parallel
from polyreme.planner.branch import Moments, Node, branch, lone_s
from polyreme.planner.hybrid import spaces
from polyreme.planner.outline import outlines
from polyreme.planner.prices import Prices
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.instance import Assignment, Instance
from polyreme.planner.sweep import Sweep

GRAPH = toy(2, tied=False)
N = len(GRAPH.layers)


def _all(outline):
    """Every assignment of an outline, as stages and strategies by layer."""
    n_stages = len(outline.space.sizes) or 1
    for cuts in itertools.combinations(range(1, N), n_stages - 1):
        ends = (0, *cuts, N)
        stages = np.repeat(np.arange(n_stages), np.diff(ends)).tolist()
        for strategies in itertools.product(range(len(outline.strategies)), repeat=N):
            yield stages, strategies


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.slice("0")
def test_no_assignment_that_fits_is_below_the_bound(seed):
    """All assignments are looked at with all of memory; the one that is found is among them."""
    rng = np.random.default_rng(seed)
    parallel = Parallel(pp=1 + seed % 2, tp=1, shard=2, replica=1, microbatch=2)
    figures = {
        "saved_bytes": int(rng.integers(50, 400)),
        "collective_ms": float(rng.uniform(0.1, 2)),
        "overlap": float(rng.uniform()),
    }
    where = cluster(4, memory_bytes=int(rng.integers(2500, 6000)))
    prices = Prices(GRAPH, where, profile(**figures), workload(8))
    offered = list(spaces(GRAPH, where, workload(8), parallel))
    costs = prices.of(1)
    sweep = Sweep((space, costs) for space in offered)
    found = sweep(exact, end_s=time.monotonic() + 60)
    best = math.inf
    for outline in (each for space in offered for each in outlines(space)):
        instance = costs.instance(outline)
        for stages, strategies in _all(outline):
            took, crossing, _ = instance.stage_times(stages, strategies)
            value = instance.total_s(took, crossing)
            if not value < best:
                continue
            chosen = {
                layer.name: outline.strategies[k]
                for layer, k in zip(GRAPH.layers, strategies, strict=True)
            }
            named = tuple(
                tuple(name for name, at in zip(chosen, stages, strict=True) if at == stage)
                for stage in range(len(outline.space.sizes))
            )
            draft = outline.space.draft(chosen, outline.microbatches, named)
            if max(costs.fitting.shortfalls(draft)) <= 0:
                best = value
    assert found.bound_s <= best * (1 + 1e-9)
    if found.found:
        assert found.found[0][0] >= best * (1 - 1e-9)
    if math.isfinite(best) and found.bound_s >= best * (1 - 1e-9):
        assert found.found[0][0] == pytest.approx(best)


NOTHING = np.zeros((5, 2))


def _instance(n_stages: int) -> Instance:
    n_layers, n = 5, 2
    return Instance(
        time=np.broadcast_to(np.array([1.0, 2.0]), (n_stages, n_layers, n)),
        memory=np.ones((n_stages, n_layers, n)),
        capacity=np.full(n_stages, 100.0),
        inside=np.zeros((n_layers - 1, n, n)),
        between=np.zeros((n_layers - 1, n, n)),
        beta=3.0,
    )


def test_a_stage_has_room_for_its_largest_layer_or_has_none_as_large():
    amounts = np.array([[40.0, 0.0], [10.0, 0.0], [10.0, 0.0], [10.0, 0.0], [20.0, 0.0]])
    moments = Moments(reducing=NOTHING, passing=amounts, fetched=NOTHING)
    node = Node.of(_instance(2), moments, 1)
    solved = Assignment(stages=(0, 0, 1, 1, 1), strategies=(0, 0, 0, 0, 0))
    roomy, without = branch(node, moments, solved, 1)
    assert roomy.instance.capacity.tolist() == [100.0, pytest.approx(100 - 1.05 * 2 * 20)]
    assert np.isinf(without.instance.time[1, [0, 4], 0]).all()
    assert np.isfinite(without.instance.time[1, 1:4]).all()
    assert np.isfinite(without.instance.time[0]).all()
    assert branch(roomy, moments, solved, 1) == ()
    assert branch(node, moments, Assignment(stages=solved.stages, strategies=(1,) * 5), 1) == ()


def test_what_a_layer_fetches_from_its_host_is_set_aside_once():
    amounts = np.array([[40.0, 0.0], [10.0, 0.0], [10.0, 0.0], [10.0, 0.0], [20.0, 0.0]])
    moments = Moments(reducing=NOTHING, passing=NOTHING, fetched=amounts)
    node = Node.of(_instance(2), moments, 1)
    solved = Assignment(stages=(0, 0, 1, 1, 1), strategies=(0, 0, 0, 0, 0))
    roomy, without = branch(node, moments, solved, 1)
    assert roomy.instance.capacity.tolist() == [100.0, pytest.approx(100 - 1.05 * 20)]
    assert np.isinf(without.instance.time[1, [0, 4], 0]).all()
    assert branch(roomy, moments, solved, 1) == ()


def test_what_every_stage_needs_while_gradients_are_reduced_is_set_aside_at_once():
    amounts = np.array([[40.0, 50.0], [10.0, 10.0], [8.0, 9.0], [10.0, 10.0], [20.0, 30.0]])
    moments = Moments(reducing=amounts, passing=NOTHING, fetched=NOTHING)
    for n_stages, least in ((1, [40]), (2, [40, 20]), (3, [40, 8, 20])):
        node = Node.of(_instance(n_stages), moments, 1)
        left = [100 - 1.05 * each for each in least]
        assert node.instance.capacity.tolist() == pytest.approx(left)


def test_a_stage_of_two_layers_makes_the_others_as_long_as_the_bound_says():
    """Of 5 layers of a second, 3 lie on one of two stages: 5 + 3 x 3 seconds."""
    assert lone_s(_instance(2)) == 14
    assert lone_s(_instance(1)) == math.inf
