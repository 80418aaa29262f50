"""A tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..effects import Program
from ..packet import Message, applied
from .cost import Cost, log2_ceil
from .kind import TopologyKind
from .passing import refilled, vector
from .tree import binomial, gather_down, gather_up, tree_sum

if TYPE_CHECKING:
    from ..worker import Worker


class BinaryTree(TopologyKind, frozen=True, kw_only=True, tag="BinaryTree", tag_field="kind"):
    """Up to worker 0 and down again, halving or doubling who has the sum at each step.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4 (the binomial tree, whose
    cost is what surveys give for binary trees).
    """

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Messages go up; each worker is sent those that it has not."""
        tree, ranks = binomial(me.n), range(me.n)
        held = yield from gather_up(message, tree, ranks, me.rank)
        held = yield from gather_down(held, me.n, tree, ranks, me.rank)
        return applied(function, [held[rank] for rank in ranks])

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Each worker adds its children's sums to its own, in their order."""
        total = yield from tree_sum(vector(message), binomial(me.n), range(me.n), me.rank)
        return refilled(message, total)

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """2 log n messages one after another."""
        deep = log2_ceil(n)
        if adds:
            return Cost(2 * deep, 2 * deep * nbytes, deep, nbytes if n > 1 else 0)
        return Cost(2 * deep, deep * n * nbytes, deep, (n - 1) * nbytes)
