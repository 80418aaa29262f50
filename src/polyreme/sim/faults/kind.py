"""What every fault has: when workers are away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from ...errors import Violation, undefined

Number = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Outage(NamedTuple):
    """A worker is away from a time until another (None: for good).

    Servers hear of it `detect_s` after it began; None says that it has not been there before.
    """

    at_s: float
    back_s: float | None
    detect_s: float | None


class FaultKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault is when which workers are away, in seconds of the virtual clock.

    A worker that crashes loses its round, its state and its messages that it has not read. What it
    had sent still arrives, what is sent to it until it is back is lost. Servers hear of it after
    `detect_s`, or when it is back if that is sooner, behind all that it had sent. When it is back,
    it begins with parameters that it asks servers for, and nothing else of what it had; its counts
    of batches and pushes go on, so that no batch comes twice and one that was begun is left out.
    """

    def outages(self, worker: int, seed: int) -> Iterator[Outage]:
        """Of one worker, in order of time."""
        raise undefined(self, "outages")

    def refused(self, n: int, path: str) -> list[Violation]:
        """What is wrong for n workers; `path` is where the fault stands in the spec."""
        return []


def absent(worker: int, n: int, path: str) -> list[Violation]:
    """The number of a worker that is not among n."""
    if worker < n:
        return []
    rule = f"is not among the {n} workers, which are counted from 0"
    legal = f"{n - 1} (or any integer >= 0 and <= {n - 1})"
    return [Violation(path=f"{path}.worker", value=worker, rule=rule, legal=legal)]
