"""A worker is gone for a while, or for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from ...errors import Violation
from .kind import FaultKind, Number, Outage, Seconds, absent


class Crash(FaultKind, frozen=True, kw_only=True, tag="crash", tag_field="kind"):
    """One worker crashes, once: it loses its round, its state and what it has not read.

    What it had sent still arrives, what is sent to it until it is back is lost. Back it asks
    servers for parameters; its batches go on after the last that it began.

    Attributes:
        worker: Which, counted from 0.
        at_s: When.
        back_s: When it is back; never unless given.
        detect_s: Seconds after which servers hear of it.
    """

    worker: Number
    at_s: Seconds
    back_s: Annotated[float, msgspec.Meta(ge=0, examples=[20.0])] | None = None
    detect_s: Seconds = 1.0

    def outages(self, worker: int, seed: int) -> Iterator[Outage]:
        """The worker's one."""
        if worker == self.worker:
            yield Outage(self.at_s, self.back_s, self.detect_s)

    def refused(self, n: int, path: str) -> list[Violation]:
        """The worker is there, and back after it went."""
        found = absent(self.worker, n, path)
        if self.back_s is not None and self.back_s <= self.at_s:
            rule = f"is not after the crash (at_s = {self.at_s})"
            legal = f"{self.at_s + 1} (or any number > {self.at_s})"
            found.append(
                Violation(path=f"{path}.back_s", value=self.back_s, rule=rule, legal=legal)
            )
        return found
