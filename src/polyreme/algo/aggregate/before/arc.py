"""The longest rows are shortened to the next one's norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clipping import shortened
from .kind import BeforeKind

if TYPE_CHECKING:
    from ..geometry import Array, Points


class ARC(BeforeKind, frozen=True, kw_only=True, tag="ARC", tag_field="kind"):
    """The floor of 2 f (n - f) / n longest rows are shortened to the norm of the longest other.

    Source: Allouah et al. 2025, "Adaptive Gradient Clipping for Robust Federated Learning",
    algorithm 2.
    """

    def mixing(self, points: Points, f: int, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """How much of each row is left."""
        import numpy as np

        n = points.n
        clipped = 2 * f * (n - f) // n
        return shortened(points.norms, float(np.sort(points.norms)[n - clipped - 1])), state
