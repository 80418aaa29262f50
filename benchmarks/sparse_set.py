"""A set of rows like those of text: few numbers a row, features whose frequencies follow a power.

Deterministic by seed.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from polyreme.data.rows import Rows

_OFFSET = 10.0  # features' frequencies go with 1 / (rank + this)


@numba.njit(cache=True)
def _draw(
    n: int, d: int, each: int, places: np.ndarray, w: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    np.random.seed(seed)
    indices = np.empty(n * each, np.int32)
    values = np.empty(n * each, np.float32)
    y = np.empty(n)
    last = np.full(d, -1, np.int32)
    reach = math.log(1.0 + d / _OFFSET)
    for i in range(n):
        start = i * each
        at = start
        while at < start + each:
            j = places[min(d - 1, int(_OFFSET * (math.exp(np.random.random() * reach) - 1.0)))]
            if last[j] != i:
                last[j] = i
                indices[at] = j
                at += 1
        indices[start:at] = np.sort(indices[start:at])
        norm = 0.0
        for at in range(start, start + each):
            v = 0.5 + np.random.random()
            values[at] = v
            norm += v * v
        margin = 0.0
        for at in range(start, start + each):
            values[at] /= math.sqrt(norm)
            margin += values[at] * w[indices[at]]
        y[i] = 1.0 if np.random.random() < 1.0 / (1.0 + math.exp(-margin)) else -1.0
    return indices, values, y


def sparse_set(
    n: int, d: int, each: int = 50, *, planted: int = 2000, scale: float = 10.0, seed: int = 1
) -> tuple[Rows, np.ndarray]:
    """N rows of unit norm with `each` numbers, and labels -1 and 1.

    Labels are drawn by a logistic model with `planted` weights of standard deviation `scale`, at
    features drawn as rows draw theirs.
    """
    rng = np.random.default_rng(seed)
    places = rng.permutation(d).astype(np.int32)
    ranks = _OFFSET * np.expm1(rng.random(planted) * math.log1p(d / _OFFSET))
    w = np.zeros(d)
    w[places[np.minimum(ranks.astype(np.int64), d - 1)]] = scale * rng.standard_normal(planted)
    indices, values, y = _draw(n, d, each, places, w, seed)
    rows = Rows(
        indptr=np.arange(0, n * each + 1, each, dtype=np.int64),
        indices=indices,
        values=values,
        n_features=d,
    )
    return rows, y
