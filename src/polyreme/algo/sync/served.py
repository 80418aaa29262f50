"""What syncs with servers have: workers push and pull, each in its own time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import ConfigError, Violation
from .. import attacking, exchange
from ..answer import Answers, joined
from ..effects import ANY, Program, Received, Record, Recv, Seen, Send, Suspect
from ..feedback.kind import Turn
from ..packet import Message, Packet
from ..push import HELLO, LEFT, Form, Push, heading
from ..vector import span
from . import coming_alone
from .kind import State
from .served_kind import ServedKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class Served(ServedKind, frozen=True, kw_only=True):
    """Workers push to servers, which apply what comes as it comes, and pull parameters from them.

    A worker is one player, each server another, numbered after the workers. Vectors are cut in
    pieces of equal size, one for each server; a piece's `version` is the number of pushes that were
    applied to it, or of steps where a member says so. A push whose loss or gradient is not finite,
    or has no labels, is answered and not applied, and told of with a weight of 0. Nothing is kept
    in a round: a worker computes and pushes in one and takes an answer in the next, a server takes
    one message in each. The first server tells of what came.

    A worker computes while no more than `ahead` of its pushes are unanswered, at the parameters
    that it has, and takes answers that are there before it does. With gradients of C seconds and
    answers T seconds after their pushes, the seconds between two pushes fall from C + T to
    max(C, (C + T) / (ahead + 1)).

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
    """

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
                **self.answers(algorithm).kept({"params": piece, **own}, me),
                "present": present,
                "version": 0,
                "step": 0,
            }
        rule = {"rule": algorithm.rule.init(params)} if self.steps_at_worker else {}
        own = self.own(algorithm, params, me)
        return {
            "params": params,
            **rule,
            **own,
            **self.answers(algorithm).own({"params": params, **own}),
            "exchange": self.form(algorithm).init(params, me),
            "versions": {str(server): 0 for server in range(self.servers)},
            "awaits": {str(server): 0 for server in range(self.servers)},
            "pushes": 0,
            "step": 0,
            "new": False,
        }

    def anew(self, algorithm: DataParallel, state: State) -> State:
        """The state of a worker that comes, or comes back: it asks for parameters first."""
        state = self.answers(algorithm).emptied(state)
        return {**state, "awaits": dict.fromkeys(state["awaits"], 0), "new": True}

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A worker's push or one of its pulls, or a server's answer."""
        if me.rank >= me.n:
            return self._serve(algorithm, state, me)
        bound = 0 if state["new"] else self.ahead
        for server, awaited in state["awaits"].items():
            if awaited > bound:
                return self._pull(algorithm, state, server, me)
        return self._push(algorithm, state, me)

    def refused_with(self, algorithm: DataParallel) -> list[Violation]:
        """Parts of the algorithm that say how workers meet, and options that do not go together."""
        return [*coming_alone.refused(self, algorithm), *self.wants(algorithm)]

    def form(self, algorithm: DataParallel) -> Form:
        """How its pushes travel."""
        return Form(
            algorithm=algorithm,
            servers=self.servers,
            n_vectors=self.n_pushed,
            n_batches=self.per_push,
        )

    def answers(self, algorithm: DataParallel) -> Answers:
        """How answers travel."""
        return Answers(
            algorithm=algorithm,
            servers=self.servers,
            names=("params", *self.beside),
            ahead=self.ahead,
        )

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The pieces of all servers, one after another."""
        import torch

        return torch.cat([state["params"] for state in servers])

    # Rounds -------------------------------------------------------------------------------------

    def _push(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        if state["new"]:
            return (yield from self._hello(algorithm, state, me))
        for server, awaited in state["awaits"].items():
            if awaited:
                after = yield from self._pull(algorithm, state, server, me, timeout_s=0.0)
                if after is not state:
                    return after
        work = yield from self.work(algorithm, state, me)
        form, kept = self.form(algorithm), dict(state["exchange"])
        lr = 1.0 if self.pushes_steps or self.steps_at_worker else self.rate(state, me)
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
        if attacking.silent(me):
            return {
                **state,
                **work.changed,
                "exchange": kept,
                "step": state["step"] + self.per_push,
            }
        awaits, waits = state["awaits"], self.awaits(state["pushes"])
        for server, each in enumerate(packets):
            head = heading((turn.step, state["versions"][str(server)], turn.lr), work.rows)
            yield Send(to=me.n + server, message=Message(packets=(head, *each)))
        return {
            **state,
            **work.changed,
            "exchange": kept,
            "awaits": {server: awaited + waits for server, awaited in awaits.items()},
            "pushes": state["pushes"] + 1,
            "step": state["step"] + self.per_push,
        }

    def _hello(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Asks all servers for parameters, in a push of nothing."""
        for server in range(self.servers):
            yield self._asks(algorithm, state, server, me)
        return {**state, "awaits": dict.fromkeys(state["awaits"], 1)}

    def _asks(self, algorithm: DataParallel, state: State, server: int, me: Worker) -> Send:
        message = self.form(algorithm).notice(HELLO, state["params"], server, me)
        return Send(to=me.n + server, message=message)

    def _pull(
        self,
        algorithm: DataParallel,
        state: State,
        server: str,
        me: Worker,
        timeout_s: float | None = None,
    ) -> Program[State]:
        """The answer of a server that is waited for; one that came is new until it has all."""
        kinds = self.answers(algorithm).kinds(me, int(server), exchange.name(state["params"]))
        received: Received | None = yield Recv(
            source=me.n + int(server), kinds=kinds, timeout_s=timeout_s
        )
        if received is None:
            return state
        answers, message = self.answers(algorithm), received.message
        told = answers.told(state, message)
        if answers.fits(state, int(server), told):
            return self.pulled(algorithm, state, server, message, me)
        if not (state["new"] or answers.has(state, int(server), told)):
            yield self._asks(algorithm, state, int(server), me)
        return {**state}

    def pulled(
        self, algorithm: DataParallel, state: State, server: str, message: Message, me: Worker
    ) -> State:
        """A worker's state with the answer of a server, which follows on what the worker holds."""
        answers = self.answers(algorithm)
        told = answers.told(state, message)
        pieces, held = answers.read(state, int(server), message, me)
        start, stop = span(me.layout.n_entries, self.servers, int(server))
        pieces["params"] = self.joined(state, state["params"][start:stop], pieces["params"])
        later = () if state["new"] else range(told.number + 1, state["pushes"])
        awaits = {**state["awaits"], server: sum(map(self.awaits, later))}
        return {
            **state,
            **joined(state, pieces, start, stop),
            **held,
            "versions": {**state["versions"], server: told.version},
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
        here = push.number != LEFT
        if state["present"][str(push.worker)] != here:
            state = {**state, "present": {**state["present"], str(push.worker): here}}
        if push.number >= 0:
            state = self.answers(algorithm).noted(state, push.worker, push.number)
        elif push.number == HELLO:
            state = self.answers(algorithm).lost(state, push.worker)
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
        if came and self.distrusts and push.lies:
            yield Suspect(workers=(push.worker,))
            push = push.unfit
        after |= self.heard(algorithm, after, push, me)
        taken = came and push.counts and self.takes(after, push)
        if taken:
            changed = yield from _played(self.applied(algorithm, after, push, lr, me))
            after = {**after, "version": state["version"] + 1, **changed}
        for number, row in enumerate(push.rows if came and me.rank == me.n else ()):
            told = row if taken else row._replace(weight=0.0)
            seen = Seen(rows=(told,), apart=True, workers=(push.worker,))
            yield Record(step=step + number + 1, seen=seen, lr=lr, delays=(delay,))
        after |= yield from _played(self.met(algorithm, after, lr, me))
        changed, workers = self.answered(after, push, me)
        after = {**after, **changed}
        for worker in workers:
            message, after = self.reply(algorithm, after, worker, me)
            yield Send(to=worker, message=message)
        return after

    def reply(
        self, algorithm: DataParallel, state: State, worker: int, me: Worker
    ) -> tuple[Message, State]:
        """What a server sends a worker, with its version, and the server's state then."""
        vectors = (self.answer(state, worker, me), *(state[name] for name in self.beside))
        return self.answers(algorithm).made(state, worker, vectors, state["version"], me)


def _played(changed: State | Program[State]) -> Program[State]:
    """Entries that change, whether or not something is asked for on the way."""
    return changed if isinstance(changed, dict) else (yield from changed)
