"""Heavy tails."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from .draws import uniform
from .kind import ComputeKind, Positive


class Pareto(ComputeKind, frozen=True, kw_only=True, tag="pareto", tag_field="kind"):
    """Seconds above a least one are drawn with a tail that falls as a power: few take very long.

    A gradient takes longer than x times the least with probability x^-shape. With a shape of 2 or
    less the deviation is infinite, so that means over a run come slowly to `seconds`.

    Source: Wang, Joshi and Wornell 2015, "Using Straggler Replication to Reduce Latency in
    Large-scale Parallel Computing" (Pareto as the model of heavy tails).

    Attributes:
        seconds: Of one gradient, in the mean.
        shape: How steeply the tail falls.
    """

    seconds: Positive = 1.0
    shape: Annotated[float, msgspec.Meta(gt=1)] = 2.5

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Drawn."""
        least_s = self.seconds * (self.shape - 1) / self.shape
        return least_s * math.pow(uniform(seed, rank, batch), -1 / self.shape)
