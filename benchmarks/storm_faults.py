"""Faults that a storm plants inside ranks; imported in the process that ranks are forked from.

Where the folder that STORM_FAULTS names holds a file ``rank-R``, the next backward pass of that
rank gives NaN: for the loss, or, where the file says "gradient", for the gradients alone.
STORM_SKIP names steps in which the first rank's loss is NaN, for a run that is to skip the same
steps as another. A step takes STORM_PACE seconds at least. All ranks must score a loss.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from storm_runs import FOLDER, PACE, SKIP

from polyreme.runtime import making
from polyreme.runtime.executor import Executor

_cross_entropy = making.cross_entropy
_play = Executor.__call__
_steps = [0]


class _BadGradient(torch.autograd.Function):
    """The value goes through, its gradient becomes NaN."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.nan


def _counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _steps[0] += 1
    start_s = time.monotonic()
    found = _play(*args)
    time.sleep(max(0.0, start_s + float(os.environ.get(PACE, "0")) - time.monotonic()))
    return found


def _poisoned(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, weight = _cross_entropy(logits, labels)
    rank = os.environ["RANK"]
    if rank == "0" and str(_steps[0]) in os.environ.get(SKIP, "").split(","):
        return total * torch.nan, weight
    order = Path(os.environ[FOLDER]) / f"rank-{rank}"
    if not order.exists():
        return total, weight
    what = order.read_text()
    order.unlink()
    return (_BadGradient.apply(total) if what == "gradient" else total * torch.nan), weight


making.cross_entropy = _poisoned
Executor.__call__ = _counted  # type: ignore[method-assign]
