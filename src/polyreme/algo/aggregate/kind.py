"""What every aggregator has: one vector out of one of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ...errors import undefined

if TYPE_CHECKING:
    import torch

State = dict[str, Any]


class AggregatorKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An aggregator makes one vector of the workers' vectors; its state is equal on all workers."""

    is_mean: ClassVar[bool] = False
    """Whether it is the plain mean, which sums made on the way give too."""
    by_entry: ClassVar[bool] = False
    """Whether each entry depends on the same entry of the rows alone: it can be made in shares."""

    def init(self, like: torch.Tensor) -> State:
        """State before the first aggregate."""
        return {}

    def combine(
        self, rows: Sequence[torch.Tensor], state: State
    ) -> tuple[torch.Tensor, State, tuple[int, ...]]:
        """The aggregate of rows in order of workers, the next state, and which were left out.

        A worker that has nothing to give (no labels, not sampled) is no row.
        """
        raise undefined(self, "combine")
