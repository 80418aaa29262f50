"""How long workers compute."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..algo.worker import Worker

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Constant(msgspec.Struct, frozen=True, kw_only=True, tag="constant", tag_field="kind"):
    """Every gradient takes as long.

    Attributes:
        seconds: Of one gradient.
    """

    seconds: _Positive = 1.0

    def gradient_s(self, worker: Worker, batch: int) -> float:
        """Seconds of one gradient of a worker."""
        return self.seconds


class Heterogeneous(
    msgspec.Struct, frozen=True, kw_only=True, tag="heterogeneous", tag_field="kind"
):
    """The first workers are slower than the others.

    Attributes:
        seconds: Of one gradient of the others.
        slow_fraction: Share of the workers that are slow.
        slow_factor: How many times longer they take.
    """

    seconds: _Positive = 1.0
    slow_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    slow_factor: _Positive = 5.0

    def gradient_s(self, worker: Worker, batch: int) -> float:
        """Seconds of one gradient of a worker."""
        slow = worker.rank < round(self.slow_fraction * worker.n)
        return self.seconds * (self.slow_factor if slow else 1.0)


Compute = Constant | Heterogeneous
