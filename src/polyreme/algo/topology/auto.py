"""The cheapest program for each message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..effects import Program
from ..packet import Message
from .binary_tree import BinaryTree
from .cost import Cost
from .double_binary_tree import DoubleBinaryTree
from .kind import TopologyKind
from .recursive_doubling import RecursiveDoubling
from .ring import Ring
from .torus import Torus2D

if TYPE_CHECKING:
    from ..worker import Worker

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Auto(TopologyKind, frozen=True, kw_only=True, tag="Auto", tag_field="kind"):
    """Recursive doubling, a ring, a torus or trees: whichever costs least at a message's size.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5 (by size).

    Attributes:
        latency_s: Seconds until a message of no bytes arrives.
        bytes_per_s: Bytes that a worker sends in a second.
    """

    latency_s: Annotated[float, msgspec.Meta(ge=0)] = 50e-6
    bytes_per_s: _Positive = 1.25e9

    def chosen(self, n: int, nbytes: int, *, adds: bool = True) -> TopologyKind:
        """The cheapest; the first of equals, in the order of the first line above."""
        programs = (
            RecursiveDoubling(),
            Ring(),
            Torus2D(),
            BinaryTree(),
            *(DoubleBinaryTree(pieces=4**power) for power in range(4)),
        )

        def seconds(each: TopologyKind) -> float:
            cost = each.cost(n, nbytes, adds=adds)
            return cost.seconds(self.latency_s, self.bytes_per_s)

        return min(programs, key=seconds)

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """As the cheapest does."""
        chosen = self.chosen(me.n, _nbytes(message), adds=False)
        return (yield from chosen.combine(message, function, me))

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """As the cheapest does."""
        return (yield from self.chosen(me.n, _nbytes(message)).sum(message, me))

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """The cheapest one's."""
        return self.chosen(n, nbytes, adds=adds).cost(n, nbytes, adds=adds)


def _nbytes(message: Message) -> int:
    """Its bytes; where they differ from worker to worker, those of the tensors as they are.

    All workers must choose alike.
    """
    forms = [form for kind, like in message.kinds for form in kind.form(like)]
    if all(form.length is not None for form in forms):
        return message.nbytes
    return sum(like.n_entries * _width(like.dtype) for _, like in message.kinds)


def _width(dtype: str) -> int:
    import torch

    width: int = getattr(torch, dtype).itemsize
    return width
