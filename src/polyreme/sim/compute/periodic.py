"""Workers that are slow again and again."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .draws import uniform
from .kind import ComputeKind, Positive, Share

Phase = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Periodic(ComputeKind, frozen=True, kw_only=True, tag="periodic", tag_field="kind"):
    """Each worker is slow for the same share of every period of its batches.

    A period is counted in batches, so that what a gradient takes does not depend on waiting.

    Source: no paper; machines that are shared with work that comes at regular times.

    Attributes:
        seconds: Of one gradient of a worker that is not slow.
        factor: How many times longer it takes while it is.
        period: Batches from one beginning of slowness to the next.
        share: Share of a period's batches that are slow, its first ones.
        phases: Where in its period each worker begins, as a share of it; workers beyond the list
            take it from its start again. Empty: drawn for each worker.
    """

    seconds: Positive = 1.0
    factor: Positive = 5.0
    period: Annotated[int, msgspec.Meta(ge=1)] = 100
    share: Share = 0.25
    phases: tuple[Phase, ...] = ()

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Longer in the first part of a period."""
        phase = self.phases[rank % len(self.phases)] if self.phases else uniform(seed, rank)
        slow = (batch + int(phase * self.period)) % self.period < self.share * self.period
        return self.seconds * (self.factor if slow else 1.0)
