"""All replicas with all, through the backend's own collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..effects import Program, Sum
from ..packet import Message
from .cost import Cost
from .kind import TopologyKind

if TYPE_CHECKING:
    from ..worker import Worker


class AllReduce(TopologyKind, frozen=True, kw_only=True, tag="AllReduce", tag_field="kind"):
    """The backend's collectives over all replicas.

    Counted as rings: packets that add are summed in shares, which are then gathered; others are
    gathered whole. Source: Patarasuk and Yuan 2009.
    """

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """The sum in order of workers."""
        summed: Message = yield Sum(message=message)
        return summed

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """2 (n - 1) messages of a share, or n - 1 whole ones."""
        rounds = 2 * (n - 1) if adds else n - 1
        total = rounds * nbytes / n if adds else rounds * nbytes
        return Cost(rounds, total, rounds, total)
