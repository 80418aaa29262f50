"""Workers that are slow for a while."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .draws import uniform
from .kind import ComputeKind, Positive, Share


class Stragglers(ComputeKind, frozen=True, kw_only=True, tag="stragglers", tag_field="kind"):
    """Each worker is slow now and then, for a spell of batches.

    A worker's batches are cut in spells; whether it is slow in one is drawn for each alone, so
    that spells of slowness may follow each other.

    Source: no paper; with a spell of 1 as in the usual simulations of transient stragglers.

    Attributes:
        seconds: Of one gradient of a worker that is not slow.
        probability: That a worker is slow in a spell.
        factor: How many times longer it takes then.
        spell: Batches of a spell.
    """

    seconds: Positive = 1.0
    probability: Share = 0.1
    factor: Positive = 5.0
    spell: Annotated[int, msgspec.Meta(ge=1)] = 10

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Longer in slow spells."""
        slow = uniform(seed, rank, batch // self.spell) < self.probability
        return self.seconds * (self.factor if slow else 1.0)
