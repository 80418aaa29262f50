"""Solvers of assignments: the optimum, by brute force and by each other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from instances import apart, brute_force_s, drawn, laid_out, sizes, with_holes
from polyreme import api
from polyreme.planner.solve import segments
from polyreme.planner.solve.chain import onward
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.grid import grid
from polyreme.planner.solve.known import SOLVERS
from polyreme.planner.solve.miqp import miqp
from polyreme.planner.solve.programme import SOLVERS as PROGRAMMES


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slice(20)
def test_exact_finds_what_brute_force_finds(seed):
    instance = drawn(seed, *sizes(seed, 6))
    found, expected = exact(instance), brute_force_s(instance)
    assert found.proved
    assert found.objective_s == pytest.approx(expected, rel=1e-6)
    if found.stages:
        again = instance.objective_s(found.stages, found.strategies)
        assert again == pytest.approx(found.objective_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.slice(12)
def test_exact_finds_what_brute_force_finds_where_some_stages_lack_strategies(seed):
    plain = drawn(seed, *sizes(seed, 6)) if seed // 4 % 2 else apart(seed)
    instance = with_holes(plain, seed)
    found = exact(instance)
    assert found.proved
    assert found.objective_s == pytest.approx(brute_force_s(instance), rel=1e-9)


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slice(20)
def test_stages_solved_one_by_one_are_what_brute_force_finds(seed, monkeypatch):
    instance = apart(seed)
    expected = brute_force_s(instance)
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


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.slice(20)
def test_exact_finds_what_brute_force_finds_where_strategies_share_layouts(seed):
    plain = laid_out(seed)
    instance = with_holes(plain, seed) if seed % 2 else plain
    found = exact(instance)
    assert found.proved
    assert found.objective_s == pytest.approx(brute_force_s(instance), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_onward_is_the_least_over_all_pairs_of_strategies(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    layouts = rng.integers(0, int(rng.integers(1, n + 1)), n)
    moved = rng.uniform(0, 1, (n, n))[layouts][:, layouts if seed % 2 else np.arange(n)]
    took = np.where(rng.random((5, 3, n)) < 0.1, np.inf, rng.uniform(0, 2, (5, 3, n)))
    least, before = onward(took, moved)
    every = took[..., :, None] + moved
    assert (least == every.min(axis=-2)).all()
    chosen = np.take_along_axis(every, before[..., None, :], axis=-2)[..., 0, :]
    assert (chosen == least).all()


@pytest.mark.parametrize("solve", [exact, grid])
def test_layers_that_take_no_time_are_assigned_too(solve):
    plain = apart(7)
    instance = dataclasses.replace(plain, time=np.zeros_like(plain.time))
    found = solve(instance)
    assert len(found.stages) == instance.n_layers
    assert found.objective_s == pytest.approx(brute_force_s(instance))


@pytest.mark.parametrize("solve", [exact, grid, miqp], ids=["exact", "grid", "miqp"])
def test_a_layer_is_put_on_the_only_stage_that_offers_it(solve):
    """The next one, offered on both, follows it: it does not go back."""
    plain = drawn(1, 3, 1, 2)
    time = plain.time.copy()
    time[0, 1] = np.inf
    found = solve(dataclasses.replace(plain, time=time, capacity=np.full(2, 100.0)))
    assert found.stages == (0, 1, 1)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.slice(3)
def test_the_programme_as_written_comes_to_the_same(seed):
    instance = drawn(seed, *sizes(seed, 8))
    expected = exact(instance)
    for name in PROGRAMMES:
        found = miqp(instance, on=name)
        assert found.proved, name
        assert found.objective_s == pytest.approx(expected.objective_s, rel=1e-6), name


@pytest.mark.parametrize("solve", [exact, miqp], ids=["exact", "miqp"])
def test_what_cannot_be_is_proved_not_to_be(solve):
    """More stages than layers, a layer without a strategy, a layer larger than every stage."""
    instance = drawn(1, 3, 2, 2)
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
    instance = drawn(2, 4, 3, 2)
    best = solve(instance).objective_s
    found = solve(instance, below=best)
    assert (found.stages, found.proved) == ((), True)
    assert solve(instance, below=best * 1.01).objective_s == pytest.approx(best)


def test_every_solver_is_listed_with_its_source():
    rows = api.listing("solvers")
    assert [row["name"] for row in rows] == list(SOLVERS)
    assert all(all(row.values()) for row in rows)
