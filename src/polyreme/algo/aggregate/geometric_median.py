"""The point with the smallest sum of distances to the rows."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np

from .geometry import Array, Indices, Points, nearest
from .robust import RobustKind

Positive = Annotated[float, msgspec.Meta(gt=0)]


class GeometricMedian(
    RobustKind, frozen=True, kw_only=True, tag="GeometricMedian", tag_field="kind"
):
    """The point with the smallest sum of distances to the rows, by the smoothed Weiszfeld method.

    It is a mean of the rows, each weighed by the inverse of its distance from the mean before.

    Source: Pillutla et al. 2022, "Robust Aggregation for Federated Learning", algorithm 2.
    Differs: it starts from the mean of the half of the rows that lies densest, and lengths are
    shares of the rows' median distance from there, so that the result scales with the rows.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
        nu: Smaller distances count as this, as a share of the median distance.
        tolerance: It ends with a step no longer than this, as a share of the median distance.
        iterations: It ends after so many.
    """

    nu: Positive = 1e-6
    tolerance: Positive = 1e-9
    iterations: Annotated[int, msgspec.Meta(ge=1)] = 1000

    takes_weights: ClassVar[bool] = True

    epsilon_source: ClassVar[str] = (
        "no mean distance is larger than the mean's, nor that than the root of its square"
    )
    assumes: ClassVar[str] = "fewer than half of the rows hostile; f need not be known"

    def epsilon(self, n: int) -> float:
        """Whatever f is."""
        return 1.0

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """Weights of the last mean."""
        n = points.n
        shares = np.ones(n) if weights is None else weights
        shares = shares / shares.sum()
        start = _densest(points.squared, shares)
        found, away = start, _away(points, start)
        scale = away[_half(away, shares)].max()
        if not scale:  # half of all weight is at one point, which no other is better than
            return np.pad(start, (0, 2))[None, :]
        for _ in range(self.iterations):
            inverse = shares / np.maximum(away, self.nu * scale)
            after = inverse / inverse.sum()
            step = after - found
            found, away = after, _away(points, after)
            moved = step @ points.gram[:n, :n] @ step
            if moved <= (self.tolerance * scale) ** 2:
                break
        return np.pad(found, (0, 2))[None, :]


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
