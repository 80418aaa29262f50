"""Learning-rate schedules: a factor on the rule's rate, as a pure function of the step."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


def _warmed(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


class Constant(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="constant",
    tag_field="kind",
):
    """Linear warm-up, then 1.

    Attributes:
        warmup: Steps over which the rate rises.
    """

    warmup: _Count = 0

    def factor(self, step: int, n_steps: int) -> float:
        """Factor on the learning rate at a step counted from 0."""
        return _warmed(step, self.warmup)


class Linear(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="linear",
    tag_field="kind",
):
    """Linear warm-up, then a straight line down to the last step.

    Attributes:
        warmup: Steps over which the rate rises.
        final: Share of the rate that is left at the last step.
    """

    warmup: _Count = 0
    final: _Share = 0.0

    def factor(self, step: int, n_steps: int) -> float:
        """Factor on the learning rate at a step counted from 0."""
        return _warmed(step, self.warmup) * (1 - (1 - self.final) * _done(step, self, n_steps))


class Cosine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="cosine",
    tag_field="kind",
):
    """Linear warm-up, then half a cosine. Source: Loshchilov and Hutter 2017, eq. 5.

    Attributes:
        warmup: Steps over which the rate rises.
        final: Share of the rate that is left at the last step.
    """

    warmup: _Count = 0
    final: _Share = 0.0

    def factor(self, step: int, n_steps: int) -> float:
        """Factor on the learning rate at a step counted from 0."""
        fallen = (1 - math.cos(math.pi * _done(step, self, n_steps))) / 2
        return _warmed(step, self.warmup) * (1 - (1 - self.final) * fallen)


def _done(step: int, schedule: Linear | Cosine, n_steps: int) -> float:
    after = n_steps - 1 - schedule.warmup
    return min(1.0, max(0.0, (step - schedule.warmup) / after)) if after > 0 else 0.0


Schedule = Constant | Linear | Cosine
