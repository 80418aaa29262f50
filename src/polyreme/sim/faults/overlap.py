"""Faults of one worker at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...errors import Violation
from . import Crash, Fault, Join, RandomCrashes


def overlapping(faults: Sequence[Fault], path: str) -> Iterator[Violation]:
    """A worker that is away does not go; `path` is where the faults stand in the spec."""
    for index, fault in enumerate(faults):
        at = f"{path}[{index}]"
        for before, other in enumerate(faults[:index]):
            found = _refused(fault, other, at, f"{path}[{before}]")
            if found is not None:
                yield found
                break


def _refused(fault: Fault, other: Fault, at: str, other_at: str) -> Violation | None:
    if isinstance(fault, Crash | Join) and isinstance(other, Crash | Join):
        (start_s, stop_s), (first_s, last_s) = _away(fault), _away(other)
        if fault.worker != other.worker or start_s >= last_s or first_s >= stop_s:
            return None
        until = "for good" if math.isinf(last_s) else f"to {last_s}"
        rule = f"is away from {first_s} {until} by {other_at}, and would be by this at once"
        legal = f"a worker that {other_at} is not of (or another time)"
        return Violation(path=f"{at}.worker", value=fault.worker, rule=rule, legal=legal)
    if isinstance(fault, Join) or isinstance(other, Join):
        return None
    kind = fault.__struct_config__.tag
    random = isinstance(other, RandomCrashes)
    rule = f"stands beside {other_at}, which crashes {'any' if random else 'a'} worker too"
    return Violation(path=f"{at}.kind", value=kind, rule=rule, legal="leave one of both out")


def _away(fault: Crash | Join) -> tuple[float, float]:
    (outage,) = fault.outages(fault.worker, 0)
    return outage.at_s, math.inf if outage.back_s is None else outage.back_s
