"""Recursive doubling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..effects import Program, Send
from ..packet import Message, applied
from .cost import Cost, log2_floor
from .kind import TopologyKind
from .passing import Vector, give, joined, parted, plus, receive, refilled, take, vector

if TYPE_CHECKING:
    from ..worker import Worker


class RecursiveDoubling(
    TopologyKind, frozen=True, kw_only=True, tag="RecursiveDoubling", tag_field="kind"
):
    """Pairs at distances 1, 2, 4, ... exchange all they have: least latency, many bytes.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", section 4.5; beyond the largest power of two, workers give what they
    have to one within it and are given the result at the end.
    """

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Each exchange doubles the messages that a worker has."""
        n, rank, within = me.n, me.rank, 1 << log2_floor(me.n)
        kinds = message.kinds
        held = {rank: message}
        if rank >= within:
            yield Send(to=rank - within, message=message)
            others = [r for r in range(n) if r != rank]
            bundle = yield from receive(rank - within, kinds * len(others))
            held |= zip(others, parted(bundle, len(others)), strict=True)
        else:
            extra = rank + within
            if extra < n:
                held[extra] = yield from receive(extra, kinds)
            distance = 1
            while distance < within:
                mate = rank ^ distance
                first = mate & ~(distance - 1)
                inner = range(first, first + distance)
                theirs = [*inner, *(r + within for r in inner if r + within < n)]
                yield Send(to=mate, message=joined([held[r] for r in sorted(held)]))
                bundle = yield from receive(mate, kinds * len(theirs))
                held |= zip(theirs, parted(bundle, len(theirs)), strict=True)
                distance *= 2
            if extra < n:
                rest = joined([held[r] for r in range(n) if r != extra])
                yield Send(to=extra, message=rest)
        return applied(function, [held[r] for r in range(n)])

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Each exchange doubles the workers in a sum; the lower half's sum is added to."""
        total = yield from self._sum(vector(message), me.n, me.rank)
        return refilled(message, total)

    def _sum(self, x: Vector, n: int, rank: int) -> Program[Vector]:
        within = 1 << log2_floor(n)
        if rank >= within:
            yield from give(rank - within, x)
            return (yield from take(rank - within, x))
        extra = rank + within
        if extra < n:
            x = plus(x, (yield from take(extra, x)))
        distance = 1
        while distance < within:
            yield from give(rank ^ distance, x)
            theirs = yield from take(rank ^ distance, x)
            x = plus(theirs, x) if rank & distance else plus(x, theirs)
            distance *= 2
        if extra < n:
            yield from give(extra, x)
        return x

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """Log n messages, and two more where n is no power of two."""
        if n == 1:
            return Cost()
        doublings = log2_floor(n)
        beyond = n - (1 << doublings)
        rounds, sent = doublings + 2 * bool(beyond), doublings + bool(beyond)
        if adds:
            return Cost(rounds, rounds * nbytes, sent, nbytes)
        blocks = (1 << doublings) - 1 + sum(min(1 << k, beyond) for k in range(doublings))
        if beyond:
            return Cost(rounds, (blocks + n) * nbytes, sent, (n - 1) * nbytes)
        return Cost(rounds, blocks * nbytes, sent, n // 2 * nbytes)
