"""What sets peers' solvers apart, by hand: what each looks at, and what it does not."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from instances import drawn, in_a_row, sizes
from polyreme.planner.solve.alpa import alpa
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.galvatron import galvatron
from polyreme.planner.solve.galvatron_bmw import galvatron_bmw
from polyreme.planner.solve.grid import grid
from polyreme.planner.solve.instance import Assignment
from polyreme.planner.solve.mcmc import _start, _Walk, mcmc
from polyreme.planner.solve.pipedream import pipedream
from polyreme.planner.solve.piper import piper

replace = dataclasses.replace


def test_galvatron_cuts_evenly_and_its_successor_moves_the_border():
    instance = in_a_row([[1.0], [1.0], [1.0], [5.0]], [[1.0]] * 4, 10, n_stages=2, beta=3.0)
    assert galvatron(instance).stages == (0, 0, 1, 1)
    assert galvatron_bmw(instance).stages == (0, 0, 0, 1)
    fifth = replace(in_a_row([[1.0]] * 5, [[1.0]] * 5, 10, n_stages=2), beta=3.0)
    assert galvatron(fifth).stages == (0, 0, 0, 1, 1)


def test_layers_leave_the_slowest_stage_for_as_long_as_that_helps():
    """Balanced by seconds it is 3 and 3, by bytes 5 and 1; the optimum is between."""
    plain = in_a_row([[1.0, 6.0]] * 6, [[4.0, 1.0]] * 6, 1.0, n_stages=2, beta=9.0)
    instance = replace(plain, capacity=np.array([16.0, 4.0]))
    best = exact(instance)
    assert best.stages == (0, 0, 0, 0, 1, 1)
    assert galvatron(instance).objective_s > best.objective_s
    assert galvatron_bmw(instance).stages == best.stages


@pytest.mark.parametrize("turned", [False, True])
def test_the_slowest_stage_gives_layers_to_either_side(turned):
    """Balanced by bytes and by seconds are 3 and 3; in the smaller stage only lean ways fit."""
    plain = in_a_row([[1.0, 6.0]] * 6, [[4.0, 4.0]] * 3 + [[4.0, 1.0]] * 3, 1.0, n_stages=2)
    there = slice(None, None, -1 if turned else 1)
    instance = replace(
        plain,
        memory=plain.memory[:, there],
        capacity=np.array([16.0, 4.0])[there],
        beta=9.0,
    )
    best = exact(instance)
    assert best.stages == ((0, 0, 1, 1, 1, 1) if turned else (0, 0, 0, 0, 1, 1))
    assert galvatron_bmw(instance) == replace(best, proved=False, bound_s=0.0)


def test_stages_balanced_by_bytes_fit_where_those_balanced_by_seconds_do_not():
    instance = in_a_row([[1.0]] * 4, [[1.0], [1.0], [4.0], [8.0]], 8.0, n_stages=2, beta=3.0)
    assert galvatron(instance) == Assignment()
    assert galvatron_bmw(instance).stages == (0, 0, 0, 1)


def test_galvatron_s_memory_is_rounded_up_so_that_plans_fit():
    third = in_a_row([[1.0, 2.0]] * 3, [[1.0, 0.5]] * 3, 3.0)
    assert exact(third).strategies == (0, 0, 0)
    found = galvatron(third)  # 1/3 of 4096 units is not whole
    assert sum(found.strategies) == 1
    quarter = in_a_row([[1.0, 2.0]] * 4, [[1.0, 0.5]] * 4, 4.0)
    assert galvatron(quarter).strategies == (0, 0, 0, 0)


def test_alpa_s_fastest_way_that_does_not_fit_gives_way_to_one_strategy_for_all():
    instance = in_a_row([[1.0, 2.0]] * 3, [[3.0, 1.0]] * 3, 7.0)
    assert exact(instance).objective_s == pytest.approx(4.0)
    found = alpa(instance)
    assert (found.strategies, found.objective_s) == ((1, 1, 1), 6.0)


def test_alpa_takes_a_longer_longest_stage_for_a_shorter_sum_where_that_pays():
    """(2), (2, 1) takes 3.5 at most and 5.5 in all; (2, 2), (1) takes 4 and 5."""
    plain = in_a_row([[2.0], [2.0], [1.0]], [[1.0]] * 3, 10, n_stages=2)
    inside = np.array([0.0, 0.5])[:, None, None]
    assert alpa(replace(plain, inside=inside, beta=0.5)).stages == (0, 0, 1)
    assert alpa(replace(plain, inside=inside, beta=5.0)).stages == (0, 1, 1)


def test_alpa_goes_past_a_longer_stage_that_does_not_pay():
    """Cuts take 3.5 at most and 6.95 in all; 3.6 and 6.9; 4.44 and 4.45."""
    plain = in_a_row([[0.01], [0.99], [0.1], [3.3]], [[1.0]] * 4, 10, n_stages=2)
    inside = np.array([2.5, 0.0, 0.05])[:, None, None]
    assert alpa(replace(plain, inside=inside, beta=1.0)).stages == (0, 1, 1, 1)
    assert alpa(replace(plain, inside=inside, beta=5.0)).stages == (0, 0, 1, 1)


def test_piper_gives_up_what_costs_least_for_each_byte_that_is_missing():
    """Five bytes for a second are no better than two for half of one where two are missing."""
    instance = in_a_row([[1.0, 2.0], [1.0, 1.5]], [[10.0, 5.0], [10.0, 8.0]], 18.0)
    assert piper(instance).strategies == (0, 1)
    many = in_a_row([[1.0, 2.0], [1.0, 1.5]] * 3, [[10.0, 5.0], [10.0, 8.0]] * 3, 45.0)
    assert piper(many).strategies == (1, 0, 1, 0, 1, 0)


@pytest.mark.slice(6)
@pytest.mark.parametrize("seed", range(60))
def test_piper_s_sorted_changes_are_those_of_the_greedy_choice_one_by_one(seed):
    rng = np.random.default_rng(95_000 + seed)
    time, memory = rng.uniform(1, 3, (2, 7, 4))
    capacity = memory.min(1).sum() + rng.uniform() * (memory.max(1).sum() - memory.min(1).sum())
    chosen = time.argmin(1)
    rows = np.arange(len(time))
    while (missing := memory[rows, chosen].sum() - capacity) > 0:
        options = [
            (
                (time[u, k] - time[u, chosen[u]])
                / min(memory[u, chosen[u]] - memory[u, k], missing),
                u,
                k,
            )
            for u in rows
            for k in range(4)
            if memory[u, k] < memory[u, chosen[u]]
        ]
        _, layer, strategy = min(options)
        chosen[layer] = strategy
    found = piper(in_a_row(time, memory, capacity))
    assert found.strategies == tuple(chosen)


def test_piper_s_stage_pays_for_its_borders_and_pipedream_s_competes_with_them():
    instance = in_a_row([[1.0]] * 4, [[1.0]] * 4, 10, n_stages=2, beta=7.0)
    between = instance.between.copy()
    between[1] = 1.5
    assert pipedream(replace(instance, between=between)).stages == (0, 0, 1, 1)
    assert piper(replace(instance, between=between)).stages == (0, 0, 0, 1)


def test_pipedream_knows_no_memory():
    instance = in_a_row([[1.0, 2.0]] * 3, [[3.0, 1.0]] * 3, 7.0)
    assert pipedream(instance) == Assignment()
    assert pipedream(replace(instance, capacity=np.array([9.0]))).strategies == (0, 0, 0)


def test_pipedream_does_not_cut_where_the_border_is_the_slowest():
    instance = in_a_row([[1.0]] * 4, [[1.0]] * 4, 10, n_stages=2, beta=7.0)
    between = instance.between.copy()
    between[1] = 4.0
    assert pipedream(instance).stages == (0, 0, 1, 1)
    assert pipedream(replace(instance, between=between)).stages == (0, 0, 0, 1)


@pytest.mark.slice(6)
@pytest.mark.parametrize("seed", range(60))
def test_the_walk_repeats_and_ends_no_worse_than_it_starts(seed):
    instance = drawn(96_100 + seed, *sizes(96_100 + seed, 7))
    found = mcmc(instance)
    assert found == mcmc(instance)
    assert found.objective_s <= grid(instance).objective_s


def test_a_walk_s_moves_change_its_sums_as_the_instance_adds_them_up():
    """Whichever layer or border moves, with a tensor that passes layers by and a full stage."""
    instance = drawn(50_001, 9, 3, 3)
    assert instance.sides
    walk, draw = _Walk(instance), random.Random(1)
    start = _start(instance, 60.0)
    now, fits = walk.at(start), set()
    moves = {(now.stages[u], stage) for u, stage, _ in _proposed(walk, now, draw)}
    assert moves == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)}
    for _ in range(300):
        (move,) = _proposed(walk, now, draw, n=1)
        now = walk.moved(now, move)
        for own, added in zip(
            (now.took, now.crossing, now.held),
            instance.stage_times(now.stages, now.strategies),
            strict=True,
        ):
            assert own == pytest.approx(added.tolist())
        expected = instance.objective_s(now.stages, now.strategies)
        assert now.objective_s == pytest.approx(expected)
        fits.add(bool(np.isfinite(expected)))
    assert fits == {True, False}


def _proposed(walk, now, draw, n=300):
    """The first `n` proposals that are moves."""
    found = (walk.proposal(now, draw) for _ in itertools.count())
    return list(itertools.islice(filter(None, found), n))


def test_a_walk_too_long_to_end_at_the_optimum_repeats():
    """Other random numbers end elsewhere; so would sums that forget what a change changes."""
    instance = drawn(50_001, 16, 4, 3)
    assert instance.sides
    found = mcmc(instance)
    assert found == mcmc(instance)
    assert exact(instance).objective_s < found.objective_s < grid(instance).objective_s


def test_the_walk_ends_at_the_optimum_of_most_small_instances():
    ended = [
        mcmc(instance).objective_s == pytest.approx(exact(instance).objective_s, rel=1e-9)
        for seed in range(12)
        for instance in (drawn(96_000 + seed, 6, 3, 3),)
    ]
    assert sum(ended) >= 10


def test_the_walk_leaves_the_grid_s_plan_for_a_mixed_one():
    instance = in_a_row([[1.0, 2.0]] * 3, [[3.0, 1.0]] * 3, 7.0)
    assert grid(instance).objective_s == pytest.approx(6.0)
    assert mcmc(instance).objective_s == pytest.approx(exact(instance).objective_s)
