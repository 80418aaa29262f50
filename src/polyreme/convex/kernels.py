"""Sums over sparse rows, one pass each.

Arguments of all: a loss's code and gamma, rows (indptr, indices, values), labels y [N] and the
model w [D].
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .ahead import NEAR, prefetch, records
from .loss import bend, conjugate, slope, value

_Array = np.ndarray
# Weight and gradient side by side: to read one brings the other.
_FEATURE = np.dtype([("w", "f8"), ("z", "f8")])
_OFTEN = 4  # numbers of a feature, above which copies of w and z pay
_AHEAD = 128


@numba.njit(inline="always", cache=True, nogil=True)
def dot(indices: _Array, values: _Array, w: _Array, start: int, stop: int) -> float:
    """A row's prediction."""
    found = 0.0
    # Unsigned, a place is not looked at for being counted from the end: half the time.
    for at in range(np.uint64(start), np.uint64(stop)):
        found += values[at] * w[np.uint32(indices[at])]
    return found


@numba.njit(cache=True, nogil=True)
def added(
    code: int,
    gamma: float,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    y: _Array,
    w: _Array,
    z: _Array,
    n_ahead: int,
) -> tuple[_Array, float]:
    """Each row's slope [N], the summed loss; the gradient of it is added to z [D].

    The weights that so many numbers later are read are asked for ahead, if it is above 0.
    """
    slopes, total, end = np.empty(y.shape[0]), 0.0, indptr[-1]
    for i in range(y.shape[0]):
        start, stop = indptr[i], indptr[i + 1]
        if n_ahead > 0:
            for at in range(start + n_ahead, min(stop + n_ahead, end)):
                prefetch(w, np.uint32(indices[at]))
        p = dot(indices, values, w, start, stop)
        total += value(code, gamma, p, y[i])
        s = slope(code, gamma, p, y[i])
        slopes[i] = s
        if s != 0.0:
            for at in range(np.uint64(start), np.uint64(stop)):
                z[np.uint32(indices[at])] += s * values[at]
    return slopes, total


def gradient(
    code: int,
    gamma: float,
    indptr: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
    y: np.ndarray,
    w: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Gradient [D] of the summed loss, each row's slope [N], the summed loss."""
    given = (code, gamma, indptr, indices, values, y)
    if len(w) <= NEAR or indptr[-1] - indptr[0] < _OFTEN * len(w):
        z = np.zeros(len(w))
        return z, *added(*given, w, z, 0)
    both = records(len(w), _FEATURE)
    both["w"], both["z"] = w, 0.0
    found = added(*given, both["w"], both["z"], _AHEAD)
    return both["z"].copy(), *found


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
