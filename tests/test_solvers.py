"""Solvers of assignments: the optimum, by brute force and by each other."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from polyreme import api
from polyreme.planner.solve import segments
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.grid import grid
from polyreme.planner.solve.instance import Instance, Side
from polyreme.planner.solve.miqp import miqp
from polyreme.planner.solve.programme import SOLVERS


def _drawn(seed, n_layers, n_strategies, n_stages):
    """Unequal layers, memory that depends on the stage, tight or loose; a tensor passes some by."""
    rng = np.random.default_rng(seed)
    pairs = (max(n_layers - 1, 0), n_strategies, n_strategies)
    time = np.repeat(rng.uniform(1, 3, (1, n_layers, n_strategies)), n_stages, 0)
    later = 1 + 0.2 * np.arange(n_stages)[::-1, None, None]
    memory = rng.uniform(1, 3, (1, n_layers, n_strategies)) * later
    least, most = memory.min(2).sum(1) / n_stages, memory.max(2).sum(1) / n_stages
    sides = ()
    if seed % 3 == 0 and n_layers > 3:
        source = int(rng.integers(0, n_layers - 2))
        reads = {
            target: rng.uniform(0, 0.4, (n_strategies, n_strategies))
            for target in range(source + 2, n_layers)
        }
        sides = (Side(source=source, reads=reads, border=rng.uniform(0, 0.6, n_strategies)),)
    return Instance(
        time=time,
        memory=memory,
        capacity=least * 1.2 + (1.3 * most - least) * rng.uniform(),
        inside=rng.uniform(0, 0.5, pairs),
        between=rng.uniform(0, 1.5, pairs),
        sides=sides,
        beta=float(rng.integers(0, 8)),
    )


def _sizes(seed, most_layers):
    rng = np.random.default_rng(10_000 + seed)
    n_layers = int(rng.integers(1, most_layers + 1))
    return n_layers, int(rng.integers(1, 4)), int(rng.integers(1, min(n_layers, 4) + 1))


def _brute_force_s(instance):
    best = np.inf
    layers = range(instance.n_layers)
    for cuts in itertools.combinations(layers[1:], instance.n_stages - 1):
        stages = tuple(np.searchsorted(cuts, layers, side="right"))
        for strategies in itertools.product(range(instance.n_strategies), repeat=len(layers)):
            best = min(best, instance.objective_s(stages, strategies))
    return best


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slice(40)
def test_exact_finds_what_brute_force_finds(seed):
    instance = _drawn(seed, *_sizes(seed, 6))
    found, expected = exact(instance), _brute_force_s(instance)
    assert found.proved
    assert found.objective_s == pytest.approx(expected, rel=1e-6)
    if found.stages:
        again = instance.objective_s(found.stages, found.strategies)
        assert again == pytest.approx(found.objective_s, rel=1e-9)


def _apart(seed):
    """Some layers alike, ties, and tensors that come and go alike whatever the strategies."""
    rng = np.random.default_rng(20_000 + seed)
    n_layers, n_strategies, n_stages = _sizes(seed, 6)
    drawn = _drawn(3 * seed + 1, n_layers, n_strategies, n_stages)
    kinds = rng.integers(0, max(1, n_layers // 2), n_layers)
    return dataclasses.replace(
        drawn,
        time=np.round(drawn.time[:, kinds], 1),
        memory=np.round(drawn.memory[:, kinds], 1),
        inside=np.broadcast_to(drawn.inside[:, :1, :1], drawn.inside.shape),
        between=np.broadcast_to(drawn.between[:, :1, :1], drawn.between.shape),
    )


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slice(40)
def test_stages_solved_one_by_one_are_what_brute_force_finds(seed, monkeypatch):
    instance = _apart(seed)
    expected = _brute_force_s(instance)
    found = exact(instance)
    monkeypatch.setattr(segments, "MOST", 0)
    by_labels = exact(instance)
    for each in (found, by_labels):
        assert each.proved
        assert each.objective_s == pytest.approx(expected, rel=1e-9)
        if each.stages:
            again = instance.objective_s(each.stages, each.strategies)
            assert again == pytest.approx(each.objective_s, rel=1e-9)
    by_hand = grid(instance)
    assert by_hand.objective_s >= found.objective_s * (1 - 1e-9)


@pytest.mark.parametrize("solve", [exact, grid])
def test_layers_that_take_no_time_are_assigned_too(solve):
    drawn = _apart(7)
    instance = dataclasses.replace(drawn, time=np.zeros_like(drawn.time))
    found = solve(instance)
    assert len(found.stages) == instance.n_layers
    assert found.objective_s == pytest.approx(_brute_force_s(instance))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.slice(3)
def test_the_programme_as_written_comes_to_the_same(seed):
    instance = _drawn(seed, *_sizes(seed, 8))
    expected = exact(instance)
    for name in SOLVERS:
        found = miqp(instance, on=name)
        assert found.proved, name
        assert found.objective_s == pytest.approx(expected.objective_s, rel=1e-6), name


@pytest.mark.parametrize("solve", [exact, miqp], ids=["exact", "miqp"])
def test_what_cannot_be_is_proved_not_to_be(solve):
    """More stages than layers, a layer without a strategy, a layer larger than every stage."""
    instance = _drawn(1, 3, 2, 2)
    none = instance.time.copy()
    none[:, 1] = np.inf
    large = instance.memory.copy()
    large[:, 1] = 1e9
    four = dataclasses.replace(instance, **_stages_of(instance, 4))
    changed = (
        dataclasses.replace(instance, time=none),
        dataclasses.replace(instance, memory=large),
    )
    for each in (four, *changed):
        found = solve(each)
        assert (found.stages, found.objective_s, found.proved) == ((), np.inf, True)


def _stages_of(instance, n):
    names = ("time", "memory", "capacity")
    return {name: np.repeat(getattr(instance, name)[:1], n, 0) for name in names}


@pytest.mark.parametrize("solve", [exact, miqp], ids=["exact", "miqp"])
def test_only_what_takes_less_than_asked_is_given(solve):
    instance = _drawn(2, 4, 3, 2)
    best = solve(instance).objective_s
    found = solve(instance, below=best)
    assert (found.stages, found.proved) == ((), True)
    assert solve(instance, below=best * 1.01).objective_s == pytest.approx(best)


def test_every_solver_is_listed_with_its_source():
    rows = api.listing("solvers")
    assert [row["name"] for row in rows] == ["exact", "grid", "miqp"]
    assert all(all(row.values()) for row in rows)
