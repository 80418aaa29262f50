"""Variance-reduced steps over sparse rows, of which each touches the features of one row alone.

A step on row i moves the whole model:

    u <- prox((1 - eta mu) u - eta (b + (loss'(x_i u) - loss'(x_i w)) x_i)),

with the prox of eta (l1 |u|_1 + l2/2 |u|^2). A feature that the row has not follows
u <- soft((1 - q) u - d, tau) with the same q, d and tau as long as no row has it, which has a
closed form: it is brought up to date when it is read.

Source: Zhao et al. 2018, "Proximal SCOPE for Distributed Sparse Learning", section 6 (recovery of
skipped steps); there for l1 with l2, as here.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .loss import slope
from .problem import Penalty
from .shard import Shard

_Array = np.ndarray
_SERIES = 0.05  # below this times the steps, sums of powers are taken from their series


@numba.njit(inline="always", cache=True, nogil=True)
def soft(u: float, tau: float) -> float:
    """The nearest to u of what is within tau of 0, taken away."""
    if u > tau:
        return u - tau
    if u < -tau:
        return u + tau
    return 0.0


@numba.njit(cache=True, nogil=True)
def powers(m: int, q: float) -> tuple[float, float, float]:
    """(1 - q)^m, the sum of (1 - q)^k for k < m, and the sum of the latter sums for 1 to m."""
    if q == 0.0:
        return 1.0, float(m), m * (m + 1) / 2.0
    if q >= 1.0:
        return (0.0 if m else 1.0), min(float(m), 1.0), float(m)
    log = math.log1p(-q)
    lost = -math.expm1(m * log)  # 1 - (1 - q)^m
    first = lost / q
    if m * q > _SERIES:
        return 1.0 - lost, first, (m - (1.0 - q) * first) / q
    # sum_{k=1..m} sum_{j>=1} C(k, j) (-q)^(j-1) = sum_{j>=1} C(m + 1, j + 1) (-q)^(j-1)
    term = m * (m + 1) / 2.0
    total = term
    for j in range(2, 14):
        term *= -q * (m + 1 - j) / (j + 1)
        total += term
        if abs(term) <= 1e-17 * abs(total):
            break
    return 1.0 - lost, first, total


@numba.njit(cache=True, nogil=True)
def skipped(u: float, m: int, q: float, d: float, tau: float) -> tuple[float, float]:
    """What u is after m times u <- soft((1 - q) u - d, tau), and the sum of it after each."""
    total = 0.0
    if m <= 0:
        return u, total
    if u != 0.0:
        # Seen from the side where u is above 0, it goes down by e at each step, for as long as it
        # is there; then it may rest at 0, or go on below.
        side = 1.0 if u > 0.0 else -1.0
        high, e = side * u, side * d + tau
        stays = m
        if e > 0.0:
            if q > 0.0:
                log = math.log1p(-q) if q < 1.0 else -math.inf
                reach = math.log1p(high * q / e) / -log
            else:
                reach = high / e
            if reach < m + 2.0:
                stays = max(0, min(m, math.ceil(reach) - 1))
        power, first, second = powers(stays, q)
        at = power * high - e * first
        if at < 0.0:  # rounding: it is there a step later at the most
            at = 0.0
        total = side * (high * (1.0 - q) * first - e * second)
        if stays == m:
            return side * at, total
        u = soft((1.0 - q) * side * at - d, tau)
        total += u
        m -= stays + 1
        if u != 0.0 and m > 0 and u * side > 0.0:  # rounding: a step more was on this side
            u = soft((1.0 - q) * u - d, tau)
            total += u
            m -= 1
        if m == 0:
            return u, total
        if u != 0.0:
            side = -side
            power, first, second = powers(m, q)
            high, e = side * u, side * d + tau
            at = power * high - e * first
            return side * at, total + side * (high * (1.0 - q) * first - e * second)
    if abs(d) <= tau:
        return 0.0, total
    e = d - tau if d > 0.0 else d + tau
    _, first, second = powers(m, q)
    return -e * first, total - e * second


@numba.njit(cache=True, nogil=True)
def lazy(
    code: int,
    gamma: float,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    y: _Array,
    start: _Array,
    slopes: _Array,
    b: _Array,
    order: _Array,
    eta: float,
    mu: float,
    l1: float,
    l2: float,
    mean: bool,
) -> _Array:
    """The model [D] after steps on the rows of `order`, or the mean of what it was after each.

    `slopes` [N] are of each row at the anchor w.
    """
    u, n_steps = start.copy(), order.shape[0]
    last = np.zeros(u.shape[0], np.int64)
    sums = np.zeros(u.shape[0] if mean else 0)
    scale = 1.0 / (1.0 + eta * l2)
    q, tau, r = (eta * mu + eta * l2) * scale, eta * l1 * scale, eta * scale
    for step in range(n_steps):
        i = order[step]
        first, stop = indptr[i], indptr[i + 1]
        p = 0.0
        for at in range(first, stop):
            j = indices[at]
            if last[j] < step:
                u[j], gone = skipped(u[j], step - last[j], q, r * b[j], tau)
                if mean:
                    sums[j] += gone
                last[j] = step
            p += values[at] * u[j]
        change = slope(code, gamma, p, y[i]) - slopes[i]
        for at in range(first, stop):
            j = indices[at]
            u[j] = soft((1.0 - q) * u[j] - r * (b[j] + change * values[at]), tau)
            last[j] = step + 1
            if mean:
                sums[j] += u[j]
    for j in range(u.shape[0]):
        if last[j] < n_steps:
            u[j], gone = skipped(u[j], n_steps - last[j], q, r * b[j], tau)
            if mean:
                sums[j] += gone
    return sums / max(1, n_steps) if mean else u


@numba.njit(cache=True, nogil=True)
def dense(
    code: int,
    gamma: float,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    y: _Array,
    start: _Array,
    slopes: _Array,
    b: _Array,
    order: _Array,
    eta: float,
    mu: float,
    l1: float,
    l2: float,
    mean: bool,
    group_l1: float,
    group_size: int,
) -> _Array:
    """The same where a prox ties features to each other (group l1): each step moves all of them."""
    u, n, change = start.copy(), start.shape[0], np.zeros(start.shape[0])
    sums = np.zeros(n)
    scale = 1.0 / (1.0 + eta * l2)
    for step in range(order.shape[0]):
        i = order[step]
        p = 0.0
        for at in range(indptr[i], indptr[i + 1]):
            p += values[at] * u[indices[at]]
        s = slope(code, gamma, p, y[i]) - slopes[i]
        for at in range(indptr[i], indptr[i + 1]):
            change[indices[at]] = s * values[at]
        for j in range(n):
            u[j] = soft((1.0 - eta * mu) * u[j] - eta * (b[j] + change[j]), eta * l1)
        for at in range(indptr[i], indptr[i + 1]):
            change[indices[at]] = 0.0
        if group_l1 > 0.0:
            for first in range(0, n, group_size):
                stop = min(n, first + group_size)
                norm = 0.0
                for j in range(first, stop):
                    norm += u[j] * u[j]
                norm = math.sqrt(norm)
                kept = 1.0 - eta * group_l1 / norm if norm > eta * group_l1 else 0.0
                for j in range(first, stop):
                    u[j] *= kept
        for j in range(n):
            u[j] *= scale
            sums[j] += u[j]
    return sums / max(1, order.shape[0]) if mean else u


def walked(
    shard: Shard,
    start: np.ndarray,
    slopes: np.ndarray,
    b: np.ndarray,
    order: np.ndarray,
    eta: float,
    *,
    mu: float = 0.0,
    exact: bool = True,
    mean: bool = False,
) -> np.ndarray:
    """The model after steps on the rows of `order`; with the penalty's prox if `exact`."""
    penalty = shard.objective.penalty if exact else Penalty()
    given = (*shard.given, start, slopes, b, order, eta, mu, penalty.l1, penalty.l2, mean)
    if penalty.group_l1:
        return dense(*given, penalty.group_l1, penalty.group_size)
    return lazy(*given)
