"""What sparse compressors share: how many entries are sent, and that fewer are as time goes on."""

from __future__ import annotations

import math
from typing import Annotated, Self

import msgspec

from .sparse import SparseKind

Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Sparsifier(SparseKind, frozen=True, kw_only=True):
    """A share of the entries is sent, at least one.

    Source of the warm-up: Lin et al. 2018, section 3.3; with 4 epochs and a ratio of 0.1 %: 25 %,
    6.3 %, 1.6 %, 0.4 %, then 0.1 %.

    Attributes:
        ratio: Share of the entries that is sent, once warm.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
    """

    ratio: Ratio = 0.01
    warmup_epochs: Annotated[int, msgspec.Meta(ge=0)] = 0
    epoch_steps: Annotated[int, msgspec.Meta(ge=1)] = 1

    def at(self, step: int) -> Self:
        """The compressor with the share of that step."""
        epoch = step // self.epoch_steps
        if epoch >= self.warmup_epochs:
            epoch = self.warmup_epochs
        share = self.ratio ** ((epoch + 1) / (self.warmup_epochs + 1))
        return msgspec.structs.replace(self, ratio=share, warmup_epochs=0)


def count(ratio: float, n_entries: int) -> int:
    """Entries that such a share is, rounded down, but at least one if there are any."""
    return min(n_entries, max(1, math.floor(ratio * n_entries + 1e-9)))
