"""The median of each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .ordered import median, sorted_columns, weighted_median
from .robust import RobustKind

if TYPE_CHECKING:
    import torch


class CoordinateMedian(
    RobustKind, frozen=True, kw_only=True, tag="CoordinateMedian", tag_field="kind"
):
    """The median of each entry over the rows, of an even number the midpoint.

    Rows that count unlike have the point with half of the weight on either side, or the midpoint.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", definition 1.
    """

    geometric: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = True

    def entries(self, block: torch.Tensor, f: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Medians."""
        if weights is not None:
            return weighted_median(block, weights)
        return median(sorted_columns(block))
