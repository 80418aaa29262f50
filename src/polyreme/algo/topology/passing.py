"""Messages along rings, and vectors in chunks: what the programs of topologies are made of.

`ranks` are the workers that take part, in the order of the ring; a *position* is a place in it.
A *vector* here is the floating-point buffers of a message, joined by type; its integers are the
same on all workers where packets add, and are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..compress.dense import Dense
from ..effects import Program, Recv, Send
from ..packet import Kinds, Like, Message, Packet

if TYPE_CHECKING:
    import torch

Vector = tuple["torch.Tensor", ...]


def joined(messages: Sequence[Message]) -> Message:
    """Several messages sent as one."""
    return Message(packets=tuple(packet for each in messages for packet in each.packets))


def parted(message: Message, n: int) -> list[Message]:
    """The n messages alike that were joined."""
    size = len(message.packets) // n
    return [Message(packets=message.packets[i * size : (i + 1) * size]) for i in range(n)]


def vector(message: Message) -> Vector:
    """Its floating-point buffers, joined by type."""
    import torch

    assert all(packet.kind.adds for packet in message.packets), "these packets do not add"
    held = [buffer for packet in message.packets for buffer in packet.buffers]
    buffers = [buffer for buffer in held if buffer.is_floating_point()]
    types = dict.fromkeys(buffer.dtype for buffer in buffers)
    return tuple(torch.cat([b for b in buffers if b.dtype == dtype]) for dtype in types)


def refilled(message: Message, total: Vector) -> Message:
    """A message like this one, with buffers from a vector."""
    left = {part.dtype: part for part in total}
    packets = []
    for packet in message.packets:
        buffers = []
        for buffer in packet.buffers:
            if not buffer.is_floating_point():
                buffers.append(buffer)
                continue
            part = left[buffer.dtype]
            buffers.append(part[: buffer.numel()])
            left[buffer.dtype] = part[buffer.numel() :]
        packets.append(Packet(buffers=tuple(buffers), like=packet.like, kind=packet.kind))
    return Message(packets=tuple(packets))


def share_of(n_entries: int, n: int) -> int:
    """Entries of each of n equal shares, the last of which may be filled up."""
    return -(-n_entries // n)


def chunks(x: Vector, n: int) -> list[Vector]:
    """The vector in n parts whose lengths differ by at most one entry."""
    cut = [part.tensor_split(n) for part in x]
    return [tuple(parts[i] for parts in cut) for i in range(n)]


def whole(parts: Sequence[Vector]) -> Vector:
    """The vector of these chunks."""
    import torch

    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def plus(a: Vector, b: Vector) -> Vector:
    """Their sum."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _message(x: Vector) -> Message:
    dense = Dense()
    return Message(
        packets=tuple(Packet(buffers=(part,), like=Like.of(part), kind=dense) for part in x)
    )


def give(to: int, x: Vector) -> Program[None]:
    """Send a vector, if it has entries."""
    if any(part.numel() for part in x):
        yield Send(to=to, message=_message(x))


def take(source: int, like: Vector) -> Program[Vector]:
    """Receive a vector like this one."""
    if not any(part.numel() for part in like):
        return like
    received = yield Recv(source=source, kinds=_message(like).kinds)
    return tuple(packet.buffers[0] for packet in received.message.packets)


def receive(source: int, kinds: Kinds) -> Program[Message]:
    """Receive a message."""
    received = yield Recv(source=source, kinds=kinds)
    message: Message = received.message
    return message


def reduce_scatter(parts: Sequence[Vector], ranks: Sequence[int], at: int) -> Program[Vector]:
    """The sum of the chunk of one's own position, over a ring.

    Chunk c is summed from position c + 1 around to c.
    """
    n = len(ranks)
    parts = list(parts)
    for step in range(n - 1):
        going, coming = (at - step - 1) % n, (at - step - 2) % n
        yield from give(ranks[(at + 1) % n], parts[going])
        partial = yield from take(ranks[at - 1], parts[coming])
        parts[coming] = plus(partial, parts[coming])
    return parts[at]


def all_gather(
    own: Vector, likes: Sequence[Vector], ranks: Sequence[int], at: int
) -> Program[list[Vector]]:
    """The chunks of all positions, over a ring."""
    n = len(ranks)
    parts = list(likes)
    parts[at] = own
    for step in range(n - 1):
        yield from give(ranks[(at + 1) % n], parts[(at - step) % n])
        coming = (at - step - 1) % n
        parts[coming] = yield from take(ranks[at - 1], likes[coming])
    return parts


def ring_sum(x: Vector, ranks: Sequence[int], rank: int) -> Program[Vector]:
    """The sum over a ring: chunks are summed on the way, then passed round."""
    at, parts = ranks.index(rank), chunks(x, len(ranks))
    own = yield from reduce_scatter(parts, ranks, at)
    return whole((yield from all_gather(own, parts, ranks, at)))


def ring_gather(
    own: Message, kinds: Sequence[Kinds], ranks: Sequence[int], rank: int
) -> Program[list[Message]]:
    """The messages of all positions, over a ring; `kinds` are theirs."""
    n, at = len(ranks), ranks.index(rank)
    held = {at: own}
    for step in range(n - 1):
        yield Send(to=ranks[(at + 1) % n], message=held[(at - step) % n])
        coming = (at - step - 1) % n
        held[coming] = yield from receive(ranks[at - 1], kinds[coming])
    return [held[position] for position in range(n)]
