"""The mean of the rows that their neighbours are nearest to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from .krum import Neighbours
from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points


class MultiKrum(RobustKind, frozen=True, kw_only=True, tag="MultiKrum", tag_field="kind"):
    """The mean of the rows with the smallest sums of squared distances to their nearest others.

    Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", section 5, where n - f rows are chosen.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
        neighbours: How many others count: the paper's n - f - 2, or one more, as peers have it,
            which goes with any f < n / 2.
        chosen: Rows that the mean is of (unset: n - f).
    """

    neighbours: Neighbours = "n-f-2"
    chosen: Annotated[int, msgspec.Meta(ge=1)] | None = None

    least_rule: ClassVar[str] = 'n >= 2 f + 3 (with neighbours "n-f-1" 2 f + 1)'

    assumes: ClassVar[str] = "honest rows alike: unlike ones are left out in place of hostile ones"

    def least(self, f: int) -> int:
        """The paper's 2 f + 2 < n; its peers' f < n / 2."""
        return 2 * f + (3 if self.neighbours == "n-f-2" else 1)

    def refused(self, n: int) -> list[Violation]:
        """So many hostile rows are too many, or more rows are to be chosen than are honest."""
        found = super().refused(n)
        most = n - self.byzantine
        if not found and self.chosen is not None and self.chosen > most:
            rule = f"is more than the n - f = {most} rows that are honest for sure"
            path = "data_parallel.aggregate.chosen"
            legal = f"1 to {most}"
            found.append(Violation(path=path, value=self.chosen, rule=rule, legal=legal))
        return found

    def epsilon(self, n: int) -> float:
        """That of the mean of any so many rows."""
        chosen = self.chosen or n - self.byzantine
        return (n - chosen) / chosen

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """The same for each row chosen."""
        from .geometry import mean_of, nearest, scores

        most = points.n - f
        count = most if self.chosen is None else min(self.chosen, most)
        chosen = nearest(scores(points.squared, f, self.neighbours), count)
        return mean_of(chosen, points.n)
