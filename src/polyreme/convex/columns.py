"""Rows read by feature: what a block of features has of them.

The numbers of feature j are ``values[starts[j]:starts[j + 1]]``, of the rows ``rows[...]``.
"""

from __future__ import annotations

import numba
import numpy as np

from .loss import slope, value

_Array = np.ndarray


@numba.njit(cache=True, nogil=True)
def gradient(
    code: int,
    gamma: float,
    starts: _Array,
    rows: _Array,
    values: _Array,
    y: _Array,
    margins: _Array,
    features: _Array,
) -> _Array:
    """The summed loss's derivatives by these features, at predictions [N]."""
    found = np.zeros(features.shape[0])
    slopes, known = np.empty(y.shape[0]), np.zeros(y.shape[0], np.bool_)
    for number in range(features.shape[0]):
        j, total = features[number], 0.0
        for at in range(starts[j], starts[j + 1]):
            i = rows[at]
            if not known[i]:
                known[i] = True
                slopes[i] = slope(code, gamma, margins[i], y[i])
            total += slopes[i] * values[at]
        found[number] = total
    return found


@numba.njit(cache=True, nogil=True)
def moved(
    code: int,
    gamma: float,
    starts: _Array,
    rows: _Array,
    values: _Array,
    y: _Array,
    margins: _Array,
    features: _Array,
    change: _Array,
) -> tuple[_Array, float]:
    """Predictions [N] once these features' weights have changed so, and the change of the loss."""
    after, known = margins.copy(), np.zeros(y.shape[0], np.bool_)
    for number in range(features.shape[0]):
        j, by = features[number], change[number]
        if by != 0.0:
            for at in range(starts[j], starts[j + 1]):
                after[rows[at]] += by * values[at]
                known[rows[at]] = True
    total = 0.0
    for i in range(y.shape[0]):
        if known[i]:
            total += value(code, gamma, after[i], y[i]) - value(code, gamma, margins[i], y[i])
    return after, total


@numba.njit(cache=True, nogil=True)
def curvatures(indptr: _Array, indices: _Array, values: _Array, block: _Array) -> _Array:
    """For each feature [D] the sum of squares, each times the row's numbers in the same block.

    Times a loss's largest second derivative they bound it over a block: the square of a sum of so
    many numbers is at most so many times the sum of squares. `block` [D] ascends.
    Source: Richtarik and Takac 2016, "Parallel Coordinate Descent Methods for Big Data
    Optimization", section 4 (partial separability), row by row.
    """
    found = np.zeros(block.shape[0])
    for i in range(indptr.shape[0] - 1):
        first = indptr[i]
        while first < indptr[i + 1]:
            stop = first
            while stop < indptr[i + 1] and block[indices[stop]] == block[indices[first]]:
                stop += 1
            for at in range(first, stop):
                found[indices[at]] += (stop - first) * values[at] * values[at]
            first = stop
    return found


@numba.njit(cache=True, nogil=True)
def meetings(indptr: _Array, indices: _Array, block: _Array, n_blocks: int) -> _Array:
    """Which two blocks have numbers in one row [n_blocks, n_blocks]."""
    found = np.zeros((n_blocks, n_blocks), np.bool_)
    here = np.empty(n_blocks, np.int64)
    for i in range(indptr.shape[0] - 1):
        n = 0
        for at in range(indptr[i], indptr[i + 1]):
            b = block[indices[at]]
            if not n or here[n - 1] != b:
                here[n] = b
                n += 1
        for one in range(n):
            for other in range(n):
                found[here[one], here[other]] = True
    return found
