"""A ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..effects import Program
from ..packet import Message, applied
from .cost import Cost
from .kind import TopologyKind
from .passing import refilled, ring_gather, ring_sum, vector

if TYPE_CHECKING:
    from ..worker import Worker


class Ring(TopologyKind, frozen=True, kw_only=True, tag="Ring", tag_field="kind"):
    """Each worker sends to the next: least bytes, latency that grows with n.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Messages go round once."""
        gathered = yield from ring_gather(message, [message.kinds] * me.n, range(me.n), me.rank)
        return applied(function, gathered)

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Chunks are summed on the way round, and go round once more."""
        total = yield from ring_sum(vector(message), range(me.n), me.rank)
        return refilled(message, total)

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """2 (n - 1) messages of a chunk, or n - 1 whole ones."""
        rounds = 2 * (n - 1) if adds else n - 1
        total = rounds * nbytes / n if adds else rounds * nbytes
        return Cost(rounds, total, rounds, total)
