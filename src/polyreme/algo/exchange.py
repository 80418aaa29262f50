"""How a vector that each worker has becomes one that all have: feedback, packets, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compress.dense import Dense
from .compress.kind import CompressorKind
from .effects import Combine, Program
from .feedback.kind import Turn
from .packet import Like, Message, Packet

if TYPE_CHECKING:
    import torch

    from .compose import DataParallel
    from .vector import Layout
    from .worker import Worker

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Entries of the vector that make one packet."""

    start: int
    stop: int
    like: Like
    kind: CompressorKind


def parts(kind: CompressorKind, layout: Layout, dtype: str) -> tuple[Part, ...]:
    """The packets of a message, in the order of the vector."""
    whole = Like((layout.n_entries,), dtype)
    if kind.per == "model":
        return (Part(start=0, stop=layout.n_entries, like=whole, kind=kind),)
    return tuple(
        Part(
            start=s.start,
            stop=s.stop,
            like=Like(s.shape, dtype),
            kind=Dense() if s.stop - s.start < kind.dense_below else kind,
        )
        for s in layout.segments
    )


def init(algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
    """State of a worker's exchanges before the first."""
    made = parts(algorithm.compress, me.layout, name(params))
    return {
        "feedback": algorithm.feedback.init(params),
        "compress": {str(index): part.kind.init(part.like) for index, part in enumerate(made)},
        "aggregate": algorithm.aggregate.init(params),
    }


def combined(
    algorithm: DataParallel, vector: torch.Tensor, state: State, me: Worker, turn: Turn
) -> Program[tuple[torch.Tensor, State]]:
    """The aggregate over all workers of what each has, and the next state."""
    feedback, made = algorithm.feedback, parts(algorithm.compress, me.layout, name(vector))
    prepared, kept = feedback.prepare(vector, state["feedback"], turn)
    packets, compressors = [], {}
    for index, part in enumerate(made):
        x = prepared[part.start : part.stop].view(part.like.shape)
        draw = me.draw(turn.step).at(index)
        buffers, after = part.kind.encode(x, state["compress"][str(index)], draw)
        packets.append(Packet(buffers=buffers, like=part.like, kind=part.kind))
        compressors[str(index)] = after
    message = Message(packets=tuple(packets))
    kept = feedback.settle(prepared, decoded(message), kept, turn)

    def aggregate(messages: Sequence[Message]) -> tuple[torch.Tensor, State]:
        rows = [decoded(each) for each in messages]
        out, after, _ = algorithm.aggregate.combine(rows, state["aggregate"])
        return out, after

    out, aggregated = yield Combine(message=message, function=aggregate)
    out, kept = feedback.receive(out, kept, turn)
    return out, {"feedback": kept, "compress": compressors, "aggregate": aggregated}


def decoded(message: Message) -> torch.Tensor:
    """The vector that a message means."""
    import torch

    return torch.cat([packet.decode().reshape(-1) for packet in message.packets])


def name(vector: torch.Tensor) -> str:
    """The vector's type, such as "float32"."""
    return str(vector.dtype).removeprefix("torch.")
