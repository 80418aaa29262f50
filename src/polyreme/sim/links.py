"""Messages under way: links that are busy, and when messages come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..algo.effects import Received
from .clock import Clock
from .network import Network
from .network.kind import Way


@dataclass(frozen=True, kw_only=True, slots=True)
class Mail:
    """A message, and when it was sent."""

    received: Received
    sent_s: float


class Links:
    """The links of players on a clock. `deliver` is called when a message has come whole.

    `machines` says of each player whose machine it is on: all there use the same links, and none
    for what they send each other, which comes at once.
    """

    def __init__(
        self,
        network: Network,
        machines: Sequence[int],
        clock: Clock,
        deliver: Callable[[int, Mail], None],
    ) -> None:
        self._network, self._clock, self._deliver = network, clock, deliver
        self._machines, self._n = machines, len(machines)
        self._out_free_s: defaultdict[int, float] = defaultdict(float)
        self._in_free_s: defaultdict[int, float] = defaultdict(float)
        self._ways: dict[tuple[int, int], Way] = {}

    def send(self, to: int, n_bytes: int, mail: Mail) -> None:
        """Put a message behind those that leave by the same link."""
        source, place = self._machines[mail.received.source], self._machines[to]
        if source == place:
            self._clock.at(mail.sent_s, self._deliver, to, mail)
            return
        way = self._ways.get((source, place))
        if way is None:
            way = self._ways[source, place] = self._network.way(source, place, self._n)
        start_s = max(self._out_free_s[way.out], mail.sent_s)
        left_s = self._out_free_s[way.out] = start_s + n_bytes / way.out_bytes_per_s
        here_s, last_s = start_s + way.latency_s, left_s + way.latency_s
        self._clock.at(here_s, self._take, to, n_bytes / way.in_bytes_per_s, last_s, way.into, mail)

    def _take(self, to: int, takes_s: float, last_s: float, link: int, mail: Mail) -> None:
        """The first byte is there: put the message behind those that come in by the same link."""
        start_s = max(self._in_free_s[link], self._clock.now_s)
        whole_s = self._in_free_s[link] = max(start_s + takes_s, last_s)
        self._clock.at(whole_s, self._deliver, to, mail)
