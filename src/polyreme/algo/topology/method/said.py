"""A worker's vector as a message, to neighbours and from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import exchange, stacked
from ...effects import Program, Send
from ...packet import Message
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
    compress = algorithm.compress.apart.at(step)
    made = exchange.parts(compress, me.layout, exchange.name(x))
    keys, drawn = [str(index) for index in range(len(made))], me.draw(step)
    packets, states = stacked.encoded(
        [(part.kind, part.like) for part in made],
        exchange.pieces_of(x, made),
        [state[key] for key in keys],
        [drawn.at(index) for index in range(len(made))],
    )
    return Message(packets=tuple(packets)), {**state, **dict(zip(keys, states, strict=True))}


def unpacked(message: Message) -> torch.Tensor:
    """The vector that its receiver sees."""
    import torch

    return torch.cat([x.reshape(-1) for x in stacked.decoded(message.packets)])


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
