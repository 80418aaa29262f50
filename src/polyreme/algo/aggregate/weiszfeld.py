"""The geometric median of points, from their dot products alone."""

from __future__ import annotations

import numpy as np

from .geometry import Array, Indices, Points, nearest


def median_weights(
    points: Points, weights: Array | None, nu: float, tolerance: float, iterations: int
) -> Array:
    """Weights (n + 2,) of the last mean; those of the rows, which count as `weights` say."""
    n = points.n
    shares = np.ones(n) if weights is None else weights
    shares = shares / shares.sum()
    start = _densest(points.squared, shares)
    found, away = start, _away(points, start)
    scale = away[_half(away, shares)].max()
    if not scale:  # half of all weight is at one point, which no other is better than
        return np.pad(start, (0, 2))
    for _ in range(iterations):
        inverse = shares / np.maximum(away, nu * scale)
        after = inverse / inverse.sum()
        step = after - found
        found, away = after, _away(points, after)
        moved = step @ points.gram[:n, :n] @ step
        if moved <= (tolerance * scale) ** 2:
            break
    return np.pad(found, (0, 2))


def _half(squared: Array, shares: Array) -> Indices:
    """The nearest rows that have half of all weight."""
    order = nearest(squared, len(shares))
    return order[: int(np.searchsorted(np.cumsum(shares[order]), 0.5 - 1e-12)) + 1]


def _densest(squared: Array, shares: Array) -> Array:
    """Weights of the mean of the half of the rows that is closest about one of them."""
    halves = [_half(row, shares) for row in squared]
    inside = min(zip(squared, halves, strict=True), key=lambda each: each[0][each[1]].max())[1]
    weights = np.zeros(len(shares))
    weights[inside] = shares[inside]
    total: Array = weights / weights.sum()
    return total


def _away(points: Points, weights: Array) -> Array:
    """Distances of the rows from a mean."""
    found: Array = np.sqrt(points.squared_from(np.pad(weights, (0, 2))))
    return found
