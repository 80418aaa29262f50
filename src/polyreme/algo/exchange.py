"""How a vector that each worker has becomes one that all have: feedback, packets, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from ..errors import ConfigError, Violation
from . import attacking, stacked
from .aggregate import Aggregator
from .aggregating import Rows, aggregated
from .compress.dense import Dense
from .compress.kind import CompressorKind
from .compress.maybe import none, nothing, something
from .effects import Program, Split, alone, settled
from .feedback.kind import Turn
from .legal import tag
from .packet import Like, Message, Packet
from .vector import span

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
    found = algorithm.topology.refused(me.n, algorithm)
    if found:
        raise ConfigError(found)
    made = parts(algorithm.compress, me.layout, name(params))
    return {
        "feedback": algorithm.feedback.init(params),
        "compress": {str(index): part.kind.init(part.like) for index, part in enumerate(made)},
        "aggregate": algorithm.aggregate.init(params),
        "topology": algorithm.topology.init(algorithm, params, me),
        "attack": attacking.init(params, me),
    }


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What came of one vector of each worker.

    `out` is the aggregate, `sent` what the others see of this worker's own, `named` the entries
    that its sparse packets held, `state` the next one of all but feedback.
    """

    out: torch.Tensor
    sent: torch.Tensor
    named: torch.Tensor
    state: State


def given(
    algorithm: DataParallel,
    vector: torch.Tensor,
    state: State,
    me: Worker,
    turn: Turn,
    *,
    weights: Sequence[float] | None = None,
    total: float | None = None,
    expected: int | None = None,
) -> Program[tuple[torch.Tensor, State]]:
    """What the rule is given: the aggregate of all workers, or one's own under gossip.

    With `weights`, of all workers, each counts so much of `total` (unset: of their sum), because
    its vector is scaled before the plain mean is taken; one of weight 0 takes no part. A robust
    aggregate has vectors as they are, and their weights; `expected` is as in `carried`.

    Raises:
        ConfigError: Weights differ, and the aggregate is robust and takes none.
    """
    takes_part = weights is None or weights[me.rank] > 0
    if not algorithm.topology.exact:
        if takes_part:
            return own(algorithm, vector, state, turn)
        return vector.new_zeros(vector.shape), state
    if weights is None:
        return (yield from combined(algorithm, vector, state, me, turn))
    scale = weights[me.rank] * me.n / (sum(weights) if total is None else total)
    silent = None if all(weights) else not takes_part
    unlike = tuple(weights) if len({each for each in weights if each}) > 1 else None
    if algorithm.aggregate.robust:
        if unlike and not algorithm.aggregate.takes_weights:
            raise ConfigError([unweighted(algorithm)])
        return (
            yield from combined(
                algorithm,
                vector,
                state,
                me,
                turn,
                silent=silent,
                weights=unlike,
                expected=expected,
            )
        )
    scaled = vector if scale == 1 else vector * scale
    return (yield from combined(algorithm, scaled, state, me, turn, silent=silent))


def unweighted(algorithm: DataParallel) -> Violation:
    """The error for an aggregate that cannot count workers by what they have."""
    taking = [each.__name__ for each in get_args(Aggregator) if each.takes_weights]
    named = ", ".join(f'"{name}"' for name in (*taking, "Mean"))
    return Violation(
        path="data_parallel.aggregate.kind",
        value=tag(algorithm.aggregate),
        rule="takes no weights, and workers count by the samples that they own",
        legal=f"{named} (or data_parallel.sync.alike = true)",
    )


