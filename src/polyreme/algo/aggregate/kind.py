"""What every aggregator has: one vector out of one of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ...errors import Violation, undefined
from ..effects import Split

if TYPE_CHECKING:
    import torch

State = dict[str, Any]
Combined = tuple["torch.Tensor", State, tuple[int, ...]]


class AggregatorKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An aggregator makes one vector of the workers' vectors; its state is equal on all workers."""

    is_mean: ClassVar[bool] = False
    """Whether it is the plain mean, which sums made on the way give too."""
    robust: ClassVar[bool] = False
    """Whether rows of any content may be among those given; then rows are given as they are."""
    takes_weights: ClassVar[bool] = False
    """Whether rows may count unlike."""
    takes_numbers: ClassVar[bool] = False
    """Whether it matters whose each row is."""

    @property
    def by_entry(self) -> bool:
        """Whether each entry depends on the same entry of the rows alone: shares can make it."""
        return False

    @property
    def bears(self) -> int:
        """How many workers may be absent, or not finite, without a step being lost for it."""
        return 0

    def refused(self, n: int) -> list[Violation]:
        """What forbids this aggregator for so many rows."""
        return []

    def init(self, like: torch.Tensor) -> State:
        """State before the first aggregate."""
        return {}

    def combine(self, rows: Sequence[torch.Tensor], state: State) -> Combined | Split[Combined]:
        """The aggregate of rows in order of workers, the next state, and which are suspects.

        A worker that has nothing to give (no labels, not sampled) is no row. Suspects are numbers
        of rows, ascending: those that were set aside, or stand farthest from what came out. One
        that `takes_weights` also has an argument `weights`, one number a row, None if all count
        alike; a robust one `absent`, how many rows are missing that might have been; one
        that `takes_numbers` `numbers`, whose each row is. Where a replica is split, rows are its
        parts' shares of them.
        """
        raise undefined(self, "combine")
