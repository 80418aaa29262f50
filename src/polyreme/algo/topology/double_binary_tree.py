"""Two trees, each for half of the entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..effects import Program
from ..packet import Message, applied
from .cost import Cost, log2_ceil
from .kind import TopologyKind
from .passing import chunks, refilled, vector, whole
from .tree import complementary, down, gather_down, gather_up, in_order, sum_up

if TYPE_CHECKING:
    from ..worker import Worker


class DoubleBinaryTree(
    TopologyKind, frozen=True, kw_only=True, tag="DoubleBinaryTree", tag_field="kind"
):
    """Two binary trees: inner workers of one are leaves of the other; halves in pieces.

    Latency grows with log n, bytes are near the least with many pieces.
    Source: Sanders, Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan".
    Differs: packets that do not add go through the first tree alone.

    Attributes:
        pieces: In how many pieces each half follows itself through its tree.
    """

    pieces: Annotated[int, msgspec.Meta(ge=1)] = 4

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Messages go up the first tree; each worker is sent those that it has not."""
        tree, ranks = in_order(me.n), range(me.n)
        held = yield from gather_up(message, tree, ranks, me.rank)
        held = yield from gather_down(held, me.n, tree, ranks, me.rank)
        return applied(function, [held[rank] for rank in ranks])

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Each worker adds its children's to its own.

        Its trees take turns so that none for which others wait stands behind one that waits:
        leaf, inner, root on the way up, and the other way round on the way down.
        """
        ranks, first = range(me.n), in_order(me.n)
        trees = (first, complementary(first))
        halves = [chunks(half, self.pieces) for half in chunks(vector(message), 2)]
        heights = [
            2 if tree.parents[me.rank] == me.rank else bool(tree.children(me.rank))
            for tree in trees
        ]
        turns = [(half, piece) for half in range(2) for piece in range(self.pieces)]
        for half, piece in sorted(turns, key=lambda turn: heights[turn[0]]):
            own = halves[half][piece]
            halves[half][piece] = yield from sum_up(own, trees[half], ranks, me.rank)
        for half, piece in sorted(turns, key=lambda turn: -heights[turn[0]]):
            own = halves[half][piece]
            halves[half][piece] = yield from down(own, trees[half], ranks, me.rank)
        return refilled(message, whole([whole(half) for half in halves]))

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """A message a piece, tree and neighbour; pieces follow each other.

        Of packets that do not add the path is at most so.
        """
        deep = log2_ceil(n)
        if n == 1:
            return Cost()
        if adds:
            times = 2 + (1.5 * deep - 2.5 + n % 2) / self.pieces if n > 2 else 1.0
            return Cost(2 * deep, times * nbytes, self.pieces * min(n, 4), nbytes)
        path = 2 * deep * (n - 1) * nbytes
        return Cost(2 * deep, path, min(n - 1, 3), (n - 1) * nbytes)
