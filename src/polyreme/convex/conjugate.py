"""Newton steps by conjugate gradients, where second derivatives fill no matrix.

Source: Lin, Weng and Keerthi 2008, "Trust region Newton method for large-scale logistic
regression"; here with a preconditioner, and steps that are halved in place of a trust region.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..data.rows import Rows
from . import passes


def step(rows: Rows, curves: np.ndarray, slope: np.ndarray, l2: float) -> np.ndarray:
    """About -(X^T diag(curves) X + l2)^-1 slope [D]."""
    given = rows.indptr, rows.indices, rows.values
    diagonal = passes.squares(*given, curves, len(slope)) + l2

    def bent(v: np.ndarray) -> np.ndarray:
        found: np.ndarray = passes.curved(*given, curves, v) + l2 * v
        return found

    return downhill(bent, diagonal, slope, rounds=200)


def downhill(
    bent: Callable[[np.ndarray], np.ndarray],
    diagonal: np.ndarray,
    slope: np.ndarray,
    *,
    rounds: int,
) -> np.ndarray:
    """About -H^-1 slope, by products `bent` with H and its diagonal; nearer as the slope falls."""
    inverse = 1.0 / np.where(diagonal > 0.0, diagonal, 1.0)
    found, left = np.zeros_like(slope), -slope
    leaning = inverse * left
    way, size = leaning, float(left @ leaning)
    enough = min(0.1, size**0.25) ** 2 * size
    for _ in range(rounds):
        if size <= enough or size == 0.0:
            break
        across = bent(way)
        sharp = float(way @ across)
        if sharp <= 0.0:
            break
        length = size / sharp
        found += length * way
        left -= length * across
        leaning = inverse * left
        size, last = float(left @ leaning), size
        way = leaning + size / last * way
    return found
