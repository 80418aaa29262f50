"""Rows chosen by Krum one after another, and the middle of each of their entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .ordered import Order, middle
from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points


class Bulyan(RobustKind, frozen=True, kw_only=True, tag="Bulyan", tag_field="kind"):
    """Krum takes n - 2 f rows one after another; of each entry n - 4 f near the median are meant.

    Source: El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in
    Byzantium", section 4.
    Differs: where so few rows are left that Krum looks at no neighbour, it looks at one; of rows
    that tie, as two that are each other's nearest do then, it takes the one whose next is nearer.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    least_rule: ClassVar[str] = "n >= 4 f + 3"

    assumes: ClassVar[str] = "many honest rows, and a little hidden in each of many entries"

    def least(self, f: int) -> int:
        """The paper's n >= 4 f + 3."""
        return 4 * f + 3

    def epsilon(self, n: int) -> float:
        """That of the mean of any n - 4 f entries."""
        return 4 * self.byzantine / (n - 4 * self.byzantine)

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """A row for each row chosen, in the order of rows."""
        import numpy as np

        from .geometry import scores

        squared, left = points.squared, list(range(points.n))
        while len(left) > 2 * f:
            inner = squared[np.ix_(left, left)]
            looked_at = min(f, max(0, len(left) - 3))  # so that one neighbour is left
            first = scores(inner, looked_at, "n-f-2")
            others = np.sort(inner, axis=1)[:, :0:-1]  # the nearest last, which counts first
            left.pop(int(np.lexsort((*others.T, first))[0]))
        chosen = [i for i in range(points.n) if i not in left]
        return np.eye(points.n, points.n + 2)[chosen]

    def order(self, n: int, f: int) -> Order | None:
        """Of the n chosen those near the median."""
        return Order(places=middle(n), keep=n - 2 * f)
