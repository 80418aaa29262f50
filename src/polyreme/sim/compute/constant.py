"""All alike."""

from __future__ import annotations

from .kind import ComputeKind, Positive


class Constant(ComputeKind, frozen=True, kw_only=True, tag="constant", tag_field="kind"):
    """Every gradient takes as long.

    Attributes:
        seconds: Of one gradient.
    """

    seconds: Positive = 1.0

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """The same for all."""
        return self.seconds
