"""Peers' solvers: what they give fits, is priced right, and is the optimum where it has to be."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import msgspec
import numpy as np
import pytest

from instances import drawn, in_a_row, sizes, with_holes
from planner_toy import cluster, profile, toy, workload
from polyreme.errors import ConfigError
from polyreme.plan.options import Parallel
from polyreme.planner import solve as room
from polyreme.planner.search import search
from polyreme.planner.solve.alpa import alpa
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.galvatron import UNITS, galvatron
from polyreme.planner.solve.galvatron_bmw import galvatron_bmw
from polyreme.planner.solve.instance import Assignment
from polyreme.planner.solve.known import SOLVERS, find
from polyreme.planner.solve.pipedream import pipedream
from polyreme.planner.solve.piper import piper

PEERS = [name for name in SOLVERS if name not in ("exact", "miqp")]
each_peer = pytest.mark.parametrize("name", PEERS)
replace = dataclasses.replace
TOY = toy()


def _fresh(seed, most_layers=9):
    """Instances that no other test draws."""
    return with_holes(drawn(50_000 + seed, *sizes(50_000 + seed, most_layers)), seed)


def _loose(instance, **changed):
    """Without side tensors, and with room for anything."""
    return replace(instance, sides=(), capacity=np.full(instance.n_stages, 1e3), **changed)


def _is_whole(instance, found):
    """Each layer has a stage and a strategy, each stage a layer, and the price is right."""
    if not found.stages:
        return found == Assignment()
    return (
        len(found.stages) == len(found.strategies) == instance.n_layers
        and list(found.stages) == sorted(found.stages)
        and set(found.stages) == set(range(instance.n_stages))
        and found.objective_s == instance.objective_s(found.stages, found.strategies)
        and np.isfinite(found.objective_s)
    )


@pytest.mark.parametrize("seed", range(96))
@pytest.mark.slice(8)
def test_what_peers_give_fits_is_priced_right_and_never_beats_the_optimum(seed):
    instance = _fresh(seed)
    best = exact(instance)
    assert best.proved
    for name in PEERS:
        found = SOLVERS[name](instance)
        assert _is_whole(instance, found), name
        assert found.objective_s >= best.objective_s * (1 - 1e-9), name
        assert (found.proved, found.bound_s) == (False, 0.0), name


@pytest.mark.slice(1)
@pytest.mark.parametrize("seed", [1, 7, 5])
def test_where_time_runs_out_no_peer_is_better_still(seed):
    """Labels that kept few, and had no time for more, ended above what peers find in less."""
    instance = replace(drawn(seed, 48, 8, 4), sides=())
    found = exact(instance, deadline_s=0.0)
    assert not found.proved
    assert found.bound_s <= found.objective_s
    assert _is_whole(instance, found)
    for name in PEERS:
        assert SOLVERS[name](instance).objective_s >= found.objective_s * (1 - 1e-12), name
    below = exact(instance, below=found.objective_s, deadline_s=0.0)
    assert below.objective_s == np.inf


@each_peer
def test_every_peer_gives_something_where_memory_is_loose(name):
    for seed in range(0, 40, 4):
        assert SOLVERS[name](_loose(_fresh(seed))).stages


# Where a restriction does not bind, a peer's is the optimum.


def optimal(test):
    """Rows by seed, of which `make test` has a few."""
    return pytest.mark.slice(6)(pytest.mark.parametrize("seed", range(60))(test))


@optimal
@pytest.mark.parametrize("solve", [galvatron, galvatron_bmw])
def test_one_stage_of_whole_units_is_solved_to_the_optimum(solve, seed):
    rng = np.random.default_rng(60_000 + seed)
    n_layers, n_strategies, _ = sizes(60_000 + seed, 8)
    plain = drawn(60_001 + 3 * seed, n_layers, n_strategies, 1)
    assert not plain.sides
    memory = rng.integers(1, 2 * UNITS // n_layers, plain.memory.shape).astype(float)
    instance = replace(plain, memory=memory, capacity=np.array([float(UNITS)]))
    found = solve(instance)
    assert found.objective_s == pytest.approx(exact(instance).objective_s, rel=1e-9)


@optimal
def test_alpa_is_optimal_where_all_fits_and_borders_are_free(seed):
    plain = drawn(70_000 + seed, *sizes(70_000 + seed, 8))
    instance = _loose(plain, between=np.zeros_like(plain.between))
    assert alpa(instance).objective_s == pytest.approx(exact(instance).objective_s, rel=1e-9)


@optimal
def test_piper_is_optimal_where_all_fits_and_only_the_slowest_stage_counts(seed):
    plain = drawn(80_000 + seed, *sizes(80_000 + seed, 8))
    free = np.zeros_like(plain.inside)
    instance = _loose(plain, inside=free, between=free, alpha=0.0, beta=1.0)
    assert piper(instance).objective_s == pytest.approx(exact(instance).objective_s, rel=1e-9)


@optimal
def test_pipedream_is_optimal_where_all_fits_and_only_the_slowest_counts(seed):
    plain = drawn(90_000 + seed, *sizes(90_000 + seed, 8))
    alike = {
        name: np.broadcast_to(getattr(plain, name)[:, :1, :1] * 3, plain.inside.shape)
        for name in ("inside", "between")
    }
    instance = _loose(plain, alpha=0.0, beta=1.0, **alike)
    assert pipedream(instance).objective_s == pytest.approx(exact(instance).objective_s, rel=1e-9)


# Edges.


@each_peer
def test_one_layer_on_one_stage(name):
    instance = in_a_row([[3.0, 2.0, np.inf]], [[1.0, 5.0, 1.0]], 5.0, beta=4.0)
    found = SOLVERS[name](instance)
    assert (found.stages, found.strategies, found.objective_s) == ((0,), (1,), 10.0)


@each_peer
def test_what_cannot_be_gives_nothing(name):
    """More stages than layers; a layer without a strategy; one that no stage holds."""
    plain = in_a_row([[1.0, 2.0]] * 3, [[1.0, 1.0]] * 3, 10.0, n_stages=2)
    more = in_a_row([[1.0, 2.0]] * 3, [[1.0, 1.0]] * 3, 10.0, n_stages=4)
    lacking, large = plain.time.copy(), plain.memory.copy()
    lacking[:, 1], large[:, 1] = np.inf, 1e9
    crossed = replace(plain, inside=np.full_like(plain.inside, np.inf))
    for instance in (
        more,
        replace(plain, time=lacking),
        replace(plain, time=np.full_like(plain.time, np.inf)),
        replace(plain, memory=large),
        crossed,  # of three layers two share a stage
    ):
        assert SOLVERS[name](instance) == Assignment()


@each_peer
def test_layers_without_bytes_or_seconds_are_assigned(name):
    plain = in_a_row([[1.0, 2.0]] * 4, [[1.0, 1.0]] * 4, 10.0, n_stages=2, beta=1.0)
    weightless = SOLVERS[name](replace(plain, memory=np.zeros_like(plain.memory)))
    assert weightless.objective_s == pytest.approx(6.0)
    timeless = replace(plain, time=np.zeros_like(plain.time))
    assert _is_whole(timeless, SOLVERS[name](timeless))
    assert SOLVERS[name](timeless).objective_s == 0.0


@each_peer
def test_stages_that_the_user_fixed_stay(name):
    instance = _loose(with_holes(drawn(50_001, 8, 3, 3), 3))
    wanted = tuple(np.isfinite(instance.time).any(2).argmax(0).tolist())
    assert len(set(wanted)) == 3
    assert SOLVERS[name](instance).stages == wanted


@each_peer
def test_only_what_takes_less_than_asked_is_given(name):
    instance = _loose(drawn(50_002, 6, 3, 2))
    found = SOLVERS[name](instance)
    assert SOLVERS[name](instance, below=found.objective_s) == Assignment()
    assert SOLVERS[name](instance, below=found.objective_s * 1.01) == found


@each_peer
def test_without_any_time_what_is_given_is_whole_still(name):
    for seed in range(8):
        instance = _fresh(seed)
        for deadline_s in (0.0, -1.0):
            assert _is_whole(instance, SOLVERS[name](instance, deadline_s=deadline_s))


@each_peer
def test_several_tensors_that_pass_layers_by_are_priced(name):
    first = drawn(50_001, 7, 3, 2)
    assert first.sides
    twice = replace(first, sides=first.sides * 2, capacity=np.full(2, 1e3))
    found = SOLVERS[name](twice)
    assert found.stages
    assert _is_whole(twice, found)


# By name.


def test_every_file_with_a_solver_is_known_by_its_name():
    """A new file that was not entered is one that nobody can ask for."""
    names = set()
    for module in pkgutil.iter_modules(room.__path__):
        there = importlib.import_module(f"{room.__name__}.{module.name}")
        solver = getattr(there, module.name, None)
        if callable(solver) and {"below", "deadline_s"} <= set(
            inspect.signature(solver).parameters
        ):
            names.add(module.name)
    assert names == set(SOLVERS)
    assert all(SOLVERS[name].__name__ == name for name in names)


def test_an_unknown_solver_is_refused_with_the_nearest_first():
    with pytest.raises(ConfigError) as caught:
        find("galvatorn", "--solver")
    (violation,) = caught.value.violations
    assert (violation.path, violation.value) == ("--solver", "galvatorn")
    assert violation.legal.startswith("galvatron, ")
    assert set(violation.legal.split(", ")) == set(SOLVERS)


def _searched(solver):
    return search(
        TOY,
        cluster(4, memory_bytes=9_000),
        profile(saved_bytes=100),
        workload(12),
        Parallel(pp=2),
        solver=solver,
    )[0]


@pytest.fixture(scope="module")
def proved():
    return _searched("exact")


@each_peer
def test_a_search_says_which_solver_it_asked_and_proves_nothing_by_a_peer(name, proved):
    found = _searched(name)
    assert found.search.solver == name
    assert (found.search.proved, found.search.bound_s) == (False, 0.0)
    assert found.search.objective_s >= proved.search.objective_s * (1 - 1e-9)


def test_uniap_s_programme_proves_what_exact_proves(proved):
    found = _searched("miqp")
    assert (proved.search.solver, found.search.solver) == ("exact", "miqp")
    assert proved.search.proved
    assert found.search.proved
    assert found.search.objective_s == pytest.approx(proved.search.objective_s)
    assert msgspec.structs.replace(found, search=None) == msgspec.structs.replace(
        proved, search=None
    )
