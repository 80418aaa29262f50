"""How many local steps a round has: those that pay on a few samples, then those that do in fact."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..search import FACTORS, FEW, ROUNDS, Walk, came_to, first_eta
from ..task import Sum
from .kind import State

if TYPE_CHECKING:
    import torch

TRIED = (1.0, 2.0, 4.0, 10.0)  # passes of a round; each divides WORK with FIXED added
FIXED = 2.0  # passes that a round costs beside its steps: one for its gradient, one for its sums
WORK = 24.0  # passes for which each is tried
MOST_STEPS = 32_000  # of a round that is tried
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


def ends(task: Sum, w: torch.Tensor, walk: Walk, eta: float) -> list[float]:
    """What each of TRIED comes to for equal work; infinite if it has too many steps to be tried.

    A round of M passes costs M + FIXED: what is lowest after equal work is neither one that has
    many rounds for want of steps, nor one that has steps which the next gradient would make better
    use of. All workers add theirs up, so that they choose the same, and one whose samples make
    steps diverge is heard.
    """
    if not _tried(task):
        return [0.0] + [math.inf] * (len(TRIED) - 1)
    few = task.few(FEW)
    found = [
        came_to(few, w, walk, eta, _steps(task, passes), round(WORK / (FIXED + passes)))
        for passes in _tried(task)
    ]
    return found + [math.inf] * (len(TRIED) - len(found))


def ends_samples(task: Sum) -> int:
    """Samples that this search goes through."""
    return sum(
        round(WORK / (FIXED + passes)) * (_few(task) + _steps(task, passes))
        for passes in _tried(task)
    )


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


def _tried(task: Sum) -> tuple[float, ...]:
    """Those that are played; none if there is nothing to choose from."""
    short = tuple(passes for passes in TRIED if passes * task.n_own <= MOST_STEPS)
    return short if len(short) > 1 else ()


def _few(task: Sum) -> int:
    return min(task.n_own, FEW)


def _steps(task: Sum, passes: float) -> int:
    return max(1, min(MOST_STEPS, math.ceil(passes * task.n_own)))
