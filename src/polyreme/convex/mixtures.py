"""Points of the dual, where there is no l2: mixtures of the slopes at the last models.

A dual point is a vector of slopes whose gradient z is inside of the penalty: G(z) <= 1, where G
is the penalty's gauge, the least t with z / t inside. Any mixture of slopes has the same mixture of
gradients, so that all who know these can choose one: that of the highest first-order bound,
the least of w z + R(w) G(z), which is a linear program in the weights of a few models.

Source: Massias, Vaiter, Gramfort and Salmon 2020, "Dual extrapolation for sparse generalized linear
models" (mixtures of the last iterates; there by least squares); Kelley 1960, "The cutting-plane
method for solving convex programs".
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from .problem import Penalty

_CUTS = 400  # of the gauge, to begin with; half as many are added each time
_PROGRAMS = 4
_ENOUGH = 0.02  # of what the gauge is above 1: how well the program must know it
_FAR = 5.0  # the largest weight of a model beside the last
_SHARES = (1.0, 0.5, 0.25)  # of the way to the best mixture: slopes may be none before its end


def mixtures(penalty: Penalty, w: np.ndarray, z: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Weights [M, 1 + K] of slopes at w and at K earlier models; each mixture is a dual point.

    `z` [D] and `earlier` [K, D] are gradients of the mean loss there. The first is of w alone, made
    smaller until it is inside. A mixture's slopes may be none that the loss has.
    """
    alone = np.zeros((1, 1 + len(earlier)))
    alone[0, 0] = penalty.shrink(z)
    size = penalty.value(w)
    if not len(earlier) or not 0.0 < size < np.inf or not np.isfinite(earlier).all():
        return alone
    way = _way(penalty, w, z, earlier - z, size)
    if way is None:
        return alone
    found = [alone]
    for share in _SHARES:
        weights = np.concatenate([[1.0 - share * way.sum()], share * way])
        inside = penalty.shrink(weights[0] * z + weights[1:] @ earlier)
        found.append(inside * weights[None])
    return np.concatenate(found)


def gauges(penalty: Penalty, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gauge of each group, or feature if there are no groups, and its slope [D] there."""
    if not penalty.group_l1:
        return np.abs(z) / penalty.l1, np.sign(z) / penalty.l1
    size, d = penalty.group_size, len(z)
    starts, wide = np.arange(0, d, size), np.abs(z)

    def summed(each: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.add.reduceat(each, starts)
        return found

    def spread(each: np.ndarray) -> np.ndarray:
        return np.repeat(each, size)[:d]

    high = np.sqrt(summed(wide * wide)) / penalty.group_l1
    if penalty.l1:
        low = np.zeros_like(high)
        for _ in range(60):
            middle = (low + high) / 2
            left = np.maximum(wide - spread(middle) * penalty.l1, 0.0)
            inside = np.sqrt(summed(left * left)) <= middle * penalty.group_l1
            low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    left = np.sign(z) * np.maximum(wide - spread(high) * penalty.l1, 0.0)
    across = summed(left * z)
    return high, left * spread(high / np.where(across > 0.0, across, 1.0))


def _way(
    penalty: Penalty, w: np.ndarray, z: np.ndarray, moves: np.ndarray, size: float
) -> np.ndarray | None:
    """The weights [K] of `moves` [K, D] from z to the best mixture; None if none is found.

    The program knows the gauge by cuts, which are added where it was wrong.
    """
    each, normal = gauges(penalty, z)
    excess = max(float(each.max()) - 1.0, 1.0 + float(w @ z) / size, 1e-14)
    starts = np.arange(0, len(w), penalty.group_size if penalty.group_l1 else 1)

    def cuts(which: np.ndarray, normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        across = np.add.reduceat(normal * moves, starts, axis=1)[:, which].T
        return across / excess, (1.0 - np.add.reduceat(normal * z, starts)[which]) / excess

    reach = np.abs(np.add.reduceat(normal * moves, starts, axis=1)).sum(0)
    left, right = cuts(_most(each + reach, _CUTS), normal)
    gain = np.append(moves @ w / (size * excess), 1.0)
    way: np.ndarray | None = None
    for _ in range(_PROGRAMS):
        found = linprog(
            gain,
            A_ub=np.column_stack([left, np.full(len(left), -1.0)]),
            b_ub=right,
            bounds=[(-_FAR, _FAR)] * len(moves) + [(0.0, None)],
            method="highs-ds",
        )
        if found.x is None:
            return way
        way = np.asarray(found.x[:-1])
        each, normal = gauges(penalty, z + way @ moves)
        wrong = (each - 1.0) / excess - found.x[-1]
        if wrong.max() <= _ENOUGH:
            break
        more = cuts(_most(wrong, _CUTS // 2), normal)
        left, right = np.concatenate([left, more[0]]), np.concatenate([right, more[1]])
    return way


def _most(each: np.ndarray, count: int) -> np.ndarray:
    """Where the largest are, in order of place."""
    if len(each) <= count:
        return np.arange(len(each))
    return np.sort(np.argpartition(each, len(each) - count)[-count:])
