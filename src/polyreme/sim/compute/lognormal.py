"""Products of many small delays."""

from __future__ import annotations

import math
from statistics import NormalDist

from .draws import uniform
from .kind import ComputeKind, Positive


class LogNormal(ComputeKind, frozen=True, kw_only=True, tag="lognormal", tag_field="kind"):
    """The logarithm of each gradient's seconds is drawn from a normal distribution.

    Source: no paper; a usual fit of step times with a long tail.

    Attributes:
        seconds: Of one gradient, in the mean.
        spread: Standard deviation of a gradient's seconds over their mean.
    """

    seconds: Positive = 1.0
    spread: Positive = 0.2

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Drawn."""
        variance = math.log1p(self.spread**2)
        drawn = NormalDist().inv_cdf(uniform(seed, rank, batch))
        return self.seconds * math.exp(math.sqrt(variance) * drawn - variance / 2)
