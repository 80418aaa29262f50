"""The mean of the rows nearest to one that is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import RunError, Violation
from ..legal import tag
from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points


class MoNNA(RobustKind, frozen=True, kw_only=True, tag="MoNNA", tag_field="kind"):
    """The mean of the n - f rows nearest to a trusted one, with itself.

    Source: Farhadkhani et al. 2023, "Robust Collaborative Learning with Linear Gradient Overhead",
    algorithm 1.
    Differs: in the paper each worker trusts its own row. Here one aggregate is made for all, and
    all trust the same: a worker that is known to be honest, such as the user's own machine. A step
    in which it sends nothing, or what is not finite, ends the run.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
        trusted: Which worker; of rows of no worker the place among them.
    """

    trusted: Annotated[int, msgspec.Meta(ge=0)] = 0

    def check(self) -> list[Violation]:
        """The trusted row stays one."""
        fewer = [tag(each) for each in self.before if each.rows(1 << 20) < 1 << 20]
        if not fewer:
            return []
        path = "data_parallel.aggregate.before"
        rule = f"leaves no trusted row to MoNNA: {fewer[0]} makes rows of several"
        legal = "[] (or members that make a row of each row)"
        return [Violation(path=path, value=fewer, rule=rule, legal=legal)]

    def refused(self, n: int) -> list[Violation]:
        """So many hostile rows are too many, or there is no such row."""
        found = super().refused(n)
        if self.trusted >= n:
            path, rule = "data_parallel.aggregate.trusted", f"is none of {n} rows"
            legal = f"0 to {n - 1}"
            found.append(Violation(path=path, value=self.trusted, rule=rule, legal=legal))
        return found

    takes_numbers: ClassVar[bool] = True

    exact: ClassVar[bool] = True
    assumes: ClassVar[str] = "one row known to be honest"

    def epsilon(self, n: int) -> float:
        """The least that there is."""
        return self.byzantine / (n - self.byzantine)

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """The same for each neighbour.

        Raises:
            RunError: The trusted row is missing or not finite.
        """
        from .geometry import mean_of, nearest

        if self.trusted not in points.numbers:
            raise RunError(f"row {self.trusted}, which MoNNA trusts, is missing or not finite")
        trusted = points.numbers.index(self.trusted)
        return mean_of(nearest(points.squared[trusted], points.n - f), points.n)
