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
from typing import Any

import numba
import numpy as np

from .ahead import NEAR, prefetch, records
from .loss import slope
from .problem import Penalty
from .shard import Shard

_Array = np.ndarray
# What a step reads and writes of a feature, in half a cache line: `d` is its step with no row's
# change, `last` the number of steps that `u` and `sum` are after.
FEATURE = np.dtype([("u", "f8"), ("d", "f8"), ("last", "i8"), ("sum", "f8")])
RUNG = np.dtype([("power", "f8"), ("first", "f8"), ("second", "f8")])  # see `powers`
_AHEAD = 4  # steps, of which later ones' memory is asked for
_LONG = 256  # numbers of a row that are asked for
_BITS = 10  # of the steps whose powers lie one by one
_SERIES = 0.05  # below this times the steps, sums of powers are taken from their series


@numba.njit(inline="always", cache=True, nogil=True)
def soft(u: float, tau: float) -> float:
    """The nearest to u of what is within tau of 0, taken away."""
    # No branch: which way it would go cannot be foretold.
    return math.copysign(max(abs(u) - tau, 0.0), u)


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
def ladder(n: int, q: float) -> tuple[_Array, int]:
    """`powers` of 0 to k - 1 steps, then of 0, k, 2k, ... to n; and the bits of k, a power of 2.

    Those of any number of steps come of two readings, without a logarithm.
    """
    bits = 0
    while bits < _BITS and 1 << 2 * bits < n:
        bits += 1
    k = 1 << bits
    rungs = np.empty(k + (n >> bits) + 1, RUNG)
    for at in range(rungs.shape[0]):
        own = rungs[at]
        own.power, own.first, own.second = powers(at if at < k else (at - k) << bits, q)
    return rungs, bits


@numba.njit(inline="always", cache=True, nogil=True)
def climbed(rungs: _Array, bits: int, m: int) -> tuple[float, float, float]:
    """`powers` of m steps, from a ladder."""
    low, k = m & ((1 << bits) - 1), 1 << bits
    few, many = rungs[np.uint64(low)], rungs[np.uint64(k + (m >> bits))]
    power, first = few.power * many.power, few.first + few.power * many.first
    second = few.second + (m - low) * few.first + few.power * many.second
    return power, first, second


@numba.njit(cache=True, nogil=True)
def crossed(
    u: float, m: int, q: float, d: float, tau: float, rungs: _Array, bits: int
) -> tuple[float, float]:
    """As `recovered`, of a u that comes to 0 or beyond."""
    side = 1.0 if u > 0.0 else -1.0
    high, e = side * u, side * d + tau
    if q > 0.0:
        log = math.log1p(-q) if q < 1.0 else -math.inf
        reach = math.log1p(high * q / e) / -log
    else:
        reach = high / e
    stays = max(0, math.ceil(min(reach, float(m))) - 1)
    power, first, second = climbed(rungs, bits, stays)
    at = max(0.0, power * high - e * first)  # rounding: it is there a step later at the most
    total = side * (high * (1.0 - q) * first - e * second)
    u = soft((1.0 - q) * side * at - d, tau)
    total += u
    m -= stays + 1
    if u * side > 0.0 and m > 0:  # rounding: a step more was on this side
        u = soft((1.0 - q) * u - d, tau)
        total += u
        m -= 1
    if abs(d) <= tau:
        return 0.0 if m else u, total
    power, first, second = climbed(rungs, bits, m)
    e = d - tau if d > 0.0 else d + tau
    return power * u - e * first, total + u * (1.0 - q) * first - e * second


@numba.njit(inline="always", cache=True, nogil=True)
def stayed(
    u: float, m: int, q: float, d: float, tau: float, rungs: _Array, bits: int, mean: bool
) -> tuple[float, float, bool]:
    """As `recovered`; if the last is True, u crosses 0 and `crossed` is to be asked.

    Seen from the side where u is above 0, or goes to from 0, it goes down by e at each step.
    """
    side = math.copysign(1.0, u if u != 0.0 else -d)
    high, e = abs(u), side * d + tau
    power, first, second = climbed(rungs, bits, m)
    at = power * high - e * first
    # What comes to 0 and rests there is 0, whenever that was.
    beyond = (high > 0.0) & (e > 0.0) & (at <= 0.0) & (mean | (abs(d) > tau))
    moves = mean and (high > 0.0 or at > 0.0)
    total = high * (1.0 - q) * first - e * second if moves else 0.0
    return side * max(at, 0.0), side * total, beyond


