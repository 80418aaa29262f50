"""Sums over sparse rows, one pass each.

Arguments of all: a loss's code and gamma, rows (indptr, indices, values), labels y [N] and the
model w [D].
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .loss import bend, conjugate, slope, value

_Array = np.ndarray


@numba.njit(inline="always", cache=True, nogil=True)
def dot(indices: _Array, values: _Array, w: _Array, start: int, stop: int) -> float:
    """A row's prediction."""
    found = 0.0
    # Unsigned, a place is not looked at for being counted from the end: half the time.
    for at in range(np.uint64(start), np.uint64(stop)):
        found += values[at] * w[np.uint32(indices[at])]
    return found


@numba.njit(cache=True, nogil=True)
def gradient(
    code: int, gamma: float, indptr: _Array, indices: _Array, values: _Array, y: _Array, w: _Array
) -> tuple[_Array, _Array, float]:
    """Gradient [D] of the summed loss, each row's slope [N], the summed loss."""
    z, slopes, total = np.zeros(w.shape[0]), np.empty(y.shape[0]), 0.0
    for i in range(y.shape[0]):
        start, stop = indptr[i], indptr[i + 1]
        p = dot(indices, values, w, start, stop)
        total += value(code, gamma, p, y[i])
        s = slope(code, gamma, p, y[i])
        slopes[i] = s
        if s != 0.0:
            for at in range(np.uint64(start), np.uint64(stop)):
                z[np.uint32(indices[at])] += s * values[at]
    return z, slopes, total


@numba.njit(cache=True, nogil=True)
def losses(
    code: int, gamma: float, indptr: _Array, indices: _Array, values: _Array, y: _Array, w: _Array
) -> float:
    """The summed loss."""
    total = 0.0
    for i in range(y.shape[0]):
        total += value(code, gamma, dot(indices, values, w, indptr[i], indptr[i + 1]), y[i])
    return total


@numba.njit(cache=True, nogil=True)
def bends(
    code: int, gamma: float, indptr: _Array, indices: _Array, values: _Array, y: _Array, w: _Array
) -> _Array:
    """Each row's second derivative [N]."""
    found = np.empty(y.shape[0])
    for i in range(y.shape[0]):
        found[i] = bend(code, gamma, dot(indices, values, w, indptr[i], indptr[i + 1]), y[i])
    return found


@numba.njit(cache=True, nogil=True)
def conjugates(code: int, gamma: float, slopes: _Array, y: _Array, c: float) -> float:
    """The summed conjugates at c times the slopes."""
    total = 0.0
    for i in range(y.shape[0]):
        total += conjugate(code, gamma, c * slopes[i], y[i])
    return total


@numba.njit(cache=True, nogil=True)
def longest_row(indptr: _Array, values: _Array) -> float:
    """The largest squared norm of a row."""
    found = 0.0
    for i in range(indptr.shape[0] - 1):
        total = 0.0
        for at in range(indptr[i], indptr[i + 1]):
            total += values[at] * values[at]
        found = max(found, total)
    return found if math.isfinite(found) else math.inf


@numba.njit(cache=True, nogil=True)
def row_sums(indptr: _Array, indices: _Array, values: _Array, start: int, stop: int) -> _Array:
    """Of features j from `start` to `stop`: sums over rows i of |x_ij| sum_k |x_ik|, k of these."""
    found = np.zeros(stop - start)
    for i in range(indptr.shape[0] - 1):
        total = 0.0
        for at in range(indptr[i], indptr[i + 1]):
            if start <= indices[at] < stop:
                total += abs(values[at])
        for at in range(indptr[i], indptr[i + 1]):
            if start <= indices[at] < stop:
                found[indices[at] - start] += abs(values[at]) * total
    return found
