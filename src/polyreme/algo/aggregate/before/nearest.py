"""Each row becomes the mean of those nearest to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kind import BeforeKind

if TYPE_CHECKING:
    from ..geometry import Array, Points


class NearestNeighbourMixing(
    BeforeKind, frozen=True, kw_only=True, tag="NearestNeighbourMixing", tag_field="kind"
):
    """The mean of the n - f rows nearest to a row, with itself, takes its place (NNM).

    Source: Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under
    Heterogeneity", algorithm 2.
    """

    def mixing(self, points: Points, f: int, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """1 / (n - f) for each neighbour."""
        import numpy as np

        from ..geometry import nearest

        n = points.n
        weights = np.zeros((n, n + 2))
        for row, squared in enumerate(points.squared):
            weights[row, nearest(squared, n - f)] = 1 / (n - f)
        return weights, state
