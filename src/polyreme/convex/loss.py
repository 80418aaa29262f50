"""Losses of a prediction p = x w and a label y, with what solvers ask of them.

Classes are -1 and 1. Where a loss is of the margin, a is -y times the slope.

Source: Shalev-Shwartz and Zhang 2013, "Stochastic dual coordinate ascent methods", section 2
(conjugates; the smoothed hinge).
"""

from __future__ import annotations

import math
from typing import Literal

import numba

Loss = Literal["logistic", "squared_hinge", "hinge", "squared"]
CODES: dict[str, int] = {"logistic": 0, "squared_hinge": 1, "hinge": 2, "squared": 3}


@numba.njit(inline="always", cache=True, nogil=True)
def value(code: int, gamma: float, p: float, y: float) -> float:
    """The loss. `gamma` is the width over which the hinge is rounded."""
    m = y * p
    if code == 0:
        return math.log1p(math.exp(-m)) if m > 0 else -m + math.log1p(math.exp(m))
    if code == 1:
        return max(0.0, 1.0 - m) ** 2
    if code == 2:
        if m >= 1.0:
            return 0.0
        return 1.0 - m - gamma / 2 if m <= 1.0 - gamma else (1.0 - m) ** 2 / (2 * gamma)
    return (p - y) ** 2 / 2


@numba.njit(inline="always", cache=True, nogil=True)
def slope(code: int, gamma: float, p: float, y: float) -> float:
    """Its derivative by the prediction."""
    m = y * p
    if code == 0:
        if m > 0:
            small = math.exp(-m)
            return -y * small / (1.0 + small)
        return -y / (1.0 + math.exp(m))
    if code == 1:
        return -2.0 * y * max(0.0, 1.0 - m)
    if code == 2:
        return -y * min(1.0, max(0.0, (1.0 - m) / gamma))
    return p - y


@numba.njit(inline="always", cache=True, nogil=True)
def bend(code: int, gamma: float, p: float, y: float) -> float:
    """Its second derivative, where it has one; from the side where it is larger elsewhere."""
    m = y * p
    if code == 0:
        small = math.exp(-abs(m))
        return small / (1.0 + small) ** 2
    if code == 1:
        return 2.0 if m < 1.0 else 0.0
    if code == 2:
        return 1.0 / gamma if 1.0 - gamma < m < 1.0 else 0.0
    return 1.0


@numba.njit(inline="always", cache=True, nogil=True)
def sharpest(code: int, gamma: float) -> float:
    """The largest second derivative."""
    if code == 0:
        return 0.25
    if code == 1:
        return 2.0
    if code == 2:
        return 1.0 / gamma
    return 1.0


@numba.njit(inline="always", cache=True, nogil=True)
def conjugate(code: int, gamma: float, s: float, y: float) -> float:
    """Its convex conjugate by the prediction, at a slope; infinite where no slope is."""
    a = -y * s
    if code == 3:
        return s * s / 2 + s * y
    if a < 0.0 or (code != 1 and a > 1.0):
        return math.inf
    if code == 0:
        first = a * math.log(a) if a > 0.0 else 0.0
        return first + ((1.0 - a) * math.log1p(-a) if a < 1.0 else 0.0)
    if code == 1:
        return a * a / 4 - a
    return gamma * a * a / 2 - a
