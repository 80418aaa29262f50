"""Waiting times without memory."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from .draws import uniform
from .kind import ComputeKind, Positive


class Exponential(ComputeKind, frozen=True, kw_only=True, tag="exponential", tag_field="kind"):
    """A constant part and one that is drawn for each gradient, exponentially distributed.

    Source: Lee et al. 2018, "Speeding Up Distributed Machine Learning Using Codes" (shifted);
    Dutta et al. 2018, "Slow and Stale Gradients Can Win the Race" (constant part 0).

    Attributes:
        seconds: Of one gradient, in the mean.
        constant: Share of it that is the same for every gradient.
    """

    seconds: Positive = 1.0
    constant: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Drawn."""
        drawn = -math.log(uniform(seed, rank, batch))
        return self.seconds * (self.constant + (1 - self.constant) * drawn)