def combined(
    algorithm: DataParallel,
    vector: torch.Tensor,
    state: State,
    me: Worker,
    turn: Turn,
    *,
    silent: bool | None = None,
    weights: tuple[float, ...] | None = None,
    expected: int | None = None,
) -> Program[tuple[torch.Tensor, State]]:
    """The aggregate over all workers of what each has, and the next state.

    `silent`, `weights` and `expected` are as in `carried`; what a silent worker's feedback keeps
    stays. A hostile worker's feedback takes what it sends for what it was to send.
    """
    feedback, kept = algorithm.feedback, state["feedback"]
    silent = attacking.silent(me, silent)
    prepared = vector
    if not silent:
        prepared, kept = feedback.prepare(vector, kept, turn)
        prepared, state = yield from attacked(prepared, state, me, turn)
    absent = not feedback.remembers
    came = yield from carried(
        algorithm,
        prepared,
        state,
        me,
        turn,
        silent=silent,
        absent=absent,
        weights=weights,
        expected=expected,
    )
    if not silent:
        kept = feedback.settle(prepared, came.sent, came.named, kept)
    out, kept = feedback.receive(came.out, kept, turn)
    return out, {**came.state, "feedback": kept}


def attacked(
    prepared: torch.Tensor, state: State, me: Worker, turn: Turn
) -> Split[tuple[torch.Tensor, State]]:
    """What this worker sends where that is meant, hostile or not, and the next state."""
    attack = state["attack"]
    prepared, own = yield from attacking.sent(prepared, attack["own"], me, me.draw(turn.step))
    return prepared, {**state, "attack": {**attack, "own": own}}


def carried(
    algorithm: DataParallel,
    vector: torch.Tensor,
    state: State,
    me: Worker,
    turn: Turn,
    *,
    silent: bool | None = None,
    absent: bool = False,
    weights: tuple[float, ...] | None = None,
    expected: int | None = None,
    draw: Draw | None = None,
) -> Program[Carried]:
    """The aggregate over all workers of what each has, whatever feedback makes of it.

    Where any worker may be silent, `silent` says on all of them whether this one is: then its
    packets are empty and count as zero, and no packets add; where silent workers are `absent`,
    aggregates other than the mean have no row of them, and count the others by `weights`, if they
    can; to a robust one they are hostile, if there are fewer rows than `expected` (unset: one of
    each worker). In a compressor's rounds all take part: a silent worker with zeros. Random
    numbers are those of the turn unless `draw` is given.
    """
    import torch

    dense_now = algorithm.feedback.sends_all(turn)
    compress = algorithm.compress.at(turn.step)
    if dense_now:
        compress = Dense(per=compress.per)
    made = parts(compress, me.layout, name(vector))
    drawn = me.draw(turn.step) if draw is None else draw
    if silent:
        vector = vector.new_zeros(vector.shape)
    topology, attack = state["topology"], state["attack"]
    aggregate: State = {"aggregate": state["aggregate"], "attack": attack["all"]}
    xs = pieces_of(vector, made)
    out: dict[int, torch.Tensor] = {}
    sent: dict[int, torch.Tensor] = {}
    named: dict[int, torch.Tensor] = {}
    compressors = dict(state["compress"])
    absent = absent and silent is not None and not algorithm.aggregate.is_mean
    which = Rows(
        absent=absent,
        expected=expected,
        weights=weights,
        sight=attacking.Sight.of(me, drawn),
        step=turn.step,
    )

    def combining(tensors: Sequence[torch.Tensor]) -> Program[list[torch.Tensor]]:
        nonlocal aggregate
        message = dense(tensors)
        if absent:
            message = Message(packets=tuple(map(none if silent else something, message.packets)))
        result, aggregate, _ = yield from aggregated(
            algorithm, message, aggregate, topology, me, None, which
        )
        return [mean.view(x.shape) for mean, x in zip(result, tensors, strict=True)]

    rounds = [index for index, part in enumerate(made) if part.kind.in_rounds]
    if rounds:
        states = [compressors[str(index)] for index in rounds]
        draws = [drawn.at(index) for index in rounds]
        tensors = [xs[index].view(made[index].like.shape) for index in rounds]
        outs, own, after = yield from compress.exchange(tensors, states, draws, combining, me)
        out |= zip(rounds, outs, strict=True)
        sent |= zip(rounds, own, strict=True)
        if compress.sparse:
            named |= {index: seen != 0 for index, seen in zip(rounds, own, strict=True)}
        compressors |= zip(map(str, rounds), after, strict=True)
    others = [index for index, part in enumerate(made) if not part.kind.in_rounds]
    if silent:
        packets = [nothing(made[i].kind, made[i].like, vector.device) for i in others]
    else:
        packets, after = stacked.encoded(
            [(made[i].kind, made[i].like) for i in others],
            [xs[i] for i in others],
            [compressors[str(i)] for i in others],
            [drawn.at(i) for i in others],
        )
        compressors |= zip(map(str, others), after, strict=True)
        sent |= zip(others, stacked.decoded(packets), strict=True)
        sparse = [i for i in others if made[i].kind.sparse]
        holding = [packet for packet in packets if packet.kind.sparse]
        named |= zip(sparse, stacked.kept(holding), strict=True)
        if silent is not None:
            packets = [something(packet) for packet in packets]
    if packets:
        message = Message(packets=tuple(packets))
        back = None if dense_now else drawn.at(len(made))
        decoded, aggregate, topology = yield from aggregated(
            algorithm, message, aggregate, topology, me, back, which
        )
        out |= zip(others, decoded, strict=True)
    return Carried(
        out=_whole(out, made, vector, vector.dtype),
        sent=_whole(sent, made, vector, vector.dtype),
        named=_whole(named, made, vector, torch.bool),
        state={
            **state,
            "compress": compressors,
            "aggregate": aggregate["aggregate"],
            "topology": topology,
            "attack": {**attack, "all": aggregate["attack"]},
        },
    )


