"""A worker comes later."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import Violation
from .kind import FaultKind, Number, Outage, Seconds, absent


class Join(FaultKind, frozen=True, kw_only=True, tag="join", tag_field="kind"):
    """One worker is not there from the start; servers know.

    Attributes:
        worker: Which, counted from 0.
        at_s: When it comes.
    """

    worker: Number
    at_s: Seconds

    def outages(self, worker: int, seed: int) -> Iterator[Outage]:
        """The worker's time before."""
        if worker == self.worker:
            yield Outage(0.0, self.at_s, None)

    def refused(self, n: int, path: str) -> list[Violation]:
        """The worker is one of all."""
        return absent(self.worker, n, path)
