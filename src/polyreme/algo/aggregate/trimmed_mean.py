"""The mean of each entry without the extreme ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .ordered import sorted_columns, trimmed
from .robust import RobustKind

if TYPE_CHECKING:
    import torch


class TrimmedMean(RobustKind, frozen=True, kw_only=True, tag="TrimmedMean", tag_field="kind"):
    """The mean of each entry over the rows without its f smallest and its f largest values.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", definition 2.
    """

    geometric: ClassVar[bool] = False

    def entries(self, block: torch.Tensor, f: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Means of the values in the middle."""
        return trimmed(sorted_columns(block), f) if f else block.mean(0)
