"""Groups of workers near each other, and a ring of their leaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..effects import Program
from ..packet import Message, applied
from .cost import Cost, log2_ceil
from .kind import TopologyKind
from .passing import joined, parted, refilled, ring_gather, ring_sum, vector
from .tree import binomial, down, gather_down, gather_up, sum_up

if TYPE_CHECKING:
    from ..worker import Worker


class Hierarchical(TopologyKind, frozen=True, kw_only=True, tag="Hierarchical", tag_field="kind"):
    """A tree within each group, a ring of the groups' first workers, and back.

    Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"
    (three phases).
    Differs: a tree within groups, where they have a ring; the last group may be smaller.

    Attributes:
        group: Workers of a group, such as the devices of a host; consecutive ones.
    """

    group: Annotated[int, msgspec.Meta(ge=1)] = 8

    def _groups(self, n: int) -> list[range]:
        return [range(first, min(first + self.group, n)) for first in range(0, n, self.group)]

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Messages go up to the leader, round as bundles, and down."""
        groups = self._groups(me.n)
        mine = groups[me.rank // self.group]
        tree = binomial(len(mine))
        held = yield from gather_up(message, tree, mine, me.rank)
        if me.rank == mine[0]:
            kinds = [message.kinds * len(group) for group in groups]
            bundle, leaders = joined([held[rank] for rank in mine]), [g[0] for g in groups]
            bundles = yield from ring_gather(bundle, kinds, leaders, me.rank)
            for group, each in zip(groups, bundles, strict=True):
                held |= zip(group, parted(each, len(group)), strict=True)
        held = yield from gather_down(held, me.n, tree, mine, me.rank)
        return applied(function, [held[rank] for rank in range(me.n)])

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Sums of groups, in order of workers, are summed around the ring."""
        groups = self._groups(me.n)
        mine = groups[me.rank // self.group]
        tree, at = binomial(len(mine)), me.rank - mine[0]
        total = yield from sum_up(vector(message), tree, mine, at)
        if at == 0:
            total = yield from ring_sum(total, [group[0] for group in groups], me.rank)
        total = yield from down(total, tree, mine, at)
        return refilled(message, total)

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """The tree's, and the ring's over groups."""
        size = min(self.group, n)
        deep, groups = log2_ceil(size), -(-n // size)
        if n == 1:
            return Cost()
        if adds:
            ring = 2 * (groups - 1)
            path = (2 * deep + ring / groups) * nbytes
            link = max(nbytes * (deep > 0), ring / groups * nbytes)
            return Cost(2 * deep + ring, path, deep + ring, link)
        path = (deep * groups + groups - 1) * size * nbytes
        return Cost(2 * deep + groups - 1, path, deep + groups - 1, (n - 1) * nbytes)
