"""Messages under way: links that are busy, and when messages come."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..algo.effects import Received
from ..algo.ledger import Ledger
from .clock import Clock
from .compute.draws import uniform
from .network import Network
from .network.kind import Way

_Pair = tuple[int, int]
_LOSS, _JITTER = 0, 1


class Mail(NamedTuple):
    """A message, when it was sent, and of which life of a worker it is.

    A notice is nobody's message: it has no bytes, and follows those that its source had sent.
    `tag` is that of `Send`.
    """

    received: Received
    sent_s: float
    life: int = 0
    is_notice: bool = False
    tag: int = 0


class Links:
    """The links of n workers, and of servers, on a clock.

    `machines` says of each player whose machine it is on: all there use the same links, and none
    for what they send each other, which comes at once. `deliver` is called when a message has come
    whole. Bytes are counted each time that they leave.
    """

    def __init__(
        self,
        network: Network,
        machines: Sequence[int],
        n: int,
        clock: Clock,
        ledger: Ledger,
        deliver: Callable[[int, Mail], None],
        seed: int,
    ) -> None:
        self._network, self._n, self._clock, self._deliver = network, n, clock, deliver
        self._machines = machines
        self._ledger, self._seed, self._is_sure = ledger, seed, network.is_sure
        self._out_free_s: defaultdict[int, float] = defaultdict(float)
        self._in_free_s: defaultdict[int, float] = defaultdict(float)
        self._ways: dict[_Pair, Way] = {}
        self._n_left: defaultdict[_Pair, int] = defaultdict(int)
        self._here_s: defaultdict[_Pair, float] = defaultdict(float)
        self._behind: dict[_Pair, deque[tuple[int, Mail]]] = {}

    def send(self, to: int, n_bytes: int, mail: Mail) -> None:
        """Put a message behind those that leave by the same link."""
        pair = mail.received.source, to
        if self._machines[pair[0]] == self._machines[to]:
            self._clock.at(self._clock.now_s, self._deliver, to, mail)
        elif pair in self._behind:
            self._behind[pair].append((n_bytes, mail))
        else:
            self._leave(pair, n_bytes, mail)

    def _leave(self, pair: _Pair, n_bytes: int, mail: Mail) -> None:
        way = self._ways.get(pair)
        if way is None:
            source, place = self._machines[pair[0]], self._machines[pair[1]]
            way = self._ways[pair] = self._network.way(source, place, self._n)
        if not mail.is_notice:
            self._ledger.sent(*pair, n_bytes)
        start_s = max(self._out_free_s[way.out], self._clock.now_s)
        left_s = self._out_free_s[way.out] = start_s + n_bytes / way.out_bytes_per_s
        late_s = way.latency_s
        here_s = start_s + late_s
        if not self._is_sure:
            if not mail.is_notice:
                self._n_left[pair] += 1
                if self._drawn(pair, _LOSS) < self._network.loss:
                    self._behind[pair] = deque([(n_bytes, mail)])
                    self._clock.at(left_s + self._network.retry_s, self._again, pair)
                    return
                late_s -= self._network.jitter_s * math.log(self._drawn(pair, _JITTER))
            here_s = self._here_s[pair] = max(start_s + late_s, self._here_s[pair])
        takes_s = n_bytes / way.in_bytes_per_s
        self._clock.at(here_s, self._take, pair[1], takes_s, left_s + late_s, way.into, mail)

    def _drawn(self, pair: _Pair, what: int) -> float:
        return uniform(self._seed, *pair, self._n_left[pair], what)

    def _again(self, pair: _Pair) -> None:
        """Send what was lost, and what waits behind it as long as nothing is lost again."""
        behind = self._behind.pop(pair)
        while behind:
            self._leave(pair, *behind.popleft())
            if pair in self._behind:
                self._behind[pair].extend(behind)
                return

    def _take(self, to: int, takes_s: float, last_s: float, link: int, mail: Mail) -> None:
        """The first byte is there: put the message behind those that come in by the same link."""
        start_s = max(self._in_free_s[link], self._clock.now_s)
        whole_s = self._in_free_s[link] = max(start_s + takes_s, last_s)
        self._clock.at(whole_s, self._deliver, to, mail)
