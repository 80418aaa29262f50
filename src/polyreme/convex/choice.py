"""Step sizes from the data: their smoothness, and a search on a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from . import kernels, steps
from .loss import sharpest
from .shard import Shard

_ROWS = 2000
_FACTORS = (0.125, 0.5, 1.0, 2.0, 4.0, 8.0)
_ROUNDS = 6


def smoothness(shard: Shard) -> float:
    """The largest curvature of a row's loss: that of the loss times its squared norm."""
    code, gamma, indptr, _, values, _ = shard.given
    return float(sharpest(code, gamma) * kernels.longest_row(indptr, values))


def first_eta(shard: Shard, w: np.ndarray, *, exact: bool, mu: float) -> float:
    """The step size whose rounds on a few rows come to the lowest objective.

    Tried are multiples of 1/L, with L the largest curvature of a row, under which the pull `mu`
    stays stable. Rows without numbers, or none, ask for nothing: 1 then.
    """
    curvature = smoothness(shard)
    if not curvature:
        return 1.0 / (1.0 + mu)
    few = shard.some(_ROWS)
    penalty, n = shard.objective.penalty, len(few)

    def walk(u: np.ndarray, eta: float, number: int) -> np.ndarray:
        here = few.at(u)
        order = np.random.default_rng((number, n)).integers(0, n, n)
        return steps.walked(few, u, here.slopes, here.gradient / n, order, eta, mu=mu, exact=exact)

    return lowest(walk, lambda u: few.loss(u) / n + penalty.value(u), w, curvature, mu)


def lowest(
    walk: Callable[[np.ndarray, float, int], np.ndarray],
    objective: Callable[[np.ndarray], float],
    w: np.ndarray,
    curvature: float,
    mu: float,
) -> float:
    """The multiple of 1/curvature whose two rounds of `walk` from w come to the lowest objective.

    `walk` is given a model, the step size and the number of the round.
    """
    best, least = 1.0 / (curvature + mu), math.inf
    for factor in _FACTORS:
        eta = min(factor / curvature, 1.0 / (mu + 1e-300))
        u = w
        for number in range(_ROUNDS):
            u = walk(u, eta, number)
        found = objective(u)
        if found < least:
            best, least = eta, found
    return best
