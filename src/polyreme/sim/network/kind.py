"""What every network has: the way of a message, and what passing it on costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from ...errors import Violation, undefined

Latency = Annotated[float, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]


class Way(NamedTuple):
    """The link that a message leaves by and the one that it comes in by.

    Links of one number are one link, which messages take one after another; those out and those
    in are apart.
    """

    out: int
    into: int
    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float


class NetworkKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network of full-duplex links out and in, with switches between that hold what must wait.

    A message takes up the sender's link for its bytes over the link's rate, once the messages
    that were sent before it have left. Its first byte is at the receiver's link `latency_s` later.
    There it takes up that link, after the messages whose first bytes came before, for its bytes
    over that link's rate, and until its last byte has come. Then it is received. The sender never
    waits for the receiver. No byte is added, and handling messages takes no time.

    Servers are players like workers, numbered after them: what all push comes in by one link of
    the server, one message after another.

    A message is lost with probability `loss`, on its way behind the sender's link. It leaves again
    `retry_s` after its last byte had left, as often as it takes; what its sender has for the same
    receiver waits behind it. Messages between two come in the order in which they were sent, also
    where their latencies differ. Draws are functions of seed, sender, receiver and a count.

    What all workers give to all (`Combine`, `Agree`) goes round a ring of all workers that starts
    when the last one has come, over links that are free then; all go on when the last has all.
    Nothing of it is lost or late.

    Attributes:
        loss: Probability that a message is lost and sent again.
        retry_s: Seconds after which what was lost is sent again.
        jitter_s: Mean of exponentially distributed seconds that are added to a message's latency.
    """

    loss: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    retry_s: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    jitter_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def is_sure(self) -> bool:
        """Whether nothing is lost or late."""
        return not (self.loss or self.jitter_s)

    def way(self, source: int, to: int, n: int) -> Way:
        """Of messages between two of n workers."""
        raise undefined(self, "way")

    def refused(self, n: int, path: str) -> list[Violation]:
        """What is wrong for n workers; `path` is where the network stands in the spec."""
        return []

    def gathering_s(self, sizes: Sequence[int]) -> float:
        """Seconds until all have what all give: each passes on n - 1 messages to the next."""
        return _gathering_s(self, tuple(sizes))


@lru_cache(maxsize=256)
def _gathering_s(network: NetworkKind, sizes: tuple[int, ...]) -> float:
    import numpy as np

    n = len(sizes)
    if n < 2:
        return 0.0
    ways = [network.way(rank, (rank + 1) % n, n) for rank in range(n)]
    latency_s = np.array([way.latency_s for way in ways])
    own = np.array(sizes, dtype=np.float64)
    out_rate = np.array([way.out_bytes_per_s for way in ways])
    in_rate = np.array([way.in_bytes_per_s for way in ways])
    ready, out_free, in_free = np.zeros(n), np.zeros(n), np.zeros(n)
    for step in range(n - 1):
        going = np.roll(own, step)
        start = np.maximum(ready, out_free)
        out_free = start + going / out_rate
        taken = np.maximum(start + latency_s, in_free)
        in_free = np.maximum(taken + going / in_rate, out_free + latency_s)
        ready = np.roll(in_free, 1)
    return float(ready.max())
