"""The last aggregate, moved by what rows differ from it, of a bounded length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points


class CenteredClipping(
    RobustKind, frozen=True, kw_only=True, tag="CenteredClipping", tag_field="kind"
):
    """The mean of the rows, each drawn to the last aggregate as far as it is more than tau away.

    The first centre is 0. Each iteration starts from what the one before made.

    Source: Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization",
    algorithm 1.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
        tau: How far from the centre a row may be; the result follows the rows' scale only where
            this does.
        iterations: How often.
    """

    tau: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    iterations: Annotated[int, msgspec.Meta(ge=1)] = 1

    centred: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True

    epsilon_source: ClassVar[str] = "the rows may be as far from the centre as one likes"
    assumes: ClassVar[str] = (
        "rows within tau of the last aggregate, as workers' momentum makes them"
    )

    def epsilon(self, n: int) -> float:
        """None: without attack too it moves no more than tau an iteration."""
        return float("inf")

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """Weights of the rows and of the centre."""
        import numpy as np

        n = points.n
        shares = np.full(n, 1 / n) if weights is None else weights / weights.sum()
        found = np.eye(1, n + 2, n)[0]
        for _ in range(self.iterations):
            away = np.sqrt(points.squared_from(found))
            kept = np.ones(n)
            np.divide(self.tau, away, out=kept, where=away > self.tau)
            step = shares * kept
            found = found * (1 - step.sum())
            found[:n] += step
        return np.atleast_2d(found)
