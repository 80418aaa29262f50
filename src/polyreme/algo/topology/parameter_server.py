"""Servers that make the aggregate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ...errors import Violation
from .. import exchange
from ..compress import Compressor
from ..compress.dense import Dense
from ..effects import Program, Send
from ..packet import Kinds, Message, Packet, applied
from .cost import Cost
from .kind import Aggregating, State, TopologyKind
from .passing import chunks, give, joined, parted, plus, receive, refilled, take, vector, whole

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..draw import Draw
    from ..worker import Worker


class ParameterServer(
    TopologyKind, frozen=True, kw_only=True, tag="ParameterServer", tag_field="kind"
):
    """The first workers are servers too: each aggregates its share and sends it to all.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; the
    compressed way back with the server's own error feedback is Tang et al. 2019, "DoubleSqueeze",
    algorithm 1.
    Differs: packets that are summed are cut into equal shares; others are dealt out whole, each
    to the server with the fewest entries so far.

    Attributes:
        servers: How many workers are servers.
        back: In what form aggregates travel back.
        feedback: Whether servers keep what compression takes away and add it the next time.
    """

    at_servers: ClassVar[bool] = True
    servers: Annotated[int, msgspec.Meta(ge=1)] = 1
    back: Compressor = Dense()
    feedback: bool = True

    def refused(self, n: int, algorithm: DataParallel) -> list[Violation]:
        """Servers are workers; shares can be aggregated alone."""
        path, found = "data_parallel.topology", []
        if self.servers > n:
            rule = f"is above the number of workers, {n}, which the servers are among"
            legal = f"1 (or any integer up to {n})"
            found.append(
                Violation(path=f"{path}.servers", value=self.servers, rule=rule, legal=legal)
            )
        if self.servers > 1 and not algorithm.aggregate.by_entry:
            rule = "splits vectors that data_parallel.aggregate wants whole"
            found.append(
                Violation(path=f"{path}.servers", value=self.servers, rule=rule, legal="1")
            )
        return found

    @property
    def compresses_back(self) -> bool:
        """If `back` is not dense."""
        return not isinstance(self.back, Dense)

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Of a server's own packets: what is not sent yet, and their compressors' state."""
        made = exchange.parts(algorithm.compress, me.layout, exchange.name(params))
        kinds = tuple((part.kind, part.like) for part in made if not part.kind.in_rounds)
        state: State = {"error": {}, "compress": {}}
        if not self.compresses_back or me.rank >= self.servers:
            return state
        for index in self._share(kinds, me.rank):
            kind, like = self._form(kinds[index], me.draw(0))
            if not isinstance(kind, Dense):
                state["compress"][str(index)] = kind.init(like)
                if self.feedback:
                    state["error"][str(index)] = params.new_zeros(like.shape)
        return state

    def _share(self, kinds: Kinds, server: int) -> list[int]:
        """Which packets of a message are a server's."""
        held, mine = [0] * self.servers, []
        for index, (_, like) in enumerate(kinds):
            least = held.index(min(held))
            held[least] += like.n_entries
            if least == server:
                mine.append(index)
        return mine

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Server 0 has all messages and sends each worker those of the others."""
        others = [rank for rank in range(me.n) if rank != me.rank]
        if me.rank == 0:
            held = {0: message}
            for rank in others:
                held[rank] = yield from receive(rank, message.kinds)
            for rank in others:
                rest = joined([each for r, each in held.items() if r != rank])
                yield Send(to=rank, message=rest)
            return applied(function, list(held.values()))
        yield Send(to=0, message=message)
        bundle = yield from receive(0, message.kinds * len(others))
        messages = parted(bundle, len(others))
        messages.insert(me.rank, message)
        return applied(function, messages)

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """Each server sums its share in order of workers."""
        parts = chunks(vector(message), self.servers)
        for server in range(self.servers):
            if server != me.rank:
                yield from give(server, parts[server])
        if me.rank < self.servers:
            own, total = parts[me.rank], None
            for rank in range(me.n):
                row = own if rank == me.rank else (yield from take(rank, own))
                total = row if total is None else plus(total, row)
            assert total is not None
            parts[me.rank] = total
            for rank in range(me.n):
                if rank != me.rank:
                    yield from give(rank, total)
        for server in range(self.servers):
            if server != me.rank:
                parts[server] = yield from take(server, parts[server])
        return refilled(message, whole(parts))

    def serve(
        self, message: Message, function: Aggregating, state: State, me: Worker, draw: Draw | None
    ) -> Program[tuple[list[torch.Tensor], Any, State]]:
        """Each server aggregates its packets and sends what comes of them.

        Of the aggregator's state a server has the next; other workers are given None.
        """
        kinds = message.kinds
        shares = [self._share(kinds, server) for server in range(self.servers)]
        own = [Message(packets=tuple(message.packets[i] for i in share)) for share in shares]
        found: dict[int, torch.Tensor] = {}
        after = None
        for server, share in enumerate(shares):
            if share and server != me.rank:
                yield Send(to=server, message=own[server])
        if me.rank < self.servers and shares[me.rank]:
            share, rows = shares[me.rank], []
            for rank in range(me.n):
                row = own[me.rank]
                rows.append(row if rank == me.rank else (yield from receive(rank, row.kinds)))
            flat, after = yield from function(rows)
            answer, state = self._answer(flat, share, kinds, state, draw)
            for rank in range(me.n):
                if rank != me.rank:
                    yield Send(to=rank, message=answer)
            found |= zip(share, (packet.decode() for packet in answer.packets), strict=True)
        for server, share in enumerate(shares):
            if share and server != me.rank:
                forms = tuple(self._form(kinds[i], draw) for i in share)
                answer = yield from receive(server, forms)
                found |= zip(share, (packet.decode() for packet in answer.packets), strict=True)
        return [found[index] for index in range(len(kinds))], after, state

    def _form(self, kind: tuple[Any, Any], draw: Draw | None) -> tuple[Any, Any]:
        """Compressor and tensor of a packet's way back."""
        like = kind[1]
        small = draw is None or like.n_entries < self.back.dense_below
        return (Dense() if small else self.back.apart.at(draw.step if draw else 0), like)

    def _answer(
        self,
        flat: torch.Tensor,
        share: Sequence[int],
        kinds: Kinds,
        state: State,
        draw: Draw | None,
    ) -> tuple[Message, State]:
        """A server's packets, and its memory of what they lack."""
        errors, compressors = dict(state["error"]), dict(state["compress"])
        packets = []
        sizes = [kinds[index][1].n_entries for index in share]
        pieces: tuple[torch.Tensor, ...] = flat.split(sizes)  # type: ignore[no-untyped-call]
        for index, piece in zip(share, pieces, strict=True):
            kind, like = self._form(kinds[index], draw)
            x, key = piece.view(like.shape), str(index)
            if draw is None or isinstance(kind, Dense):
                packets.append(Packet(buffers=(x.reshape(-1),), like=like, kind=kind))
                continue
            if self.feedback:
                x = x + errors[key]
            buffers, compressors[key] = kind.encode(x, compressors[key], draw.at(index))
            packets.append(Packet(buffers=buffers, like=like, kind=kind))
            if self.feedback:
                errors[key] = x - packets[-1].decode()
        return Message(packets=tuple(packets)), {"error": errors, "compress": compressors}

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """There and back; a server sends its share to all. The way back is dense here."""
        if n == 1:
            return Cost()
        if not adds:
            return Cost(2, (1 + (n - 1) ** 2) * nbytes, n - 1, (n - 1) * nbytes)
        k = self.servers
        there = nbytes if k < n else (k - 1) / k * nbytes
        path = there + (n - 1) / k * nbytes
        return Cost(2, path, n - 1 + k - 1, (2 / k if k > 1 else 1.0) * nbytes)
