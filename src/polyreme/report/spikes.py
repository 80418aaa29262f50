"""Loss spikes: steps whose loss stands far above those before."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..runlog import StepEvent

WINDOW = 50  # finite losses before a step that say what is usual
LEAST = 30  # fewer say nothing
DEVIATIONS = 8.0  # normal noise stays below 6; that of small batches has heavier tails
LEAST_SHARE, LEAST_RISE = 0.1, 1e-3  # of the usual loss, and in its unit
_TO_SIGMA = 1.4826  # a standard deviation over a median absolute one, for normal noise
_APART = 5  # logged steps between parts of one spike, at most
_CHUNK = 20_000


class Spike(msgspec.Struct, frozen=True, kw_only=True):
    """Steps `first` to `last` lost more than is usual; `step` the most, at time `t`."""

    step: int
    t: float
    first: int
    last: int
    loss: float
    usual: float
    sample_ids: tuple[int, ...] | None = None

    @property
    def rise(self) -> float:
        """How far the loss stood above the usual."""
        return self.loss - self.usual


def spikes(steps: Sequence[StepEvent]) -> tuple[Spike, ...]:
    """Spikes of steps in order, each done once.

    A loss is one that exceeds what is usual by more than `DEVIATIONS` times the deviation,
    `LEAST_SHARE` of the usual, and `LEAST_RISE`. Usual is the median of up to `WINDOW` finite
    losses before it, gone on along their trend if that rises; the deviation is their median
    absolute one about the trend, scaled. Neighbouring ones are one spike.
    """
    known = [event for event in steps if event.loss is not None and np.isfinite(event.loss)]
    losses = np.array([event.loss for event in known], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # beside huge losses nothing is usual
        usual = usual_losses(losses)
        found = np.flatnonzero(losses - usual[0] > usual[1])
    groups: list[list[int]] = []
    for index in found.tolist():
        if groups and index - groups[-1][-1] <= _APART:
            groups[-1].append(index)
        else:
            groups.append([index])
    spiked = []
    for group in groups:
        top = max(group, key=lambda index: losses[index])
        event = known[top]
        spiked.append(
            Spike(
                step=event.step,
                t=event.t,
                first=known[group[0]].step,
                last=known[group[-1]].step,
                loss=float(losses[top]),
                usual=float(usual[0][group[0]]),
                sample_ids=event.sample_ids,
            )
        )
    return tuple(spiked)


def usual_losses(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each loss what was usual before it, and the rise that makes it a spike; NaN at first."""
    n = len(losses)
    middle, limit = np.full(n, np.nan), np.full(n, np.nan)
    for index in range(LEAST, min(WINDOW, n)):
        middle[index], limit[index] = (part[0] for part in _measure(losses[None, :index]))
    for start in range(WINDOW, n, _CHUNK):
        stop = min(n, start + _CHUNK)
        before = np.lib.stride_tricks.sliding_window_view(losses[start - WINDOW : stop - 1], WINDOW)
        middle[start:stop], limit[start:stop] = _measure(before)
    return middle, limit


def _measure(before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = before.shape[1]
    half = n // 2
    first, last = (np.median(part, axis=1) for part in (before[:, :half], before[:, -half:]))
    slope = (last - first) / (n - half)
    middle = np.median(before, axis=1)
    line = middle[:, None] + slope[:, None] * (np.arange(n) - (n - 1) / 2)
    deviation = _TO_SIGMA * np.median(np.abs(before - line), axis=1)
    usual = middle + np.maximum(slope, 0) * (n + 1) / 2
    least = np.maximum(LEAST_SHARE * np.abs(usual), LEAST_RISE)
    return usual, np.maximum(DEVIATIONS * deviation, least)
