"""Rows are shortened to a norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from .kind import BeforeKind

if TYPE_CHECKING:
    from ..geometry import Array, Points


class Clipping(BeforeKind, frozen=True, kw_only=True, tag="Clipping", tag_field="kind"):
    """Rows longer than a norm are shortened to it.

    Source: Allouah et al. 2025, "Adaptive Gradient Clipping for Robust Federated Learning",
    section 3, where it is called static clipping.

    Attributes:
        c: The largest norm.
    """

    c: Annotated[float, msgspec.Meta(gt=0)] = 2.0

    def mixing(self, points: Points, f: int, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """How much of each row is left."""
        return shortened(points.norms, self.c), state


def shortened(norms: Array, largest: float) -> Array:
    """Weights that bring rows of these norms to a norm at most."""
    import numpy as np

    from ..geometry import affine

    left = np.ones(len(norms))
    np.divide(largest, norms, out=left, where=norms > largest)
    return affine(np.diag(left))
