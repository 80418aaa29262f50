"""What happens next: events in order of time, equal ones in the order they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A virtual clock. `at` sets an event, `step` plays the next one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n_set = 0

    def at(self, when_s: float, what: Callable[..., None], *given: Any) -> None:
        """Do something at a time that has not passed."""
        assert when_s >= self.now_s, "time does not turn back"
        heapq.heappush(self._events, (when_s, self._n_set, what, given))
        self._n_set += 1

    @property
    def n_left(self) -> int:
        """Events to come."""
        return len(self._events)

    def step(self) -> bool:
        """Play the next event; False where none is left."""
        if not self._events:
            return False
        self.now_s, _, what, given = heapq.heappop(self._events)
        what(*given)
        return True
