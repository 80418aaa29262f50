"""How a vector that each worker has becomes one that all have: feedback, packets, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compress.dense import Dense
from .compress.kind import CompressorKind
from .effects import Program
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
    import torch

    feedback = algorithm.feedback
    compress = algorithm.compress.at(turn.step)
    if feedback.sends_all(turn):
        compress = Dense(per=compress.per)
    made = parts(compress, me.layout, name(vector))
    prepared, kept = feedback.prepare(vector, state["feedback"], turn)
    aggregated = state["aggregate"]
    out, sent = torch.empty_like(vector), torch.empty_like(vector)
    named = torch.zeros_like(vector, dtype=torch.bool)
    compressors = dict(state["compress"])

    def combining(tensors: Sequence[torch.Tensor]) -> Program[list[torch.Tensor]]:
        nonlocal aggregated
        result, aggregated = yield from _aggregate(algorithm, dense(tensors), aggregated)
        return result

    rounds = [index for index, part in enumerate(made) if part.kind.in_rounds]
    if rounds:
        xs = [_of(prepared, made[index]) for index in rounds]
        states = [compressors[str(index)] for index in rounds]
        draws = [me.draw(turn.step).at(index) for index in rounds]
        outs, own, after = yield from compress.exchange(xs, states, draws, combining, me)
        for index, mean, seen, each in zip(rounds, outs, own, after, strict=True):
            _of(out, made[index]).copy_(mean)
            _of(sent, made[index]).copy_(seen)
            if compress.sparse:
                _of(named, made[index]).copy_(seen != 0)
            compressors[str(index)] = each
    packets, places = [], []
    for index, part in enumerate(made):
        if part.kind.in_rounds:
            continue
        draw = me.draw(turn.step).at(index)
        buffers, compressors[str(index)] = part.kind.encode(
            _of(prepared, part), compressors[str(index)], draw
        )
        packet = Packet(buffers=buffers, like=part.like, kind=part.kind)
        packets.append(packet)
        places.append(part)
        _of(sent, part).copy_(packet.decode())
        if part.kind.sparse:
            _of(named, part).copy_(part.kind.kept(buffers, part.like))
    if packets:
        message = Message(packets=tuple(packets))
        decoded, aggregated = yield from _aggregate(algorithm, message, aggregated)
        for part, mean in zip(places, decoded, strict=True):
            _of(out, part).copy_(mean)
    kept = feedback.settle(prepared, sent, named, kept)
    out, kept = feedback.receive(out, kept, turn)
    return out, {"feedback": kept, "compress": compressors, "aggregate": aggregated}


def dense(tensors: Sequence[torch.Tensor]) -> Message:
    """A message of tensors as they are."""
    return Message(
        packets=tuple(
            Packet(buffers=(x.reshape(-1),), like=Like(tuple(x.shape), name(x)), kind=Dense())
            for x in tensors
        )
    )


def _aggregate(
    algorithm: DataParallel, message: Message, state: State
) -> Program[tuple[list[torch.Tensor], State]]:
    """The aggregate of a message's tensors over all workers, and the aggregator's next state."""
    import torch

    def function(messages: Sequence[Message]) -> tuple[torch.Tensor, State]:
        rows = [
            torch.cat([packet.decode().reshape(-1) for packet in each.packets]) for each in messages
        ]
        out, after, _ = algorithm.aggregate.combine(rows, state)
        return out, after

    flat, after = yield from algorithm.topology.combine(message, function)
    sizes = [packet.like.n_entries for packet in message.packets]
    shapes = [packet.like.shape for packet in message.packets]
    return [x.view(s) for x, s in zip(flat.split(sizes), shapes, strict=True)], after


def _of(vector: torch.Tensor, part: Part) -> torch.Tensor:
    """The part's entries of a vector, in their shape; shares its memory."""
    return vector[part.start : part.stop].view(part.like.shape)


def name(vector: torch.Tensor) -> str:
    """The vector's type, such as "float32"."""
    return str(vector.dtype).removeprefix("torch.")
