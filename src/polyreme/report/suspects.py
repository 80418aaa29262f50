"""Workers that a robust aggregate set aside, or that stood farthest from it."""

from __future__ import annotations

from collections import Counter

from ..units import count
from .runs import Run
from .words import percent

HEADS = ("worker", "steps", "share", "suspect in more than half")
_SHOWN = 32


def shares(run: Run) -> dict[int, float]:
    """The share of steps in which each worker was a suspect, of those in which any was."""
    named, by_worker = _counted(run)
    return {worker: n / named for worker, n in sorted(by_worker.items())}


def usual(run: Run) -> dict[int, float]:
    """The same of those that were in more than half."""
    return {worker: share for worker, share in shares(run).items() if share > 0.5}


def line(run: Run) -> str:
    """Whom a robust aggregate suspected, in a sentence; empty where it never named any."""
    named, _ = _counted(run)
    if not named:
        return ""
    found, steps = usual(run), count(named, "step")
    if not found:
        return f"no worker was set aside or farthest in more than half of {steps}"
    who = "worker" if len(found) == 1 else "workers"
    was = "was" if len(found) == 1 else "were"
    each = ", ".join(map(percent, found.values()))
    return f"{who} {', '.join(map(str, found))} {was} set aside or farthest in {each} of {steps}"


def rows(run: Run) -> list[tuple[str, ...]]:
    """Of each worker that was ever a suspect, in how many steps; of many those in the most."""
    _, by_worker = _counted(run)
    found = shares(run)
    most = sorted(sorted(found, key=lambda worker: -found[worker])[:_SHOWN])
    return [
        (
            str(worker),
            str(by_worker[worker]),
            percent(found[worker]),
            "yes" if found[worker] > 0.5 else "no",
        )
        for worker in most
    ]


def _counted(run: Run) -> tuple[int, Counter[int]]:
    """Of all attempts together: steps with suspects, and those of each worker.

    A log that was cut has counts of its logged steps alone.
    """
    found, named = Counter[int](), 0
    for event in run.suspects:
        found.update(event.by_worker)
        named += event.named
    if not run.suspects:
        for step in run.steps:
            found.update(step.suspects or ())
            named += bool(step.suspects)
    return named, found
