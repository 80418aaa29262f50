"""What syncs with servers have: workers push and pull, each in its own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation, undefined
from .. import exchange
from ..effects import ANY, Numbers, Program, Received, Record, Recv, Seen, Send, Split, settled
from ..feedback.kind import Turn
from ..packet import Kinds, Like, Message, Packet
from ..push import HELLO, LEFT, WHOLE, Form, Push, heading, numbers, whole
from ..vector import span
from . import coming_alone
from .kind import State, SyncKind, clipped, gradient

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a worker pushes, and the entries of its state that change by it."""

    vectors: tuple[torch.Tensor, ...]
    rows: tuple[Numbers, ...]
    changed: State


class Served(SyncKind, frozen=True, kw_only=True):
    """Workers push to servers, which apply what comes as it comes, and pull parameters from them.

    A worker is one player, each server another, numbered after the workers. Vectors are cut in
    pieces of equal size, one for each server; a piece's `version` is the number of pushes that were
    applied to it. A push whose loss or gradient is not finite, or has no labels, is answered and
    not applied. Nothing is kept in a round: a worker computes and pushes in one and waits for an
    answer in the next, a server answers one push in each. The first server tells of what came.

    Attributes:
        servers: How many servers there are.
    """

    in_step: ClassVar[bool] = False
    n_pushed: ClassVar[int] = 1
    """Vectors of a push."""
    owns_momentum: ClassVar[bool] = False
    """Whether the momentum is the sync's, so that the rule must have none and be SGD."""

    promise: ClassVar[str] = "nobody waits for another"
    """What is special about it."""

    servers: Annotated[int, msgspec.Meta(ge=1)] = 1

    # What members say ---------------------------------------------------------------------------

    def own(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """What a worker keeps of its own beside parameters and exchanges, by its names."""
        return {}

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """What a server keeps beside its piece of the parameters, by its names."""
        return {}

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """What a worker does with parameters: one gradient of its next batch."""
        kept = state["exchange"]["0"]["feedback"]
        at = algorithm.feedback.at(state["params"], kept)
        held, numbers = yield from self.found(algorithm, at, state["step"], me)
        return Work(vectors=(held,), rows=(numbers,), changed={})

    def found(
        self, algorithm: DataParallel, at: torch.Tensor, batch: int, me: Worker
    ) -> Program[tuple[torch.Tensor, Numbers]]:
        """The gradient of a batch, held to the bound, and what is to be known of it.

        That of the penalty is in it where the rule's step is not taken.
        """
        own = yield from gradient(algorithm, at, (batch,), me)
        held = own.gradient if me.clip_norm is None else clipped(own.gradient, me.clip_norm)
        decay = algorithm.rule.coupled_decay if self.owns_momentum else 0.0
        return (held.add(at, alpha=decay) if decay else held), own.numbers

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State | Split[State]:
        """The entries of a server's state that change by a push that counts."""
        raise undefined(self, "applied")

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """The entries of a server's state that change by any push, whether or not it counts."""
        return {}

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """Entries that change, and the workers that are answered after a push: its own.

        Also asked when a worker came or is gone, which `state["present"]` says by then.
        """
        return {}, () if push.number == LEFT else (push.worker,)

    def answer(self, state: State, worker: int, me: Worker) -> torch.Tensor:
        """What a server sends a worker: the piece of the parameters."""
        params: torch.Tensor = state["params"]
        return params

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """What this member cannot go with beyond what none can."""
        return []

    # What all have ------------------------------------------------------------------------------

    def n_servers(self, n: int) -> int:
        """As many as were asked for."""
        return self.servers

    def agrees(self, algorithm: DataParallel) -> bool:
        """Workers have parameters of different ages."""
        return False

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Of a worker or a server (whose number is that of the workers or more)."""
        if me.rank >= me.n:
            start, stop = span(me.layout.n_entries, self.servers, me.rank - me.n)
            piece = params[start:stop].clone()
            rule = algorithm.rule.init(piece)
            own = self.kept(algorithm, piece, me)
            present = dict.fromkeys(map(str, range(me.n)), True)
            return {
                "params": piece,
                "rule": rule,
                **own,
                "present": present,
                "version": 0,
                "step": 0,
            }
        return {
            "params": params,
            **self.own(algorithm, params, me),
            "exchange": self.form(algorithm).init(params, me),
            "versions": {str(server): 0 for server in range(self.servers)},
            "awaits": {str(server): False for server in range(self.servers)},
            "pushes": 0,
            "step": 0,
            "new": False,
        }

    def anew(self, state: State) -> State:
        """The state of a worker that comes, or comes back: it asks for parameters first."""
        return {**state, "new": True}

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A worker's push or one of its pulls, or a server's answer."""
        if me.rank >= me.n:
            return self._serve(algorithm, state, me)
        for server, awaited in state["awaits"].items():
            if awaited:
                return self._pull(state, server, me)
        return self._push(algorithm, state, me)

    def refused_with(self, algorithm: DataParallel) -> list[Violation]:
        """Parts of the algorithm that say how workers meet, which these do not."""
        name, rule = type(self).__name__, algorithm.rule
        found = [*coming_alone.refused(name, algorithm)]
        if self.owns_momentum and (type(rule).__name__ != "SGD" or rule.keeps_momentum):
            found.append(
                Violation(
                    path="data_parallel.rule.kind",
                    value=type(rule).__name__,
                    rule=f"has its own step, and {name} is SGD with momentum",
                    legal='"SGD" without momentum',
                )
            )
        if self.servers > 1 and not rule.by_entry:
            found.append(
                Violation(
                    path="data_parallel.sync.servers",
                    value=self.servers,
                    rule=f"splits vectors, and data_parallel.rule {type(rule).__name__} has norms",
                    legal="1",
                )
            )
        return found + self.wants(algorithm)

    def form(self, algorithm: DataParallel) -> Form:
        """How its pushes travel."""
        return Form(
            algorithm=algorithm,
            servers=self.servers,
            n_vectors=self.n_pushed,
            n_batches=self.per_push,
        )

    def whole(self, servers: Sequence[State]) -> torch.Tensor:
        """The model, from the states of all servers in their order."""
        import torch

        return torch.cat([state["params"] for state in servers])

    # Rounds -------------------------------------------------------------------------------------

    def _push(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        if state["new"]:
            return (yield from self._hello(algorithm, state, me))
        work = yield from self.work(algorithm, state, me)
        form, kept = self.form(algorithm), dict(state["exchange"])
        turn = Turn(step=state["pushes"], lr=self.rate(state, me))
        if all(row.finite for row in work.rows):
            packets: list[list[Packet]] = [[] for _ in range(self.servers)]
            for index, vector in enumerate(work.vectors):
                key = str(index)
                made, kept[key] = form.packed(vector, kept[key], index, turn, me)
                for server, each in enumerate(made):
                    packets[server] += each
        else:
            packets = [form.nothing(state["params"], server, me) for server in range(self.servers)]
        for server, each in enumerate(packets):
            head = heading((turn.step, state["versions"][str(server)], turn.lr), work.rows)
            yield Send(to=me.n + server, message=Message(packets=(head, *each)))
        return {
            **state,
            **work.changed,
            "exchange": kept,
            "awaits": dict.fromkeys(state["awaits"], True),
            "pushes": state["pushes"] + 1,
            "step": state["step"] + self.per_push,
        }

    def _hello(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Asks all servers for parameters, in a push of nothing."""
        for server in range(self.servers):
            message = self.form(algorithm).notice(HELLO, state["params"], server, me)
            yield Send(to=me.n + server, message=message)
        return {**state, "awaits": dict.fromkeys(state["awaits"], True), "new": False}

    def _pull(self, state: State, server: str, me: Worker) -> Program[State]:
        """The answer of a server that is waited for."""
        start, stop = span(me.layout.n_entries, self.servers, int(server))
        like = Like((stop - start,), exchange.name(state["params"]))
        kinds: Kinds = ((WHOLE, Like((1,), "float64")), (WHOLE, like))
        received: Received = yield Recv(source=me.n + int(server), kinds=kinds)
        head, packet = received.message.packets
        params = piece = packet.decode()
        if self.servers > 1:
            params = state["params"].clone()
            params[start:stop] = piece
        return {
            **state,
            "params": params,
            "versions": {**state["versions"], server: int(numbers(head)[0])},
            "awaits": {**state["awaits"], server: False},
        }

    def _serve(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """One push: applied, told of, and whoever is to be answered by it is."""
        form = self.form(algorithm)
        received: Received = yield Recv(
            source=ANY, kinds=form.kinds(me, exchange.name(state["params"]))
        )
        push = form.read(received)
        step = state["step"] // me.n * self.per_push
        lr, delay = me.lr(step), state["version"] - push.version
        here, came = push.number != LEFT, push.number >= 0
        after = {**state, "step": state["step"] + came}
        if state["present"][str(push.worker)] != here:
            after["present"] = {**state["present"], str(push.worker): here}
        after |= self.heard(algorithm, after, push, me)
        if came and push.counts:
            changed = yield from settled(self.applied(algorithm, after, push, lr, me))
            assert isinstance(changed, dict)
            after = {**after, **changed, "version": state["version"] + 1}
        for number, row in enumerate(push.rows if came and me.rank == me.n else ()):
            seen = Seen(rows=(row,), apart=True, workers=(push.worker,))
            yield Record(step=step + number + 1, seen=seen, lr=lr, delay=delay)
        changed, workers = self.answered(after, push, me)
        after = {**after, **changed}
        for worker in workers:
            piece = self.answer(after, worker, me)
            said = heading((self.told(after, worker),))
            yield Send(to=worker, message=Message(packets=(said, whole(piece))))
        return after

    def told(self, state: State, worker: int) -> int:
        """The version that a worker is told with its answer: the server's."""
        version: int = state["version"]
        return version

    def rate(self, state: State, me: Worker) -> float:
        """The learning rate where a worker is, by the first server's version."""
        return me.lr(state["versions"]["0"] // me.n * self.per_push)