@numba.njit(cache=True, nogil=True)
def recovered(
    u: float, m: int, q: float, d: float, tau: float, rungs: _Array, bits: int, mean: bool
) -> tuple[float, float]:
    """U after m times u <- soft((1 - q) u - d, tau), and if `mean` the sum of it after each."""
    after, total, beyond = stayed(u, m, q, d, tau, rungs, bits, mean)
    if beyond:
        return crossed(u, m, q, d, tau, rungs, bits)
    return after, total


@numba.njit(cache=True, nogil=True)
def skipped(u: float, m: int, q: float, d: float, tau: float) -> tuple[float, float]:
    """See `recovered`."""
    rungs, bits = ladder(m, q)
    return recovered(u, m, q, d, tau, rungs, bits, True)


@numba.njit(inline="always", cache=True, nogil=True)
def ask(
    indptr: _Array,
    indices: _Array,
    values: _Array,
    y: _Array,
    slopes: _Array,
    features: _Array,
    order: _Array,
    step: int,
) -> None:
    """Have what later steps read on its way: first where a row is, then the row, then features."""
    n = order.shape[0]
    if step + 3 * _AHEAD < n:
        i = order[step + 3 * _AHEAD]
        prefetch(indptr, i)
        prefetch(y, i)
        prefetch(slopes, i)
    if step + 2 * _AHEAD < n:
        i = order[step + 2 * _AHEAD]
        for at in range(indptr[i], min(indptr[i + 1], indptr[i] + _LONG), 8):
            prefetch(indices, at)
            prefetch(values, at)
    if step + _AHEAD < n:
        i = order[step + _AHEAD]
        for at in range(indptr[i], min(indptr[i + 1], indptr[i] + _LONG)):
            prefetch(features, np.uint32(indices[at]))


@numba.njit(cache=True, nogil=True)
def stepped(
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
    features: _Array,
) -> _Array:
    """See `lazy`; `features` [D] are to work in."""
    n, n_steps = start.shape[0], order.shape[0]
    scale = 1.0 / (1.0 + eta * l2)
    q, tau, r = (eta * mu + eta * l2) * scale, eta * l1 * scale, eta * scale
    rungs, bits = ladder(n_steps, q)
    for j in range(n):
        own = features[j]
        own.u, own.d, own.last, own.sum = start[j], r * b[j], 0, 0.0
    for step in range(n_steps):
        if n > NEAR:
            ask(indptr, indices, values, y, slopes, features, order, step)
        i = order[step]
        first, stop = np.uint64(indptr[i]), np.uint64(indptr[i + 1])
        p, n_beyond = 0.0, 0
        for at in range(first, stop):
            own = features[np.uint32(indices[at])]
            m = step - own.last
            u, gone, beyond = stayed(own.u, m, q, own.d, tau, rungs, bits, mean)
            if not beyond:
                own.u, own.last = u, step
                if mean:
                    own.sum += gone
            n_beyond += beyond
            p += values[at] * u
        if n_beyond:  # apart, as the loop above is twice as fast without
            p = 0.0
            for at in range(first, stop):
                own = features[np.uint32(indices[at])]
                if own.last < step:
                    own.u, gone = crossed(own.u, step - own.last, q, own.d, tau, rungs, bits)
                    own.last = step
                    if mean:
                        own.sum += gone
                p += values[at] * own.u
        change = r * (slope(code, gamma, p, y[i]) - slopes[i])
        for at in range(first, stop):
            own = features[np.uint32(indices[at])]
            own.u = soft((1.0 - q) * own.u - (own.d + change * values[at]), tau)
            own.last = step + 1
            if mean:
                own.sum += own.u
    found = np.empty(n)
    for j in range(n):
        own = features[j]
        u, gone = recovered(own.u, n_steps - own.last, q, own.d, tau, rungs, bits, mean)
        found[j] = (own.sum + gone) / max(1, n_steps) if mean else u
    return found


def lazy(
    code: int,
    gamma: float,
    indptr: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    *rest: Any,
) -> np.ndarray:
    """The model [D] after steps on the rows of `order`, or the mean of what it was after each.

    `slopes` [N] are of each row at the anchor w.
    """
    features = records(len(start), FEATURE)
    given: tuple[Any, ...] = (code, gamma, indptr, indices, values, y, start, *rest, features)
    found: np.ndarray = stepped(*given)
    return found


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
