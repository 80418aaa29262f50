"""What a run says of its steps, and what it comes to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .. import runlog
from .state import State


class OnStep(Protocol):
    """Told of every step on rank 0, for a progress bar."""

    def __call__(
        self,
        *,
        step: int,
        n_steps: int,
        loss: float | None,
        samples_per_s: float,
        memory_bytes: int,
    ) -> None:
        """`step` of `n_steps` is done; a skipped one has no loss."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What this process knows at the end of a run, or of one attempt of it.

    `steps`, `samples` and `tokens` count from the run's first step, `step_s`, `compute_s` and
    `wire_bytes` are of this attempt. `skipped` steps changed nothing.
    """

    status: runlog.Status
    steps: int
    samples: int
    tokens: int
    seconds: float
    final_loss: float | None
    metrics: Mapping[str, float]
    step_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    wire_bytes: int
    peak_bytes: int
    skipped: int
    state: State = field(repr=False)

    @property
    def step_s_median(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self.step_s) if self.step_s else None
