"""Pushes: what workers send to servers, how it is cut, packed and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import attacking, exchange, stacked
from .compress.dense import Dense
from .effects import Numbers, Received, alone
from .feedback.kind import Turn
from .once import once
from .packet import Kinds, Like, Message, Packet
from .vector import all_finite, span

if TYPE_CHECKING:
    import torch

    from .compose import DataParallel
    from .vector import Layout
    from .worker import Worker

WHOLE = Dense(per="model")
HELLO, LEFT = -1, -2  # in place of a push's number: a worker came, or is gone
_N_HEAD = 3  # number, version, rate

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Push:
    """What came from a worker: its `number`-th push from 0, each of its vectors cut to the piece.

    `version` is that of the parameters that it began with: how many pushes were in them; `lr` the
    rate that it knew. `rows` has what is to be known of each of its batches. With `number` HELLO a
    worker that has no parameters yet asks for them; LEFT comes in the name of one that is gone.
    """

    worker: int
    number: int
    version: int
    lr: float
    vectors: tuple[torch.Tensor, ...]
    rows: tuple[Numbers, ...]

    @property
    def counts(self) -> bool:
        """Whether all of it is finite and some label carries loss."""
        return all(row.finite for row in self.rows) and any(row.weight for row in self.rows)

    @property
    def lies(self) -> bool:
        """Whether it is not finite, and says that it counts."""
        return self.counts and not all(map(all_finite, self.vectors))

    @property
    def unfit(self) -> Push:
        """The same, saying that it does not count."""
        return replace(self, rows=tuple(row._replace(weight=0.0) for row in self.rows))


@dataclass(frozen=True, kw_only=True)
class Form:
    """How pushes of an algorithm travel: `n_vectors` of them, cut for `servers`, of `n_batches`."""

    algorithm: DataParallel
    servers: int
    n_vectors: int
    n_batches: int

    def layout(self, me: Worker) -> Layout:
        """Of what is pushed: the parameters'."""
        return me.layout

    def parts(self, me: Worker, server: int, dtype: str) -> tuple[exchange.Part, ...]:
        """The packets of a server's piece of a vector."""
        compress = self.algorithm.compress
        kind = WHOLE if isinstance(compress, Dense) else compress
        piece = self.layout(me).pieces(self.servers)[server]
        return piece.once((kind, dtype), lambda: exchange.parts(kind, piece, dtype))

    def init(self, params: torch.Tensor, me: Worker) -> State:
        """State of a worker's pushes before the first, of each vector."""
        dtype = exchange.name(params)
        compressors = {
            f"{server}.{at}": part.kind.init(part.like)
            for server in range(self.servers)
            for at, part in enumerate(self.parts(me, server, dtype))
        }
        return {
            str(index): {
                "feedback": self.algorithm.feedback.init(params),
                "compress": dict(compressors),
                "attack": attacking.own(params, me),
            }
            for index in range(self.n_vectors)
        }

    def packed(
        self, vector: torch.Tensor, kept: State, index: int, turn: Turn, me: Worker
    ) -> tuple[list[list[Packet]], State]:
        """Packets of the `index`-th vector for each server, and the next of its state."""
        import torch

        algorithm = self.algorithm
        prepared, feedback = algorithm.feedback.prepare(vector, kept["feedback"], turn)
        draw = me.draw(turn.step).at(index)
        prepared, attack = alone(attacking.sent(prepared, kept["attack"], me, draw))
        kept = {**kept, "attack": attack}
        if isinstance(algorithm.compress, Dense):
            if algorithm.feedback.vectors:
                none = torch.zeros_like(prepared, dtype=torch.bool)
                feedback = algorithm.feedback.settle(prepared, prepared, none, feedback)
            pieces = exchange.cut(prepared, self.servers)
            return [[whole(piece)] for piece in pieces], {**kept, "feedback": feedback}
        compressors = dict(kept["compress"])
        sent: list[torch.Tensor] = []
        named: list[torch.Tensor] = []
        made: list[list[Packet]] = []
        for server in range(self.servers):
            each = self.parts(me, server, exchange.name(vector))
            start, stop = span(self.layout(me).n_entries, self.servers, server)
            keys = [f"{server}.{at}" for at in range(len(each))]
            packets, after = stacked.encoded(
                [(part.kind, part.like) for part in each],
                exchange.pieces_of(prepared[start:stop], each),
                [compressors[key] for key in keys],
                [draw.at(server).at(at) for at in range(len(each))],
            )
            compressors |= zip(keys, after, strict=True)
            made.append(packets)
            if algorithm.feedback.vectors:
                sent += [packet.decode().reshape(-1) for packet in packets]
                named += map(_named, packets)
        if sent:
            feedback = algorithm.feedback.settle(
                prepared, torch.cat(sent), torch.cat(named), feedback
            )
        return made, {**kept, "feedback": feedback, "compress": compressors}

    def notice(self, number: int, like: torch.Tensor, server: int, me: Worker) -> Message:
        """A push of nothing to a server: HELLO, or LEFT in a worker's name."""
        head = heading((number, 0, 0.0), (Numbers(),) * self.n_batches)
        return Message(packets=(head, *self.nothing(like, server, me)))

    def nothing(self, like: torch.Tensor, server: int, me: Worker) -> list[Packet]:
        """Packets of zeros for a server, of which no state learns."""
        packets = []
        for part in self.parts(me, server, exchange.name(like)) * self.n_vectors:
            zero = like.new_zeros(part.like.shape)
            buffers, _ = part.kind.encode(zero, part.kind.init(part.like), me.draw(0))
            packets.append(Packet(buffers=buffers, like=part.like, kind=part.kind))
        return packets

    def kinds(self, me: Worker, dtype: str) -> Kinds:
        """What a server must know of a push to read it."""

        def found() -> Kinds:
            head = Like((_N_HEAD + self.n_batches * len(Numbers._fields),), "float64")
            parts = self.parts(me, me.rank - me.n, dtype)
            each = tuple((part.kind, part.like) for part in parts)
            return ((WHOLE, head), *each * self.n_vectors)

        piece = self.layout(me).pieces(self.servers)[me.rank - me.n]
        key = (self.algorithm.compress, dtype, self.n_batches, self.n_vectors)
        return piece.once(key, found)

    def read(self, received: Received) -> Push:
        """A push, as a server reads it."""
        import torch

        head, *packets = received.message.packets
        number, version, lr, *rest = numbers(head)
        width = len(Numbers._fields)
        rows = tuple(Numbers(*rest[at : at + width]) for at in range(0, len(rest), width))
        each = len(packets) // self.n_vectors
        turn = Turn(step=int(number), lr=lr)
        vectors = []
        for at in range(0, len(packets), each):
            some = packets[at : at + each]
            decoded = [x.reshape(-1) for x in stacked.decoded(some)] if each > 1 else []
            vector = torch.cat(decoded) if each > 1 else some[0].decode()
            vector = vector if vector.dim() == 1 else vector.reshape(-1)
            vectors.append(self.algorithm.feedback.receive(vector, {}, turn)[0])
        return Push(
            worker=received.source,
            number=int(number),
            version=int(version),
            lr=lr,
            vectors=tuple(vectors),
            rows=rows,
        )


