"""A worker's vector as a message, to neighbours and from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import exchange
from ...effects import Program, Send
from ...packet import Message, Packet
from ..passing import receive

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...worker import Worker

State = dict[str, Any]


def init(algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
    """State of compressors before the first message."""
    made = exchange.parts(algorithm.compress.apart, me.layout, exchange.name(params))
    return {str(index): part.kind.init(part.like) for index, part in enumerate(made)}


def packed(
    algorithm: DataParallel, x: torch.Tensor, state: State, me: Worker, step: int
) -> tuple[Message, State]:
    """The vector in packets of the algorithm's compressor, and its next state."""
    compress, after = algorithm.compress.apart.at(step), dict(state)
    packets = []
    for index, part in enumerate(exchange.parts(compress, me.layout, exchange.name(x))):
        tensor, key = x[part.start : part.stop].view(part.like.shape), str(index)
        buffers, after[key] = part.kind.encode(tensor, after[key], me.draw(step).at(index))
        packets.append(Packet(buffers=buffers, like=part.like, kind=part.kind))
    return Message(packets=tuple(packets)), after


def unpacked(message: Message) -> torch.Tensor:
    """The vector that its receiver sees."""
    import torch

    return torch.cat([packet.decode().reshape(-1) for packet in message.packets])


def told(message: Message, takes: torch.Tensor, me: Worker) -> Program[dict[int, Message]]:
    """What those say of whom this worker takes: `takes[i, j]` is not 0 where i takes of j."""
    for to in takes[:, me.rank].nonzero().flatten().tolist():
        if to != me.rank:
            yield Send(to=to, message=message)
    heard = {}
    for source in takes[me.rank].nonzero().flatten().tolist():
        if source != me.rank:
            heard[source] = yield from receive(source, message.kinds)
    return heard
