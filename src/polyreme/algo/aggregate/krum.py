"""One row, that which its neighbours are nearest to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points

Neighbours = Literal["n-f-2", "n-f-1"]


class Krum(RobustKind, frozen=True, kw_only=True, tag="Krum", tag_field="kind"):
    """The row whose n - f - 2 nearest others are nearest, by the sum of squared distances.

    Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", section 3.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
        neighbours: How many others count: the paper's n - f - 2, or one more, as peers have it,
            which goes with any f < n / 2.
    """

    neighbours: Neighbours = "n-f-2"

    least_rule: ClassVar[str] = 'n >= 2 f + 3 (with neighbours "n-f-1" 2 f + 1)'

    assumes: ClassVar[str] = "honest rows alike: unlike ones it takes for hostile, all but one"

    def least(self, f: int) -> int:
        """The paper's 2 f + 2 < n; its peers' f < n / 2."""
        return 2 * f + (3 if self.neighbours == "n-f-2" else 1)

    def epsilon(self, n: int) -> float:
        """That of any one row; its own may be less."""
        return float(n - 1)

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """1 for the row chosen."""
        from .geometry import mean_of, nearest, scores

        chosen = nearest(scores(points.squared, f, self.neighbours), 1)
        return mean_of(chosen, points.n)
