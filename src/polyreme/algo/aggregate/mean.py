"""The mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from .kind import AggregatorKind, State

if TYPE_CHECKING:
    import torch


class Mean(AggregatorKind, frozen=True, kw_only=True, tag="Mean", tag_field="kind"):
    """The mean of all workers, summed in their order. Source: no paper; the plain mean."""

    is_mean: ClassVar[bool] = True

    @property
    def by_entry(self) -> bool:
        """It does."""
        return True

    def combine(
        self, rows: Sequence[torch.Tensor], state: State
    ) -> tuple[torch.Tensor, State, tuple[int, ...]]:
        """The mean."""
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total / len(rows), state, ()
