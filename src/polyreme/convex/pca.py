"""The leading directions of rows, by variance-reduced steps that touch a row's features alone.

P(W) = -1/(2n) sum_i |W^T x_i|^2 with W^T W = I, for W [D, K]. A step on row x moves all of W:

    W <- (W + eta (x (x^T W - x^T A B) + C B)) N,    C = 1/n sum_i x_i x_i^T A,

where x is a row less the mean m of all, or m is 0. A is the anchor, B the rotation that brings A
nearest to W, and N what makes columns orthonormal again. W is held as Y T + b S, with b = [-C, m]:
a step changes the few rows of Y that a row has numbers of, and T [K, K] and S [K + 1, K]. The
products W^T W, W^T A and W^T b that B and N are of follow by recurrence. Now and then W is made
whole, and they are found anew.

Source: Shamir 2015, "A stochastic PCA and SVD algorithm with an exponential convergence rate",
algorithm 1 (VR-PCA); Shamir 2016, "Fast stochastic algorithms for SVD and PCA: convergence
properties and convexity", algorithm 2 (blocks).
Differs: N is from a Cholesky factor, not a symmetric root: the same subspace.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_Array = np.ndarray
_WHOLE_EVERY = 512  # steps after which W is made whole
_SMALLEST = 1e-4  # of T, before that


@numba.njit(cache=True, nogil=True)
def product(a: _Array, b: _Array) -> _Array:
    """a^T b."""
    found = np.zeros((a.shape[1], b.shape[1]))
    for row in range(a.shape[0]):
        for i in range(a.shape[1]):
            for j in range(b.shape[1]):
                found[i, j] += a[row, i] * b[row, j]
    return found


@numba.njit(cache=True, nogil=True)
def _small(a: _Array, b: _Array) -> _Array:
    """A b, of small matrices."""
    found = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                found[i, j] += a[i, k] * b[k, j]
    return found


@numba.njit(cache=True, nogil=True)
def _normaliser(gram: _Array) -> tuple[_Array, _Array, bool]:
    """N and its inverse with N^T gram N = I, N upper triangular; whether there is one."""
    k = gram.shape[0]
    low, inverse = np.zeros((k, k)), np.zeros((k, k))
    for j in range(k):
        left = gram[j, j]
        for i in range(j):
            left -= low[j, i] * low[j, i]
        if not left > 1e-14 * gram[j, j] or not math.isfinite(left):
            return low, low, False
        low[j, j] = math.sqrt(left)
        for i in range(j + 1, k):
            left = gram[i, j]
            for m in range(j):
                left -= low[i, m] * low[j, m]
            low[i, j] = left / low[j, j]
    for j in range(k):
        for i in range(j, k):
            left = 1.0 if i == j else 0.0
            for m in range(j, i):
                left -= low[i, m] * inverse[m, j]
            inverse[i, j] = left / low[i, i]
    return inverse.T.copy(), low.T.copy(), True


@numba.njit(cache=True, nogil=True)
def _rotation(wa: _Array) -> _Array:
    """B, orthogonal, that brings A B nearest to W, from W^T A."""
    if wa.shape[0] == 1:
        return np.full((1, 1), 1.0 if wa[0, 0] >= 0.0 else -1.0)
    left, _, right = np.linalg.svd(wa.T.copy())
    return _small(left, right)


@numba.njit(cache=True, nogil=True)
def _whole(y: _Array, t: _Array, b: _Array, s: _Array) -> None:
    """Y <- y t + b s."""
    k = y.shape[1]
    row = np.empty(k)
    for at in range(y.shape[0]):
        for j in range(k):
            row[j] = 0.0
            for i in range(k):
                row[j] += y[at, i] * t[i, j]
            for i in range(b.shape[1]):
                row[j] += b[at, i] * s[i, j]
        for j in range(k):
            y[at, j] = row[j]


@numba.njit(cache=True, nogil=True)
def walked(
    indptr: _Array,
    indices: _Array,
    values: _Array,
    start: _Array,
    anchor: _Array,
    against: _Array,
    centre: _Array,
    order: _Array,
    eta: float,
    mu: float,
    mean: bool,
) -> tuple[_Array, bool]:
    """W [D, K] after steps on the rows of `order`, or the mean of all, turned to the anchor.

    `against` [D, K] is what each step goes against beside the row's own: -C, and what else pulls;
    `centre` [D] is what rows are less, or empty; `mu` pulls to 0. A mean takes D K^2 for each step.
    False where columns became dependent.
    """
    k, eye, nothing = start.shape[1], np.eye(start.shape[1]), np.zeros_like(anchor[:0])
    centred = centre.shape[0] > 0
    wide = k + 1 if centred else k
    b = np.zeros((start.shape[0], wide))
    b[:, :k] = against
    if centred:
        b[:, k] = centre
    gone = np.zeros((wide, k))
    y, scale = start.copy(), 1.0 - eta * mu
    t, t_inverse, s = eye.copy(), eye.copy(), np.zeros((wide, k))
    wb, wa, turn, since = t, t, t, _WHOLE_EVERY
    bb, ba = product(b, b), product(b, anchor)
    sums = np.zeros_like(y) if mean else nothing
    for step in range(order.shape[0] + 1):
        last = step == order.shape[0]
        smallest = 1.0
        for j in range(k):
            smallest = min(smallest, abs(t[j, j]))
        if last or mean or since >= _WHOLE_EVERY or smallest < _SMALLEST or scale < 0.5:
            _whole(y, t, b, s)
            for _ in range(2):
                n, _, fine = _normaliser(product(y, y))
                if not fine:
                    return y, False
                _whole(y, n, b, np.zeros((wide, k)))
            t, t_inverse, s = eye.copy(), eye.copy(), np.zeros((wide, k))
            wb, wa, since = product(y, b), product(y, anchor), 0
        turn = _rotation(wa)
        if mean and step > 0:
            for at in range(y.shape[0]):
                for j in range(k):
                    for i in range(k):
                        sums[at, j] += y[at, i] * turn[j, i]
        if last:
            break
        first, stop = indptr[order[step]], indptr[order[step] + 1]
        yx, bx, ax, square = np.zeros(k), np.zeros(wide), np.zeros(k), 0.0
        for at in range(first, stop):
            row, x = indices[at], values[at]
            square += x * x
            for j in range(k):
                yx[j] += x * y[row, j]
                ax[j] += x * anchor[row, j]
            for j in range(wide):
                bx[j] += x * b[row, j]
        p, change, turned = np.zeros(k), np.zeros(k), np.zeros(k)
        for j in range(k):
            for i in range(k):
                p[j] += t[i, j] * yx[i]
                change[j] -= turn[i, j] * (ax[i] - ba[k, i] if centred else ax[i])
            for i in range(wide):
                p[j] += s[i, j] * bx[i]
        change += p
        if centred:
            change -= wb[:, k]
            gone[k] = change
        gone[:k] = turn
        for j in range(k):
            for i in range(wide):
                turned[j] += gone[i, j] * bx[i]
        # W' = scale W + R, R = eta (x change^T - b gone); below are W^T R and W'^T W'.
        wr = eta * (np.outer(p, change) - _small(wb, gone))
        cross = np.outer(change, turned)
        bbt = product(gone, _small(bb, gone))
        rr = eta * eta * (square * np.outer(change, change) - cross - cross.T + bbt)
        gram = scale * scale * eye + scale * (wr + wr.T) + rr
        wb = scale * wb + eta * (np.outer(change, bx) - product(gone, bb))
        wa = scale * wa + eta * (np.outer(change, ax) - product(gone, ba))
        n, n_inverse, fine = _normaliser(gram)
        if not fine:
            return y, False
        if scale < 0.5:  # W is whole: T would be lost
            y *= scale
        else:
            t, t_inverse, s = scale * t, t_inverse / scale, scale * s
        given = np.zeros(k)
        for j in range(k):
            for i in range(k):
                given[j] += eta * change[i] * t_inverse[i, j]
        for at in range(first, stop):
            for j in range(k):
                y[indices[at], j] += values[at] * given[j]
        t, t_inverse = _small(t, n), _small(n_inverse, t_inverse)
        s = _small(s - eta * gone, n)
        wb, wa, since = product(n, wb), product(n, wa), since + 1
    if mean:
        return sums / max(1, order.shape[0]), True
    for at in range(y.shape[0]):
        row_ = y[at].copy()
        for j in range(k):
            y[at, j] = 0.0
            for i in range(k):
                y[at, j] += row_[i] * turn[j, i]
    return y, True
