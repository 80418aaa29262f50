"""What every aggregator has: one vector out of one of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

State = dict[str, Any]


class AggregatorKind(msgspec.Struct, frozen=True, kw_only=True):
    """An aggregator makes one vector of the workers' vectors; its state is equal on all workers."""

    def init(self, like: torch.Tensor) -> State:
        """State before the first aggregate."""
        return {}

    def combine(
        self, rows: Sequence[torch.Tensor], state: State
    ) -> tuple[torch.Tensor, State, tuple[int, ...]]:
        """The aggregate of rows in order of workers, the next state, and who was left out."""
        raise NotImplementedError
