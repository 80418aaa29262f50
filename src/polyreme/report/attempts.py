"""A run's attempts: which steps led to its end, and what starting again cost."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from .runs import Run


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """Training began again: in which attempt, after which step, when.

    `stopped_s` passed from the last word of the attempt before until training went on.
    """

    attempt: int
    step: int
    t: float
    devices: int
    stopped_s: float


def restarts(run: Run) -> tuple[Again, ...]:
    """Every start but the first."""
    times = [(event.t, event.attempt) for event in run.steps]
    times += [(event.t, event.attempt) for event in run.evals]
    times += [(event.t, event.attempt) for event in run.checkpoints]
    found: list[Again] = []
    for event in run.restarts:
        if event.attempt == 0:
            continue
        ends = [t for t, attempt in times if t <= event.t and attempt < event.attempt]
        before = max([*ends, *(again.t for again in found)], default=0.0)
        found.append(
            Again(
                attempt=event.attempt,
                step=event.step,
                t=event.t,
                devices=event.devices,
                stopped_s=event.t - before,
            )
        )
    return tuple(found)


def led_to_end(run: Run) -> np.ndarray:
    """Whether each logged step led to where the run ended: no later attempt took it back."""
    limits = _limits(run)
    return np.array([event.step <= limits[event.attempt] for event in run.steps], dtype=bool)


def stands(run: Run, attempt: int, step: int) -> bool:
    """Whether no later attempt took back what an attempt did at a step."""
    return step <= _limits(run).get(attempt, math.inf)


def position(run: Run) -> int:
    """The step that the run stands at: its last one, or where the last attempt goes on from."""
    events = [(event.t, event.step) for event in run.restarts]
    events += [(event.t, event.step) for event in run.steps]
    return max(events, key=lambda event: event[0], default=(0.0, 0))[1]


def _limits(run: Run) -> dict[int, float]:
    """The last step of each attempt that was not taken back by a later one."""
    starts = {event.attempt: event.step for event in run.restarts}
    for event in run.steps:
        starts.setdefault(event.attempt, event.step - 1)
    limits, least = {}, math.inf
    for attempt in sorted(starts, reverse=True):
        limits[attempt] = least
        least = min(least, starts[attempt])
    return limits


def repeated(run: Run) -> np.ndarray:
    """How many of the steps that each logged one stands for had been done before."""
    counts, furthest = [], 0
    for event, n_steps in zip(run.steps, run.covered, strict=True):
        counts.append(n_steps - min(n_steps, max(0, event.step - furthest)))
        if not event.skipped:
            furthest = max(furthest, event.step)
    return np.array(counts, dtype=np.int64)


def again_s(run: Run) -> float:
    """Seconds of steps that were done again."""
    return math.fsum(e.step_s * int(n) for e, n in zip(run.steps, repeated(run), strict=True))


def useful_s(run: Run) -> float:
    """Seconds of steps done for the first time, and not skipped."""
    again = repeated(run).tolist()
    return math.fsum(
        event.step_s * (n_steps - n_again)
        for event, n_steps, n_again in zip(run.steps, run.covered, again, strict=True)
        if not event.skipped
    )


def kept_skipped(run: Run) -> int:
    """Skipped steps on the way to the run's end."""
    return sum(event.skipped for event, led in zip(run.steps, led_to_end(run), strict=True) if led)


def attempts(run: Run) -> int:
    """How many attempts the log tells of."""
    groups = (run.steps, run.evals, run.checkpoints, run.faults, run.restarts)
    return len({event.attempt for group in groups for event in group})
