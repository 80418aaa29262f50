"""Any worker may be gone, at any time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import msgspec

from ..compute.draws import uniform
from .kind import FaultKind, Outage, Seconds


class RandomCrashes(FaultKind, frozen=True, kw_only=True, tag="random_crashes", tag_field="kind"):
    """Every worker crashes again and again, at times that are drawn without memory.

    As `crash`, for all workers.

    Attributes:
        every_s: Seconds that a worker is there before it crashes, in the mean.
        back_after_s: Seconds from a crash until it is back.
        detect_s: Seconds after which servers hear of a crash.
    """

    every_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    back_after_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    detect_s: Seconds = 1.0

    def outages(self, worker: int, seed: int) -> Iterator[Outage]:
        """Drawn one after another."""
        back_s, count = 0.0, 0
        while True:
            at_s = back_s - self.every_s * math.log(uniform(seed, worker, count, 0))
            back_s, count = at_s + self.back_after_s, count + 1
            yield Outage(at_s, back_s, self.detect_s)
