"""Answers: what servers send workers, in what form, and what each worker then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from . import exchange, stacked
from .compress.dense import Dense
from .compress.maybe import Maybe, nothing, something
from .packet import Kinds, Like, Message, Packet
from .push import WHOLE, heading, numbers, whole
from .vector import span

if TYPE_CHECKING:
    import torch

    from .compose import DataParallel
    from .draw import Draw
    from .worker import Worker

State = dict[str, Any]

_N_HEAD = 4  # version, number, what it follows on, what is held with it
_NOTHING, _NONE = -1, -2  # in place of what an answer follows on, and of what a worker holds
_LIVES = 1 << 32  # answers of a life of a server, at most


class Told(NamedTuple):
    """What is told with an answer: the server's version, the last push of the worker that had come.

    And where answers are compressed, on which contents it follows, and the number of those that it
    leads to.
    """

    version: int
    number: int
    follows: int = _NOTHING
    leads_to: int = 0


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How answers of an algorithm travel: the vectors `names`, from so many servers.

    Where `compress_back` packs them, a server keeps for each worker what that worker holds of its
    piece, sends the packet of what its answer adds to that, and both add what the packet decodes
    to, to the same bits. What a packet leaves out is so in the next difference. A server keeps as
    many pieces as there are workers; a worker keeps what it holds apart from its parameters.

    What is held has a number that rises, and each packet says on which it follows. A worker takes
    none that leads to what it has already, and none that does not follow on that: it asks for all
    then. All is sent to begin with, to a worker that asks for it, and by a server that went back to
    a snapshot, whose numbers are beyond those of its earlier lives: no number ever has two
    contents.

    Source: Gruntkowska et al. 2023, "EF21-P and Friends: Improved Theoretical Communication
    Complexity for Distributed Optimization with Bidirectional Compression", algorithm 1, per
    worker as each is answered apart; Tang et al. 2019, "DoubleSqueeze".
    """

    algorithm: DataParallel
    servers: int
    names: tuple[str, ...]
    ahead: int

    @property
    def packs(self) -> bool:
        """Whether answers are compressed."""
        return not isinstance(self.algorithm.compress_back, Dense)

    @property
    def numbered(self) -> bool:
        """Whether an answer says more than a version: which pushes had come."""
        return self.packs or self.ahead > 0

    # At servers ---------------------------------------------------------------------------------

    def kept(self, vectors: State, me: Worker) -> State:
        """What a server keeps of each worker before the first answer, by names of its state."""
        kept: State = {}
        workers = list(map(str, range(me.n)))
        if self.numbered:
            kept["came"] = dict.fromkeys(workers, -1)
        if self.packs:
            each = {name: vectors[name] for name in self.names}
            own = {"id": 0, "whole": True, "vectors": each, "compress": self._fresh(vectors, me)}
            kept["holds"] = dict.fromkeys(workers, own)
        return kept

    def noted(self, state: State, worker: int, number: int) -> State:
        """A server's state when a push of that number has come."""
        if not self.numbered:
            return state
        return {**state, "came": {**state["came"], str(worker): number}}

    def lost(self, state: State, worker: int) -> State:
        """A server's state once a worker holds nothing: it is sent all."""
        if not self.packs:
            return state
        own = {**state["holds"][str(worker)], "whole": True}
        return {**state, "holds": {**state["holds"], str(worker): own}}

    def forgotten(self, state: State, life: int = 0) -> State:
        """The state of a server that does not know what workers hold: all are sent all.

        `life` counts how often it was begun; one that went back to a snapshot has one.
        """
        if not self.packs:
            return state
        holds = {}
        for worker, own in state["holds"].items():
            now = (own["id"] // _LIVES + life) * _LIVES if life else own["id"]
            holds[worker] = {**own, "whole": True, "id": now}
        return {**state, "holds": holds}

    def made(
        self, state: State, worker: int, vectors: Sequence[torch.Tensor], version: int, me: Worker
    ) -> tuple[Message, State]:
        """The answer to a worker, and the server's state with what it holds then."""
        if not self.numbered:
            return Message(packets=(heading((version,)), *map(whole, vectors))), state
        number = state["came"][str(worker)]
        if not self.packs:
            head = heading((version, number, _NOTHING, 0))
            return Message(packets=(head, *map(whole, vectors))), state
        own = state["holds"][str(worker)]
        now, held = own["id"] + 1, dict(zip(self.names, vectors, strict=True))
        follows = _NOTHING if own["whole"] else own["id"]
        if own["whole"]:
            packets, compress = self._all(held, me), self._fresh(held, me)
        else:
            packets, held, compress = self._added(held, own, me.draw(now).at(worker), me)
        head = heading((version, number, follows, now))
        own = {"id": now, "whole": False, "vectors": held, "compress": compress}
        after = {**state, "holds": {**state["holds"], str(worker): own}}
        return Message(packets=(head, *packets)), after

    def _all(self, vectors: State, me: Worker) -> list[Packet]:
        """Packets of vectors as they are."""
        packets = []
        for vector in vectors.values():
            each = self._parts(me, vector)
            packets.append(something(whole(vector)))
            packets += [nothing(part.kind, part.like, vector.device) for part in each]
        return packets

    def _added(
        self, vectors: State, own: State, draw: Draw, me: Worker
    ) -> tuple[list[Packet], State, State]:
        """Packets of what is added to what a worker holds, what it holds then, compressors' state.

        What they decode to is kept with them.
        """
        packets, held, compress = [], {}, {}
        for index, (name, vector) in enumerate(vectors.items()):
            had, each = own["vectors"][name], self._parts(me, vector)
            made, after = stacked.encoded(
                [(part.kind, part.like) for part in each],
                exchange.pieces_of(vector - had, each),
                list(own["compress"][name].values()),
                [draw.at(index).at(at) for at in range(len(each))],
            )
            compress[name] = dict(zip(own["compress"][name], after, strict=True))
            packets.append(nothing(WHOLE, Like.of(vector), vector.device))
            for packet, seen in zip(made, stacked.decoded(made), strict=True):
                packets.append(something(packet))
                packets[-1].keep(seen)
            held[name] = _plus(had, made)
        return packets, held, compress

    def _fresh(self, vectors: State, me: Worker) -> State:
        """The compressors' state before the first packet, for each vector."""
        each = self._parts(me, vectors["params"])
        return {
            name: {str(at): part.kind.init(part.like) for at, part in enumerate(each)}
            for name in self.names
        }

    def _parts(self, me: Worker, like: torch.Tensor) -> tuple[exchange.Part, ...]:
        return self._parts_of(me, me.rank - me.n, exchange.name(like))

    def _parts_of(self, me: Worker, server: int, dtype: str) -> tuple[exchange.Part, ...]:
        kind, piece = self.algorithm.compress_back, me.layout.pieces(self.servers)[server]
        return piece.once((kind, dtype), lambda: exchange.parts(kind, piece, dtype))

    # At workers ---------------------------------------------------------------------------------

    def own(self, vectors: State) -> State:
        """What a worker keeps before the first answer, by names of its state."""
        if not self.packs:
            return {}
        ids = {str(server): _NONE for server in range(self.servers)}
        return {"held": {"ids": ids, "vectors": {name: vectors[name] for name in self.names}}}

    def emptied(self, state: State) -> State:
        """The state of a worker that holds nothing any more."""
        if not self.packs:
            return state
        held = state["held"]
        return {**state, "held": {**held, "ids": dict.fromkeys(held["ids"], _NONE)}}

    def kinds(self, me: Worker, server: int, dtype: str) -> Kinds:
        """What a worker must know of a server's answer to read it."""
        start, stop = span(me.layout.n_entries, self.servers, server)
        like = Like((stop - start,), dtype)
        if not self.packs:
            head = Like((_N_HEAD if self.numbered else 1,), "float64")
            return ((WHOLE, head), *((WHOLE, like),) * len(self.names))

        def found() -> Kinds:
            each = self._parts_of(me, server, dtype)
            parts = tuple((Maybe(inner=part.kind), part.like) for part in each)
            vector = ((Maybe(inner=WHOLE), like), *parts)
            return ((WHOLE, Like((_N_HEAD,), "float64")), *vector * len(self.names))

        piece = me.layout.pieces(self.servers)[server]
        return piece.once(("answers", self.algorithm.compress_back, dtype, self.names), found)

    def told(self, state: State, message: Message) -> Told:
        """What is told with an answer; without a number it is of this worker's last push."""
        version, *more = map(int, numbers(message.packets[0]))
        return Told(version, *(more or (state["pushes"] - 1,)))

    def has(self, state: State, server: int, told: Told) -> bool:
        """Whether a worker has all that the answer would lead to."""
        return self.packs and told.leads_to <= state["held"]["ids"][str(server)]

    def fits(self, state: State, server: int, told: Told) -> bool:
        """Whether the answer is new, and follows on what the worker holds."""
        if not self.packs:
            return True
        follows = told.follows in (_NOTHING, state["held"]["ids"][str(server)])
        return follows and not self.has(state, server, told)

    def read(self, state: State, server: int, message: Message, me: Worker) -> tuple[State, State]:
        """The pieces by name of an answer that fits, and entries of the worker's state."""
        told, packets = self.told(state, message), message.packets[1:]
        each = len(packets) // len(self.names)
        some = {name: packets[at * each : (at + 1) * each] for at, name in enumerate(self.names)}
        if not self.packs:
            return {name: packet.decode() for name, (packet,) in some.items()}, {}
        assert self.fits(state, server, told), "an answer follows on what a worker holds"
        held, pieces = state["held"], {}
        start, stop = span(me.layout.n_entries, self.servers, server)
        for name, (vector, *parts) in some.items():
            had = held["vectors"][name][start:stop]
            pieces[name] = vector.decode() if told.follows == _NOTHING else _plus(had, parts)
        ids = {**held["ids"], str(server): told.leads_to}
        vectors = joined(held["vectors"], pieces, start, stop)
        return pieces, {"held": {"ids": ids, "vectors": vectors}}


def _plus(held: torch.Tensor, packets: Sequence[Packet]) -> torch.Tensor:
    """What is held, and what all parts of a vector add to it: the same bits on both ends."""
    import torch

    added = [packet.decode().reshape(-1) for packet in packets]
    return held + torch.cat(added) if added else held


def joined(state: State, pieces: State, start: int, stop: int) -> State:
    """Vectors of a worker, by the names of these pieces, with the pieces at their place."""
    found = dict(pieces)
    for name, piece in pieces.items():
        if piece.numel() < state[name].numel():
            found[name] = state[name].clone()
            found[name][start:stop] = piece
    return found
