"""What an attempt counts of each worker, for the end of its log."""

from __future__ import annotations

from collections import Counter

from .. import runlog
from .route import Came


class Tally:
    """Delays of gradients, and how often workers were suspects."""

    def __init__(self) -> None:
        self._delays: dict[int, list[int]] = {}
        self._suspects: Counter[int] = Counter()
        self._named = 0

    def add(self, came: Came) -> None:
        """One step more."""
        for worker, delay in came.delays:
            self._delays.setdefault(worker, []).append(delay)
        self._suspects.update(came.suspects)
        self._named += bool(came.suspects)

    def write(self, log: runlog.Writer, step: int) -> None:
        """What there was, up to this step."""
        if self._delays:
            found = {w: runlog.histogram(self._delays[w]) for w in sorted(self._delays)}
            log.write(runlog.DelaysEvent(t=log.t, attempt=log.attempt, step=step, by_worker=found))
        if self._named:
            log.write(
                runlog.SuspectsEvent(
                    t=log.t,
                    attempt=log.attempt,
                    step=step,
                    named=self._named,
                    by_worker=dict(sorted(self._suspects.items())),
                )
            )
