"""Step size and length of rounds that nobody gave: what a search on few samples comes to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finite_sums import Problem, Run
from polyreme.algo.search import FACTORS, came_to, first_eta, plain
from polyreme.algo.sync import PSCOPE, SCOPE
from polyreme.algo.sync.longer import FIXED, MOST_STEPS, TRIED, WORK, ends, known, next_passes
from polyreme.algo.task import Steps
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.task import LinearTask

WEAK = Objective(penalty=Penalty(l2=1e-4))
STRONG = Objective(penalty=Penalty(l2=1.0))


def _first(sync: Any, problem: Problem, n: int = 3, **more: Any) -> list[tuple[float, float]]:
    """Step size and passes of every worker after a round."""
    run = Run(sync, problem.team(n, **more))
    run.round()
    return [(state["eta"], state["passes"]) for state in run.states]


@pytest.mark.parametrize("sync", [PSCOPE(), SCOPE(), PSCOPE(eta=0.05), PSCOPE(passes=3)])
def test_workers_whose_samples_ask_for_other_steps_agree(sync: Any) -> None:
    problem = Problem(WEAK)
    x, y = problem.data
    problem.__dict__["data"] = x * np.where(np.arange(len(y)) < 40, 9.0, 1.0)[:, None], y
    alone = [first_eta(me.task, *_at_zero(problem)) for me in problem.team(3)]
    assert alone[0] < min(alone[1:])
    found = _first(sync, problem)
    assert len(set(found)) == 1
    if sync.eta is None:
        assert found[0][0] <= min(alone) * max(FACTORS) / min(FACTORS)


def _at_zero(problem: Problem) -> tuple[torch.Tensor, Any, float]:
    return torch.zeros(problem.n_features, dtype=torch.float64), plain(True, 0.0), 0.0


def test_what_is_given_stays_and_only_the_rest_is_searched_for() -> None:
    problem = Problem(WEAK)
    ((eta, passes), *_) = _first(PSCOPE(eta=0.0625), problem)
    assert eta == 0.0625
    assert passes in TRIED
    run = Run(PSCOPE(passes=3), problem.team(3))
    for _ in range(12):
        run.round()
        assert run.states[0]["passes"] == 3
    assert run.states[0]["eta"] > 0


def test_samples_that_want_few_steps_get_fewer_than_those_that_want_many() -> None:
    ((_, few), *_) = _first(PSCOPE(eta=0.05), Problem(STRONG, n=600))
    ((_, many), *_) = _first(PSCOPE(eta=0.05), Problem(WEAK, n=600))
    assert few < many


def test_all_lengths_are_tried_for_equal_work() -> None:
    assert all(WORK % (FIXED + passes) == 0 for passes in TRIED)
    asked: list[int] = []
    task = _spied(Problem(WEAK).team(1)[0].task, asked)
    ends(task, *_at_zero(Problem(WEAK))[:2], 0.05)
    n = task.n_own
    spent = {m: sum(each + FIXED * n for each in asked if each == m * n) for m in TRIED}
    assert set(spent.values()) == {WORK * n}


def _spied(task: Any, asked: list[int]) -> Any:
    class Spied(LinearTask):
        def few(self, n: int) -> Any:
            return Spied(shard=self.shard.some(n), batch=self.batch)

        def steps(self, each: Steps) -> torch.Tensor:
            asked.append(each.n)
            return super().steps(each)

    return Spied(shard=task.shard, batch=task.batch)


def test_a_search_has_no_more_steps_where_a_worker_has_more_samples() -> None:
    problem = Problem(WEAK, n=10_000)
    asked: list[int] = []
    found = ends(_spied(problem.team(1)[0].task, asked), *_at_zero(problem)[:2], 0.05)
    assert max(asked) <= MOST_STEPS
    assert [math.isfinite(each) for each in found] == [True, True, False, False]


def test_nothing_is_played_where_there_is_one_length_to_choose_from() -> None:
    problem = Problem(WEAK, n=20_000)
    asked: list[int] = []
    found = ends(_spied(problem.team(1)[0].task, asked), *_at_zero(problem)[:2], 0.05)
    assert not asked
    assert [math.isfinite(each) for each in found] == [True, False, False, False]


def test_steps_that_diverge_on_one_worker_alone_are_not_taken() -> None:
    class Fragile(LinearTask):
        def few(self, n: int) -> Any:
            return Fragile(shard=self.shard.some(n), batch=self.batch)

        def steps(self, asked: Steps) -> torch.Tensor:
            found = super().steps(asked)
            return found if asked.n <= self.n_own else found * math.inf

    problem = Problem(WEAK)
    usual = _first(PSCOPE(eta=0.05), problem)[0][1]
    team = problem.team(3)
    fragile = Fragile(shard=team[1].task.shard, batch=16)
    run = Run(PSCOPE(eta=0.05), [team[0], replace(team[1], task=fragile), team[2]])
    run.round()
    assert usual > 1
    assert {state["passes"] for state in run.states} == {1.0}


def test_step_sizes_that_overflow_are_not_chosen() -> None:
    problem = Problem(Objective(loss="squared", penalty=Penalty()), n=40)
    x, y = problem.data
    problem.__dict__["data"] = x * 1e3, y
    task = problem.team(1)[0].task
    w, walk, mu = _at_zero(problem)
    eta = first_eta(task, w, walk, mu, 4000, 3)
    assert came_to(task, w, walk, 1e3 * eta, 4000, 3) == math.inf
    assert came_to(task, w, walk, eta, 4000, 3) <= task.loss(w) / task.n_own


def test_a_worker_whose_rows_are_empty_asks_for_nothing() -> None:
    problem = Problem(n=12)
    x, y = problem.data
    problem.__dict__["data"] = x * 0.0, y
    task = problem.team(1)[0].task
    assert first_eta(task, *_at_zero(problem)) == 1.0
    assert len(set(ends(task, *_at_zero(problem)[:2], 1.0))) == 1


def _played(lefts: Any, l2: float, most: int = 40) -> list[float]:
    """Passes of rounds that leave these shares of the gap, or such as passes lead to."""
    state: dict[str, Any] = {**known(), "passes": 1.0, "gap": 1.0}
    found: list[float] = []
    for number in range(most if callable(lefts) else len(lefts)):
        left = lefts(state["passes"]) if callable(lefts) else lefts[number]
        gap = state["gap"] * left
        state = {**next_passes(state, gap, 1.0, l2), "gap": gap}
        found.append(state["passes"])
    return found


def test_steps_are_doubled_while_that_helps_and_else_taken_back() -> None:
    assert _played([0.2, 0.2], 0.1) == [1, 1]
    assert _played([0.8, 0.7, 0.6, 0.5, 0.4], 0.1) == [2, 4, 8, 16, 16]
    assert _played([0.8, 0.8, 0.8, 0.8, 0.8], 0.1)[:4] == [2, 1, 1, 1]


def test_what_did_not_help_is_tried_again_after_longer_and_longer() -> None:
    rounds = _played(lambda passes: 0.8 if passes == 1 else 0.85, 0.1)
    doubled = [number for number, passes in enumerate(rounds) if passes == 2]
    waits = np.diff(doubled)
    assert len(waits) >= 3
    assert (np.diff(waits) > 0).all()


def test_without_an_l2_one_uneven_gap_takes_no_steps_back() -> None:
    assert _played([0.8, 0.9, 0.7, 0.9], 0.0) == [2, 4, 8, 16]


@pytest.mark.parametrize("left", [math.nan, 0.0, -1.0])
def test_a_gap_that_is_none_changes_no_length(left: float) -> None:
    assert _played([left, 0.9], 0.1) == [1, 1]
