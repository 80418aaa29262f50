"""The mean of the values of each entry that are nearest to its median."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .ordered import nearest_mean
from .robust import RobustKind

if TYPE_CHECKING:
    import torch


class MeanAroundMedian(
    RobustKind, frozen=True, kw_only=True, tag="MeanAroundMedian", tag_field="kind"
):
    """The mean of the n - f values of each entry that are nearest to its median (Meamed).

    Source: Xie et al. 2018, "Generalized Byzantine-tolerant SGD", definition 8.
    """

    geometric: ClassVar[bool] = False

    def entries(self, block: torch.Tensor, f: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Means of the values near the median."""
        return nearest_mean(block, len(block) - f)
