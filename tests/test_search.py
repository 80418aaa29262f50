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
from polyreme.algo.sync.longer import AS_MANY, FIXED, TRIED, WORK, chosen, ends, known, next_passes
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


def _ends(task: Any, eta: float = 0.05) -> list[float]:
    zero = torch.zeros(task.shard.rows.n_features, dtype=torch.float64)
    return ends(task, zero, lambda _: plain(True, 0.0), eta)


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
    _ends(task)
    n = task.n_own
    spent = {m: sum(each + FIXED * n for each in asked if each == m * n) for m in TRIED}
    assert set(spent.values()) == {WORK * n}


def _spied(task: Any, asked: list[int]) -> Any:
    class Spied(LinearTask):
        def few(self, n: int, *, heavier: float = 1.0) -> Any:
            return Spied(shard=super().few(n, heavier=heavier).shard, batch=self.batch)

        def steps(self, each: Steps) -> torch.Tensor:
            asked.append(each.n)
            return super().steps(each)

    return Spied(shard=task.shard, batch=task.batch)


def test_a_search_has_no_more_steps_where_a_worker_has_more_samples() -> None:
    asked: dict[int, list[int]] = {n: [] for n in (AS_MANY, 20_000)}
    for n, each in asked.items():
        task = _spied(Problem(WEAK, n=n).team(1)[0].task, each)
        found = _ends(task)
        assert all(map(math.isfinite, found))
    assert asked[AS_MANY] == asked[20_000]
    assert max(asked[20_000]) == max(TRIED) * AS_MANY


def test_many_samples_want_fewer_passes_than_few_do() -> None:
    few, many = (Problem(WEAK, n=n, n_features=60).team(1)[0].task for n in (AS_MANY, 20 * AS_MANY))
    assert chosen(_ends(many)) < chosen(_ends(few))


def test_the_fewest_passes_are_taken_of_those_that_come_as_low_but_for_rounding() -> None:
    assert chosen([1.0 + 1e-13, 1.0, 1.1, 1.2]) == TRIED[0]
    assert chosen([1.1, 1.0, 1.0 - 1e-12, math.inf]) == TRIED[1]
    assert chosen([-1.0, -2.0, -2.0, -1.0]) == TRIED[1]
    assert chosen([math.inf] * 4) == TRIED[0]


@pytest.mark.parametrize("sync", [PSCOPE(), SCOPE(c=0.5)])
def test_rounds_that_are_tried_are_pulled_by_the_penalty_of_the_few(sync: Any) -> None:
    me = Problem(WEAK).team(1)[0]
    heavy = me.task.few(60, heavier=7.0)
    w = torch.ones(heavy.shard.rows.n_features, dtype=torch.float64)
    here = heavy.at(w)
    z = here.gradient / heavy.n_own
    more = {"n": 1, "eta": 0.1, "seed": (0,)}
    stepped = heavy.steps(sync.walk_on(me, heavy)(w, z, here, **more))
    whole = z + 7.0 * me.task.l2 * w
    assert torch.allclose(stepped, w - 0.1 * whole, atol=1e-5)  # a prox is at the end of its step
    assert not torch.allclose(stepped, w - 0.1 * (z + me.task.l2 * w), atol=1e-5)


def test_steps_that_diverge_on_one_worker_alone_are_not_taken() -> None:
    class Fragile(LinearTask):
        def few(self, n: int, *, heavier: float = 1.0) -> Any:
            return Fragile(shard=super().few(n, heavier=heavier).shard, batch=self.batch)

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
    assert len(set(_ends(task, 1.0))) == 1


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
