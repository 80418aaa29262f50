"""How a vector that each worker has becomes one that all have: feedback, packets, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .compress.dense import Dense
from .compress.kind import CompressorKind
from .effects import Program
from .feedback.kind import Turn
from .packet import Like, Message, Packet

if TYPE_CHECKING:
    import torch

    from .compose import DataParallel
    from .draw import Draw
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
    """State of a worker's exchanges before the first.

    Raises:
        ConfigError: The topology is not for so many workers, or not for the other members.
    """
    found = algorithm.topology.check(me.n, algorithm)
    if found:
        raise ConfigError(found)
    made = parts(algorithm.compress, me.layout, name(params))
    return {
        "feedback": algorithm.feedback.init(params),
        "compress": {str(index): part.kind.init(part.like) for index, part in enumerate(made)},
        "aggregate": algorithm.aggregate.init(params),
        "topology": algorithm.topology.init(algorithm, params, me),
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
    aggregated, topology = state["aggregate"], state["topology"]
    out, sent = torch.empty_like(vector), torch.empty_like(vector)
    named = torch.zeros_like(vector, dtype=torch.bool)
    compressors = dict(state["compress"])

    def combining(tensors: Sequence[torch.Tensor]) -> Program[list[torch.Tensor]]:
        nonlocal aggregated
        result, aggregated, _ = yield from _aggregate(
            algorithm, dense(tensors), aggregated, topology, me, None
        )
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
        back = None if feedback.sends_all(turn) else me.draw(turn.step).at(len(made))
        decoded, aggregated, topology = yield from _aggregate(
            algorithm, message, aggregated, topology, me, back
        )
        for part, mean in zip(places, decoded, strict=True):
            _of(out, part).copy_(mean)
    kept = feedback.settle(prepared, sent, named, kept)
    out, kept = feedback.receive(out, kept, turn)
    return out, {
        "feedback": kept,
        "compress": compressors,
        "aggregate": aggregated,
        "topology": topology,
    }


def own(
    algorithm: DataParallel, vector: torch.Tensor, state: State, turn: Turn
) -> tuple[torch.Tensor, State]:
    """What the rule is given where gradients stay with their worker (gossip), and the next state.

    Feedback finds that all was sent, so that its momentum, if it owns one, is this worker's own.
    """
    import torch

    feedback = algorithm.feedback
    prepared, kept = feedback.prepare(vector, state["feedback"], turn)
    none = torch.zeros_like(vector, dtype=torch.bool)
    kept = feedback.settle(prepared, prepared, none, kept)
    out, kept = feedback.receive(prepared, kept, turn)
    return out, {**state, "feedback": kept}


def dense(tensors: Sequence[torch.Tensor]) -> Message:
    """A message of tensors as they are."""
    return Message(
        packets=tuple(
            Packet(buffers=(x.reshape(-1),), like=Like(tuple(x.shape), name(x)), kind=Dense())
            for x in tensors
        )
    )


def _aggregate(
    algorithm: DataParallel,
    message: Message,
    state: State,
    topology: State,
    me: Worker,
    draw: Draw | None,
) -> Program[tuple[list[torch.Tensor], State, State]]:
    """Aggregates of a message's tensors over all workers; aggregator's and topology's next state.

    Where packets add and the aggregate is their mean, they may be summed on the way. `draw` is for
    packets of the way back, which without one are dense.
    """
    import torch

    via, aggregate = algorithm.topology, algorithm.aggregate

    def function(messages: Sequence[Message]) -> tuple[torch.Tensor, State]:
        rows = [
            torch.cat([packet.decode().reshape(-1) for packet in each.packets]) for each in messages
        ]
        out, after, _ = aggregate.combine(rows, state)
        return out, after

    adds = aggregate.is_mean and all(packet.kind.adds for packet in message.packets)
    if adds and not (via.at_servers and draw is not None and via.compresses_back):
        total = yield from via.sum(message, me)
        return [packet.decode() / me.n for packet in total.packets], state, topology
    if via.at_servers:
        means, after, topology = yield from via.serve(message, function, topology, me, draw)
        return means, state if after is None else after, topology
    flat, after = yield from via.combine(message, function, me)
    sizes = [packet.like.n_entries for packet in message.packets]
    shapes = [packet.like.shape for packet in message.packets]
    means = [x.view(s) for x, s in zip(flat.split(sizes), shapes, strict=True)]
    return means, after, topology


def _of(vector: torch.Tensor, part: Part) -> torch.Tensor:
    """The part's entries of a vector, in their shape; shares its memory."""
    return vector[part.start : part.stop].view(part.like.shape)


def name(vector: torch.Tensor) -> str:
    """The vector's type, such as "float32"."""
    return str(vector.dtype).removeprefix("torch.")