def own(
    algorithm: DataParallel, vector: torch.Tensor, state: State, turn: Turn
) -> tuple[torch.Tensor, State]:
    """What the rule is given where gradients stay with their worker (gossip), and the next state.

    Feedback finds that all was sent, so that its momentum, if it owns one, is this worker's own. A
    robust aggregate of one's own vector is that vector.
    """
    import torch

    feedback = algorithm.feedback
    prepared, kept = feedback.prepare(vector, state["feedback"], turn)
    none = torch.zeros_like(vector, dtype=torch.bool)
    kept = feedback.settle(prepared, prepared, none, kept)
    single, aggregate = prepared, state["aggregate"]
    if not (algorithm.aggregate.is_mean or algorithm.aggregate.robust):
        single, aggregate, _ = alone(settled(algorithm.aggregate.combine([prepared], aggregate)))
    out, kept = feedback.receive(single, kept, turn)
    return out, {**state, "feedback": kept, "aggregate": aggregate}


def dense(tensors: Sequence[torch.Tensor]) -> Message:
    """A message of tensors as they are."""
    return Message(
        packets=tuple(
            Packet(buffers=(x.reshape(-1),), like=Like(tuple(x.shape), name(x)), kind=Dense())
            for x in tensors
        )
    )


def pieces_of(vector: torch.Tensor, made: Sequence[Part]) -> Sequence[torch.Tensor]:
    """The parts of a vector, as vectors; they share its memory."""
    return _split(vector, [part.stop - part.start for part in made])


def cut(vector: torch.Tensor, n: int) -> Sequence[torch.Tensor]:
    """A vector in n pieces as equal as can be, which share its memory."""
    if n == 1:
        return (vector,)
    spans = (span(vector.numel(), n, piece) for piece in range(n))
    return [vector[start:stop] for start, stop in spans]


def _whole(
    pieces: dict[int, torch.Tensor], made: Sequence[Part], like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A new vector of these parts, as long as this one; those that are missing are zero."""
    import torch

    if not pieces:
        return like.new_zeros(like.shape, dtype=dtype)
    flat = [
        pieces[i].reshape(-1) if i in pieces else like.new_zeros(part.stop - part.start)
        for i, part in enumerate(made)
    ]
    return torch.cat(flat).to(dtype)


def name(vector: torch.Tensor) -> str:
    """The vector's type, such as "float32"."""
    return _name(vector.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _split(vector: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = vector.split(sizes)  # type: ignore[no-untyped-call]
    return parts
