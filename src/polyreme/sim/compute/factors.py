"""A speed for each worker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .kind import ComputeKind, Positive


class Factors(ComputeKind, frozen=True, kw_only=True, tag="factors", tag_field="kind"):
    """Each worker takes its own time, always the same.

    Attributes:
        seconds: Of one gradient at factor 1.
        factors: How many times as long each worker takes; workers beyond the list take it from
            its start again.
    """

    seconds: Positive = 1.0
    factors: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """The worker's."""
        return self.seconds * self.factors[rank % len(self.factors)]
