"""The point with the smallest sum of distances to the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points

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
        from .weiszfeld import median_weights

        found = median_weights(points, weights, self.nu, self.tolerance, self.iterations)
        return found[None, :]
