"""What happens next: events in order of time, equal ones in the order they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A virtual clock. `at` sets an event, `run` plays them until none is left."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_set = 0

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do something at a time that has not passed."""
        assert when_s >= self.now_s, "time does not turn back"
        heapq.heappush(self._events, (when_s, self._n_set, what))
        self._n_set += 1

    def run(self) -> None:
        """Play all events."""
        while self._events:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
