"""Steps on dual variables, one for each row, under a penalty with an l2.

P's dual is D(a) = -1/n sum_i loss*(-a_i) - R*(v), v = 1/n sum_i a_i x_i; at an optimum a_i is
the loss's slope with its sign turned, and w = soft(v, l1) / l2.

Source: Shalev-Shwartz and Zhang 2014, "Accelerated Proximal Stochastic Dual Coordinate Ascent for
Regularized Loss Minimization", section 2 (Prox-SDCA).
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .shard import Shard
from .steps import soft

_Array = np.ndarray
_TRIES = 100


@numba.njit(cache=True, nogil=True)
def best(code: int, gamma: float, y: float, p: float, q: float, a: float) -> float:
    """The b with the least loss*(-b) + p (b - a) + q/2 (b - a)^2, where `a` has a loss* too."""
    if code == 3:
        return (y - p + q * a) / (1.0 + q)
    m, c = y * p, y * a
    if code == 1:
        return y * max(0.0, (1.0 - m + q * c) / (0.5 + q))
    if code == 2:
        return y * min(1.0, max(0.0, (1.0 - m + q * c) / (gamma + q)))
    # c = 1 / (1 + exp(-t)): t + m + q (c(t) - c) rises in t by 1 to 1 + q/4
    low, high = -m - q * (1.0 - c), -m + q * c
    t = math.log(c / (1.0 - c)) if 0.0 < c < 1.0 else -m
    t, moved = min(high, max(low, t)), high - low
    for _ in range(_TRIES):
        small = math.exp(-abs(t))
        share = 1.0 / (1.0 + small) if t > 0.0 else small / (1.0 + small)
        above = t + m + q * (share - c)
        if above > 0.0:
            high = t
        else:
            low = t
        move = above / (1.0 + q * small / (1.0 + small) ** 2)
        if abs(move) > moved / 2 or not low <= t - move <= high:  # Newton steps may go in a circle
            move = t - (low + high) / 2
        t, moved = t - move, abs(move)
        if moved <= 1e-15 * max(1.0, abs(t)):
            break
    small = math.exp(-abs(t))
    return y * (1.0 / (1.0 + small) if t > 0.0 else small / (1.0 + small))


@numba.njit(cache=True, nogil=True)
def ascended(
    code: int,
    gamma: float,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    y: _Array,
    dual: _Array,
    v: _Array,
    order: _Array,
    n_all: float,
    sigma: float,
    l1: float,
    l2: float,
) -> tuple[_Array, _Array]:
    """Dual variables [N] after a step on each row of `order`, and the change of v [D].

    A row's model is taken at v plus `sigma` times the change; n_all counts the rows of all.
    """
    after, u = dual.copy(), v.copy()
    for step in range(order.shape[0]):
        i = order[step]
        p = length = 0.0
        for at in range(indptr[i], indptr[i + 1]):
            p += values[at] * soft(u[indices[at]], l1)
            length += values[at] * values[at]
        a = after[i]
        b = best(code, gamma, y[i], p / l2, sigma * length / (l2 * n_all), a)
        after[i] = b
        if b != a:
            change = sigma * (b - a) / n_all
            for at in range(indptr[i], indptr[i + 1]):
                u[indices[at]] += change * values[at]
    change_v = np.zeros(v.shape[0])
    for i in range(y.shape[0]):
        change = (after[i] - dual[i]) / n_all
        if change != 0.0:
            for at in range(indptr[i], indptr[i + 1]):
                change_v[indices[at]] += change * values[at]
    return after, change_v


def climbed(
    shard: Shard, dual: np.ndarray, v: np.ndarray, order: np.ndarray, n_all: float, sigma: float
) -> tuple[np.ndarray, np.ndarray]:
    """See `ascended`."""
    penalty = shard.objective.penalty
    found: tuple[np.ndarray, np.ndarray] = ascended(
        *shard.given, dual, v, order, n_all, sigma, penalty.l1, penalty.l2
    )
    return found