def _named(packet: Packet) -> torch.Tensor:
    """Which entries a packet names; none, where it is not sparse."""
    import torch

    if not packet.kind.sparse:
        return torch.zeros(packet.like.n_entries, dtype=torch.bool)
    return packet.kind.kept(packet.buffers, packet.like).reshape(-1)


class Heading(Packet):
    """Numbers as a packet of float64; where nobody wants its bytes, no tensor of them is made."""

    def __init__(self, given: Sequence[float]) -> None:
        held = tuple(map(float, given))
        like = Like((len(held),), "float64")
        self.__dict__.update(numbers=held, like=like, kind=WHOLE, nbytes=8 * len(held))

    @once
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The numbers, as they travel."""
        import torch

        return (torch.tensor(self.__dict__["numbers"], dtype=torch.float64),)


def heading(given: Sequence[float], rows: Sequence[Numbers] = ()) -> Packet:
    """Numbers, and rows of them, as one packet."""
    return Heading([*given, *(number for row in rows for number in row)])


def numbers(packet: Packet) -> Sequence[float]:
    """Those of a heading, which came as bytes or not."""
    if isinstance(packet, Heading):
        held: tuple[float, ...] = packet.__dict__["numbers"]
        return held
    found: list[float] = packet.decode().tolist()
    return found


def whole(vector: torch.Tensor) -> Packet:
    """A vector as it is, whose bytes and whose reading need not be found."""
    like = Like((vector.numel(),), exchange.name(vector))
    packet = Packet(buffers=(vector,), like=like, kind=WHOLE)
    packet.__dict__.update(nbytes=vector.nbytes, _decoded=vector)
    return packet
