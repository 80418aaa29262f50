"""Passes over sparse rows that a solver on one core makes: rows stay put, predictions are kept.

Arguments that all share: rows (indptr, indices, values) of `n_features`, predictions p [N], labels
y [N], slopes and curves [N] of the loss by the predictions.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .kernels import dot
from .loss import bend, slope, value

_Array = np.ndarray


@numba.njit(inline="always", cache=True, nogil=True)
def above(code: int, gamma: float, p: float, y: float) -> float:
    """Second derivative of a parabola that touches the loss at p and lies on or above it.

    Source: Jaakkola and Jordan 2000, "Bayesian parameter estimation via variational methods"
    (logistic); de Leeuw and Lange 2009, "Sharp quadratic majorization in one dimension" (hinge).
    """
    m = y * p
    if code == 0:
        far = abs(m)
        return math.tanh(far / 2) / (2 * far) if far > 1e-4 else 0.25
    if code == 1:
        return 2.0
    if code == 2:
        return 1.0 / max(gamma, 2.0 * abs(m - 1.0 + gamma / 2))
    return 1.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def point(
    code: int, gamma: float, p: _Array, y: _Array, mu: float, slopes: _Array, curves: _Array
) -> tuple[float, float]:
    """The summed loss, and the sum of p times slope; fills slopes and curves.

    A curve is the loss's second derivative, mixed with a share `mu` of `above`.
    """
    total, along = 0.0, 0.0
    for i in range(p.shape[0]):
        if code == 0:
            m = y[i] * p[i]
            e = math.exp(-abs(m))
            q = 1.0 / (1.0 + e)
            total += math.log1p(e) + max(0.0, -m)
            s = -y[i] * (e * q if m > 0 else q)
            curve = e * q * q
        else:
            total += value(code, gamma, p[i], y[i])
            s = slope(code, gamma, p[i], y[i])
            curve = bend(code, gamma, p[i], y[i])
        if mu > 0.0:
            curve = (1.0 - mu) * curve + mu * above(code, gamma, p[i], y[i])
        slopes[i] = s
        curves[i] = curve
        along += p[i] * s
    return total, along


@numba.njit(cache=True, nogil=True, error_model="numpy")
def moved(code: int, gamma: float, p: _Array, y: _Array, q: _Array, step: float) -> float:
    """The summed loss at the predictions p + step q."""
    total = 0.0
    for i in range(p.shape[0]):
        if code == 0:
            m = y[i] * (p[i] + step * q[i])
            total += math.log1p(math.exp(-abs(m))) + max(0.0, -m)
        else:
            total += value(code, gamma, p[i] + step * q[i], y[i])
    return total


@numba.njit(cache=True, nogil=True)
def predictions(indptr: _Array, indices: _Array, values: _Array, w: _Array) -> _Array:
    """X w [N]."""
    found = np.empty(indptr.shape[0] - 1)
    for i in range(found.shape[0]):
        found[i] = dot(indices, values, w, indptr[i], indptr[i + 1])
    return found


@numba.njit(cache=True, nogil=True)
def spread(
    indptr: _Array, indices: _Array, values: _Array, slopes: _Array, n_features: int
) -> _Array:
    """X^T slopes [D]."""
    z = np.zeros(n_features)
    for i in range(indptr.shape[0] - 1):
        s = slopes[i]
        if s != 0.0:
            for at in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
                z[np.uint32(indices[at])] += s * values[at]
    return z


@numba.njit(cache=True, nogil=True)
def squares(
    indptr: _Array, indices: _Array, values: _Array, curves: _Array, n_features: int
) -> _Array:
    """The diagonal [D] of X^T diag(curves) X."""
    found = np.zeros(n_features)
    for i in range(indptr.shape[0] - 1):
        c = curves[i]
        if c != 0.0:
            for at in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
                v = float(values[at])
                found[np.uint32(indices[at])] += c * v * v
    return found


@numba.njit(cache=True, nogil=True)
def curved(indptr: _Array, indices: _Array, values: _Array, curves: _Array, v: _Array) -> _Array:
    """X^T diag(curves) X v [D]."""
    found = np.zeros(v.shape[0])
    for i in range(indptr.shape[0] - 1):
        c = curves[i]
        if c != 0.0:
            start, stop = np.uint64(indptr[i]), np.uint64(indptr[i + 1])
            c *= dot(indices, values, v, indptr[i], indptr[i + 1])
            for at in range(start, stop):
                found[np.uint32(indices[at])] += c * values[at]
    return found


@numba.njit(cache=True, nogil=True)
def products(
    indptr: _Array, indices: _Array, values: _Array, curves: _Array, n_features: int
) -> _Array:
    """X^T diag(curves) X [D, D], from rows whose features ascend."""
    flat = np.zeros(n_features * n_features)
    one = np.uint64(1)
    for i in range(indptr.shape[0] - 1):
        c = curves[i]
        if c != 0.0:
            start, stop = np.uint64(indptr[i]), np.uint64(indptr[i + 1])
            for a in range(start, stop):
                row = np.uint64(indices[a]) * np.uint64(n_features)
                v = c * values[a]
                for b in range(start, a + one):
                    flat[row + np.uint64(indices[b])] += v * values[b]
    found = flat.reshape((n_features, n_features))
    for a in range(n_features):
        for b in range(a):
            found[b, a] = found[a, b]
    return found


@numba.njit(cache=True, nogil=True)
def pairs(indptr: _Array) -> float:
    """Additions that `products` makes."""
    total = 0.0
    for i in range(indptr.shape[0] - 1):
        total += (indptr[i + 1] - indptr[i]) * (indptr[i + 1] - indptr[i] + 1) / 2
    return total


@numba.njit(cache=True, nogil=True)
def filled(
    indptr: _Array, indices: _Array, values: _Array, curves: _Array, n_features: int
) -> _Array:
    """Rows times the root of their curve, with their zeros [N, D]."""
    found = np.zeros((indptr.shape[0] - 1, n_features))
    for i in range(indptr.shape[0] - 1):
        root = math.sqrt(curves[i])
        for at in range(indptr[i], indptr[i + 1]):
            found[i, indices[at]] = root * values[at]
    return found


@numba.njit(cache=True, nogil=True)
def kept(
    indptr: _Array, indices: _Array, values: _Array, place: _Array
) -> tuple[_Array, _Array, _Array]:
    """Rows of the features whose new number `place` gives; it is -1 for those that go."""
    new = np.empty(indptr.shape[0], np.int64)
    new[0] = 0
    at = 0
    for i in range(indptr.shape[0] - 1):
        for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
            at += place[np.uint32(indices[k])] >= 0
        new[i + 1] = at
    which, numbers = np.empty(at, np.int32), np.empty(at, values.dtype)
    at = 0
    for k in range(np.uint64(indptr[0]), np.uint64(indptr[-1])):
        j = place[np.uint32(indices[k])]
        if j >= 0:
            which[at] = j
            numbers[at] = values[k]
            at += 1
    return new, which, numbers


@numba.njit(cache=True, nogil=True)
def columns(
    indptr: _Array, indices: _Array, values: _Array, n_features: int
) -> tuple[_Array, _Array, _Array]:
    """The same numbers by feature: starts [D + 1], rows and values [n_stored]."""
    starts = np.zeros(n_features + 1, np.int64)
    for k in range(indptr[0], indptr[-1]):
        starts[indices[k] + 1] += 1
    for j in range(n_features):
        starts[j + 1] += starts[j]
    ends = starts[:-1].copy()
    rows, numbers = np.empty(starts[-1], np.int32), np.empty(starts[-1], values.dtype)
    for i in range(indptr.shape[0] - 1):
        for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
            at = ends[np.uint32(indices[k])]
            ends[np.uint32(indices[k])] = at + 1
            rows[at] = i
            numbers[at] = values[k]
    return starts, rows, numbers
