"""Workers that a robust aggregate set aside, or that stood farthest from it; and the hostile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..units import count
from .runs import Run
from .words import percent

_HEADS = ("worker", "steps", "share", "suspect in more than half")
_SHOWN = 32


def shares(run: Run) -> dict[int, float]:
    """The share of steps in which each worker was a suspect, of those in which any was."""
    named, by_worker = _counted(run)
    return {worker: n / named for worker, n in sorted(by_worker.items())}


def usual(run: Run) -> dict[int, float]:
    """The same of those that were in more than half."""
    return {worker: share for worker, share in shares(run).items() if share > 0.5}


def hostile(run: Run) -> dict[int, str]:
    """The attack that each worker played."""
    simulate = run.spec.get("simulate")
    attack = simulate.get("attack") if isinstance(simulate, Mapping) else None
    found = dict[int, str]()
    for each in attack if isinstance(attack, list) else [attack]:
        if isinstance(each, Mapping):
            workers = each.get("workers")
            named = workers if isinstance(workers, list) else []
            kind = str(each.get("kind", "unknown"))
            found |= {worker: kind for worker in named if isinstance(worker, int)}
    return dict(sorted(found.items()))


def line(run: Run) -> str:
    """Whom a robust aggregate suspected, and who was hostile; empty where nobody was."""
    played = hostile(run)
    by_kind = {
        kind: ", ".join(str(worker) for worker, each in played.items() if each == kind)
        for kind in dict.fromkeys(played.values())
    }
    who = "; ".join(f"{workers} ({kind})" for kind, workers in by_kind.items())
    return "; ".join(filter(None, [_suspected(run), f"hostile: {who}" if who else ""]))


def _suspected(run: Run) -> str:
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


def heads(run: Run) -> tuple[str, ...]:
    """Of the columns of `rows`."""
    return (*_HEADS, "attack") if hostile(run) else _HEADS


def rows(run: Run) -> list[tuple[str, ...]]:
    """Of each worker that was ever a suspect, in how many steps; of many those in the most.

    Where workers were hostile, of those too, and each with its attack.
    """
    _, by_worker = _counted(run)
    found, played = shares(run), hostile(run)
    most = sorted({**dict.fromkeys(played, 0.0), **found}.items(), key=lambda each: -each[1])
    return [
        (
            str(worker),
            str(by_worker[worker]),
            percent(share),
            "yes" if share > 0.5 else "no",
            *((played.get(worker, "none"),) if played else ()),
        )
        for worker, share in sorted(most[:_SHOWN])
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
