"""How many local steps a round has: those that pay on a few samples, then those that do in fact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..search import FACTORS, FEW, ROUNDS, Walk, came_to, first_eta
from ..task import Sum, Task
from .kind import State

if TYPE_CHECKING:
    import torch

TRIED = (1.0, 2.0, 4.0, 10.0)  # passes of a round; each divides WORK with FIXED added
FIXED = 2.0  # passes that a round costs beside its steps: one for its gradient, one for its sums
WORK = 24.0  # passes for which each is tried
AS_MANY = 3200  # samples, at most, that passes are of in rounds that are tried
_ALIKE = 1e-9  # of the objective: ends that differ by less do not
MOST_STEPS = 32_000  # of a round that a step size is tried in
_MOST_PASSES = 16.0
_FELL = 0.3  # a round that leaves more of the gap than this is a slow one
_NOISE = 1e-13  # of the objective: a gap that rounding may be
_ETA_ROUNDS = 4


def known() -> State:
    """What `next_passes` knows before the first round.

    The share of the gap that was left before steps were doubled (0: they were not), rounds to wait
    until they may be, and how long the wait after that is.
    """
    return {"left": 0.0, "rest": 0, "wait": 2}


def eta(task: Sum, w: torch.Tensor, walk: Walk, mu: float, passes: float) -> float:
    """See `search.first_eta`; in rounds of so many passes over the worker's samples.

    Without an l2 rounds are as short as those of others: what is slow there is slow for want of
    steps, and long rounds from 0 would ask for small ones.
    """
    if not task.l2:
        return first_eta(task, w, walk, mu)
    return first_eta(task, w, walk, mu, _steps(task, passes), _ETA_ROUNDS)


def eta_samples(task: Sum, passes: float) -> int:
    """Samples that this search goes through."""
    if not task.l2:
        return len(FACTORS) * ROUNDS * 2 * _few(task)
    return len(FACTORS) * _ETA_ROUNDS * (_few(task) + _steps(task, passes))


def ends(task: Task, w: torch.Tensor, walk_on: Callable[[Task], Walk], eta: float) -> list[float]:
    """What each of TRIED comes to for equal work on few samples.

    A round of M passes costs M + FIXED: what is lowest after equal work is neither one that has
    many rounds for want of steps, nor one that has steps which the next gradient would make better
    use of. All workers add theirs up, so that they choose the same, and one whose samples make
    steps diverge is heard.

    How many passes pay depends on the penalty over the number of samples, the more the less there
    is of it (in (1 + L / (n l2)) log(1/e) passes to e, of stochastic steps that reduce variance).
    So a worker with more samples than AS_MANY is played as one that has AS_MANY, with as much more
    of the penalty: the choice costs no more steps for more samples.
    """
    n = min(task.n_own, AS_MANY)
    few = task.few(FEW, heavier=task.n_own / max(1, n))
    return [
        came_to(few, w, walk_on(few), eta, math.ceil(passes * n), round(WORK / (FIXED + passes)))
        for passes in TRIED
    ]


def ends_samples(task: Sum) -> int:
    """Samples that this search goes through."""
    n, few = min(task.n_own, AS_MANY), min(task.n_own, FEW)
    return sum(round(WORK / (FIXED + passes)) * (few + math.ceil(passes * n)) for passes in TRIED)


def chosen(ends: Sequence[float]) -> float:
    """The fewest passes of those that come to the lowest, from sums of `ends` over workers."""
    least = min(ends)
    lowest = least + _ALIKE * abs(least)
    return TRIED[next(k for k, end in enumerate(ends) if end <= lowest)]


def next_passes(state: State, gap: float, objective: float, l2: float) -> State:
    """Passes of the next round, and what is to be known of them later.

    After a slow round they are doubled; with an l2 that is taken back if the next round leaves no
    less of the gap, for 2 rounds, then for 4, ... Gaps without an l2 are of a dual point that is
    made by shrinking, and one round says little.
    """
    passes, rest, wait, before = state["passes"], state["rest"], state["wait"], state["gap"]
    still = {"passes": passes, "left": 0.0, "rest": max(0, rest - 1), "wait": wait}
    if not (0 < before < math.inf and gap > _NOISE * abs(objective)):
        return still
    left = gap / before
    if state["left"] and l2 and left >= state["left"]:
        return {"passes": passes / 2, "left": 0.0, "rest": wait, "wait": 2 * wait}
    if left > _FELL and not rest and passes < _MOST_PASSES:
        return {"passes": min(_MOST_PASSES, 2 * passes), "left": left, "rest": 0, "wait": wait}
    return still


def _few(task: Sum) -> int:
    return min(task.n_own, FEW)


def _steps(task: Sum, passes: float) -> int:
    return max(1, min(MOST_STEPS, math.ceil(passes * task.n_own)))
