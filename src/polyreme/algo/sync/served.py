"""What syncs with servers have: workers push and pull, each in its own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import ConfigError, Violation, undefined
from .. import exchange
from ..effects import ANY, Numbers, Program, Received, Record, Recv, Seen, Send, Split, settled
from ..feedback.kind import Turn
from ..packet import Kinds, Like, Message, Packet
from ..push import HELLO, LEFT, WHOLE, Form, Push, heading, numbers, whole
from ..vector import span
from . import coming_alone
from .kind import State, SyncKind, clipped, gradient, undecayed

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

    @property
    def counts(self) -> bool:
        """Whether all of it is finite and some label carries loss."""
        return all(row.finite for row in self.rows) and any(row.weight for row in self.rows)


class Served(SyncKind, frozen=True, kw_only=True):
    """Workers push to servers, which apply what comes as it comes, and pull parameters from them.

    A worker is one player, each server another, numbered after the workers. Vectors are cut in
    pieces of equal size, one for each server; a piece's `version` is the number of pushes that were
    applied to it, or of steps where a member says so. A push whose loss or gradient is not finite,
    or has no labels, is answered and not applied, and told of with a weight of 0. Nothing is kept
    in a round: a worker computes and pushes in one and waits for an answer in the next, a server
    takes one message in each. The first server tells of what came.

    Attributes:
        servers: How many servers there are.
    """

    in_step: ClassVar[bool] = False
    n_pushed: ClassVar[int] = 1
    """Vectors of a push."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Vectors of a server's state that are sent beside the parameters, to the worker's state."""
    owns_momentum: ClassVar[bool] = False
    """Whether the momentum is the sync's, so that the rule must have none and be SGD."""
    steps_at_worker: ClassVar[bool] = False
    """Whether the rule is played by workers, each with a state of its own, and not by servers."""
    decays_at_worker: ClassVar[bool] = False
    """Whether weight decay as that of a penalty is in what is pushed; momentum's always is."""
    one_server: ClassVar[str] = ""
    """Why pieces at several servers would not go together, if they would not."""

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
        decays = self.owns_momentum or self.decays_at_worker
        if algorithm.feedback.owns_momentum or not decays:  # it is in already, or never
            return held, own.numbers
        decay = algorithm.rule.coupled_decay
        return (held.add(at, alpha=decay) if decay else held), own.numbers

    def due(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[Push]]:
        """Entries that change, and what is dealt with now, in order: what came."""
        return {}, (push,)

    def takes(self, state: State, push: Push) -> bool:
        """Whether a push that counts is applied."""
        return True

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State | Split[State]:
        """The entries of a server's state that change by a push that counts."""
        raise undefined(self, "applied")

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """The entries of a server's state that change by any push, whether or not it counts."""
        return {}

    def met(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> State | Split[State]:
        """The entries of a server's state that change once enough have come.

        Asked after every push, and when a worker came or is gone.
        """
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

    def joined(self, state: State, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """A piece of a worker's parameters, from what it was and what a server sent: the latter."""
        return came

    def awaits(self, push: int) -> bool:
        """Whether a worker waits for an answer to its push of that number."""
        return True

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """What this member cannot go with beyond what none can."""
        return []

    # What all have ------------------------------------------------------------------------------

    def n_servers(self, n: int) -> int:
        """As many as were asked for."""
        return self.servers

    def fits(self, n_entries: int) -> None:
        """Raise ConfigError where there are more servers than parameters."""
        if self.servers > max(1, n_entries):
            rule = f"is more than the model's {n_entries} parameters"
            path, legal = "data_parallel.sync.servers", f"1 (or up to {n_entries})"
            raise ConfigError([Violation(path=path, value=self.servers, rule=rule, legal=legal)])

    def agrees(self, algorithm: DataParallel) -> bool:
        """Workers have parameters of different ages."""
        return False

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Of a worker or a server (whose number is that of the workers or more)."""
        self.fits(me.layout.n_entries)
        if me.rank >= me.n:
            start, stop = span(me.layout.n_entries, self.servers, me.rank - me.n)
            piece = params[start:stop].clone()
            rule = {} if self.steps_at_worker else {"rule": algorithm.rule.init(piece)}
            own = self.kept(algorithm, piece, me)
            present = dict.fromkeys(map(str, range(me.n)), True)
            return {
                "params": piece,
                **rule,
                **own,
                "present": present,
                "version": 0,
                "step": 0,
            }
        rule = {"rule": algorithm.rule.init(params)} if self.steps_at_worker else {}
        return {
            "params": params,
            **rule,
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
        return {**state, "awaits": dict.fromkeys(state["awaits"], False), "new": True}

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
        if self.servers > 1 and self.one_server:
            path, legal = "data_parallel.sync.servers", "1"
            found.append(
                Violation(path=path, value=self.servers, rule=self.one_server, legal=legal)
            )
        if self.servers > 1 and not (rule.by_entry or self.steps_at_worker):
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

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The pieces of all servers, one after another."""
        import torch

        return torch.cat([state["params"] for state in servers])

    # Rounds -------------------------------------------------------------------------------------

    def _push(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        if state["new"]:
            return (yield from self._hello(algorithm, state, me))
        work = yield from self.work(algorithm, state, me)
        form, kept = self.form(algorithm), dict(state["exchange"])
        lr = 1.0 if self.steps_at_worker else self.rate(state, me)  # a step has its rate in it
        turn = Turn(step=state["pushes"], lr=lr)
        if work.counts:
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
            "awaits": dict.fromkeys(state["awaits"], self.awaits(state["pushes"])),
            "pushes": state["pushes"] + 1,
            "step": state["step"] + self.per_push,
        }

    def _hello(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Asks all servers for parameters, in a push of nothing."""
        for server in range(self.servers):
            message = self.form(algorithm).notice(HELLO, state["params"], server, me)
            yield Send(to=me.n + server, message=message)
        return {**state, "awaits": dict.fromkeys(state["awaits"], True)}

    def _pull(self, state: State, server: str, me: Worker) -> Program[State]:
        """The answer of a server that is waited for; one that came is new until it has all."""
        start, stop = span(me.layout.n_entries, self.servers, int(server))
        like = Like((stop - start,), exchange.name(state["params"]))
        kinds: Kinds = ((WHOLE, Like((1,), "float64")), *((WHOLE, like),) * (1 + len(self.beside)))
        received: Received = yield Recv(source=me.n + int(server), kinds=kinds)
        return self.pulled(state, server, received.message, me)

    def pulled(self, state: State, server: str, message: Message, me: Worker) -> State:
        """A worker's state with the answer of a server."""
        head, packet, *others = message.packets
        start, stop = span(me.layout.n_entries, self.servers, int(server))
        came = {name: other.decode() for name, other in zip(self.beside, others, strict=True)}
        came["params"] = self.joined(state, state["params"][start:stop], packet.decode())
        if self.servers > 1:
            for name, piece in came.items():
                came[name] = state[name].clone()
                came[name][start:stop] = piece
        awaits = {**state["awaits"], server: False}
        return {
            **state,
            **came,
            "versions": {**state["versions"], server: int(numbers(head)[0])},
            "awaits": awaits,
            "new": state["new"] and any(awaits.values()),
        }

    def _serve(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """What came, and whatever can be dealt with now that it is there."""
        form = self.form(algorithm)
        received: Received = yield Recv(
            source=ANY, kinds=form.kinds(me, exchange.name(state["params"]))
        )
        push = form.read(received)
        if push.version > state["version"]:  # begun at what a server had before it went back
            push = replace(push, version=state["version"])
        here = push.number != LEFT
        if state["present"][str(push.worker)] != here:
            state = {**state, "present": {**state["present"], str(push.worker): here}}
        changed, pushes = self.due(state, push, me)
        state = {**state, **changed}
        for each in pushes:
            state = yield from self._dealt(algorithm, state, each, me)
        return state

    def _dealt(
        self, algorithm: DataParallel, state: State, push: Push, me: Worker
    ) -> Program[State]:
        """One push: applied, told of, and whoever is to be answered by it is."""
        step = state["step"] // me.n * self.per_push
        lr, delay = me.lr(step), state["version"] - push.version
        came = push.number >= 0
        after = {**state, "step": state["step"] + came}
        after |= self.heard(algorithm, after, push, me)
        taken = came and push.counts and self.takes(after, push)
        if taken:
            changed = yield from settled(self.applied(algorithm, after, push, lr, me))
            assert isinstance(changed, dict)
            after = {**after, "version": state["version"] + 1, **changed}
        for number, row in enumerate(push.rows if came and me.rank == me.n else ()):
            told = row if taken else row._replace(weight=0.0)
            seen = Seen(rows=(told,), apart=True, workers=(push.worker,))
            yield Record(step=step + number + 1, seen=seen, lr=lr, delays=(delay,))
        changed = yield from settled(self.met(algorithm, after, lr, me))
        assert isinstance(changed, dict)
        after |= changed
        changed, workers = self.answered(after, push, me)
        after = {**after, **changed}
        for worker in workers:
            yield Send(to=worker, message=self.reply(after, worker, me))
        return after

    def reply(self, state: State, worker: int, me: Worker) -> Message:
        """What a server sends a worker, with the version that it is told."""
        head = heading((self.told(state, worker),))
        vectors = (self.answer(state, worker, me), *(state[name] for name in self.beside))
        return Message(packets=(head, *map(whole, vectors)))

    def ruled(
        self, algorithm: DataParallel, state: State, found: torch.Tensor, lr: float, me: Worker
    ) -> Split[State]:
        """Parameters and the rule's state after a step of it at a server."""
        rule, params = algorithm.rule, state["params"]
        if algorithm.feedback.owns_momentum or self.decays_at_worker:
            rule = undecayed(rule)
        layout = me.layout.pieces(self.servers)[me.rank - me.n]
        delta, kept = yield from settled(
            rule.update(found, state["rule"], params, lr=lr, layout=layout)
        )
        return {"params": params + delta, "rule": kept}

    def told(self, state: State, worker: int) -> int:
        """The version that a worker is told with its answer: the server's."""
        version: int = state["version"]
        return version

    def rate(self, state: State, me: Worker) -> float:
        """The learning rate where a worker is, by the first server's version."""
        return me.lr(state["versions"]["0"] // me.n * self.per_push)
