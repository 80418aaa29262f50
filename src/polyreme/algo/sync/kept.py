"""What syncs have whose models change while workers compute: a keeper beside each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import Violation, undefined
from .. import exchange
from ..effects import ANY, Numbers, Program, Received, Recv, Send
from ..packet import Kinds, Like, Message, Packet
from ..push import HELLO, LEFT, WHOLE, heading
from ..topology.graph import Graph
from ..topology.graph.ring import RingGraph
from ..vector import mean
from . import peers
from .kind import State, gradient, stride
from .peers import Peers

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_N_HEAD = 2
_BRIEF: Kinds = ((WHOLE, Like((_N_HEAD + len(Numbers._fields),), "float64")),)
_NOTHING = Numbers()
_GRADIENT, _MODEL = 0.0, 1.0
"""What a worker's vector is."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a keeper hears of another: numbers whose meaning is the member's, and a vector."""

    source: int
    numbers: tuple[float, ...]
    vector: torch.Tensor


class Kept(Peers, frozen=True, kw_only=True):
    """Keeper n + i has the model of worker i, on its machine; keepers exchange while it computes.

    The worker pushes a gradient to its keeper, which takes the rule's step on the model as it is by
    then, and answers with the model. `version` counts a model's changes. Each keeper reckons how
    many steps the run has done: those of its worker, averaged as models are; the learning rate
    goes by it. Nothing is kept in a round.

    A keeper stays when its worker goes. It tells all others, who begin nothing with it until its
    worker is back, and that worker begins with the model that it kept meanwhile. One that was begun
    anew from an earlier model is given the model that its worker has.

    Attributes:
        graph: Who is whose neighbour.
    """

    graph: Graph = RingGraph()

    # What members say ---------------------------------------------------------------------------

    def own(self) -> State:
        """What a keeper keeps beside model, rule and counts, by its names."""
        return {}

    def begun(self, state: State, me: Worker) -> Program[State]:
        """What a keeper begins once its worker computes again: its state then."""
        raise undefined(self, "begun")

    def heard(self, state: State, said: Said, me: Worker) -> Program[State]:
        """A keeper's state after it heard of another."""
        raise undefined(self, "heard")

    def holding(self, state: State, model: torch.Tensor) -> State:
        """A keeper's state once its model is this one."""
        return {**state, "params": model}

    def reckoned(self, state: State) -> float:
        """The steps that the run has done, as a keeper reckons them."""
        progress: float = state["progress"]
        return progress

    # What all have ------------------------------------------------------------------------------

    @property
    def n_vectors(self) -> int:
        """The keeper's model."""
        return 1

    def n_servers(self, n: int) -> int:
        """A keeper for each worker."""
        return n

    def hear_of(self, worker: int, n: int) -> range:
        """Its keeper."""
        return range(n + worker, n + worker + 1)

    def machine(self, player: int, n: int) -> int:
        """A keeper is where its worker is."""
        return player % n

    def models_of(self, n: int) -> range:
        """Keepers."""
        return range(n, 2 * n)

    def gone(self) -> Message:
        """A message without a vector."""
        return _brief(LEFT)

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The mean of the models that keepers of workers that are there have."""
        return mean(state["params"] for state in there(servers))

    def refused(self, n: int) -> list[Violation]:
        """The graph must connect all."""
        return peers.unfit(self.graph, n)

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Of a worker, or of a keeper."""
        if me.rank < me.n:
            waits = {"awaits": False, "new": False, "outlasted": False}
            return {"params": params, "version": 0, **waits, "step": 0}
        rule = algorithm.rule.init(params)
        counts = {"version": 0, "progress": 0.0, "step": 0}
        known = {"present": dict.fromkeys(map(str, range(me.n)), True), "stale": False}
        return {"params": params, "rule": rule, **self.own(), **known, **counts}

    def restored(self, state: State) -> State:
        """Its model is an old one until its worker speaks."""
        return {**super().restored(state), "stale": True}

    def outlasted(self, algorithm: DataParallel, state: State) -> State:
        """It gives its keeper the model that it has, unless it has none."""
        if state["new"]:
            return self.anew(algorithm, state)
        return {**state, "awaits": False, "outlasted": True}

    def anew(self, algorithm: DataParallel, state: State) -> State:
        """The state of a worker that comes, or comes back, and has no model."""
        return {**super().anew(algorithm, state), "outlasted": False}

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A worker's push or its pull, or what a keeper does with what it hears."""
        like = Like.of(state["params"])
        if me.rank >= me.n:
            return (yield from self._keep(algorithm, state, like, me))
        if state["awaits"]:
            answer: Received = yield Recv(source=me.n + me.rank, kinds=_kinds(1, like))
            head, packet = answer.message.packets
            version = int(head.decode()[0])
            after = {**state, "params": packet.decode(), "version": version}
            return {**after, "awaits": False, "new": False, "outlasted": False}
        if state["new"]:
            yield Send(to=me.n + me.rank, message=_brief(HELLO))
            return {**state, "awaits": True}
        if state["outlasted"]:
            given = _message((state["version"], _MODEL), state["params"], _NOTHING)
            yield Send(to=me.n + me.rank, message=given)
            return {**state, "awaits": True}
        own = yield from gradient(algorithm, state["params"], (state["step"],), me)
        numbers = (state["version"], _GRADIENT)
        yield Send(to=me.n + me.rank, message=_message(numbers, own.gradient, own.numbers))
        return {**state, "awaits": True, "step": state["step"] + 1}

    def _keep(
        self, algorithm: DataParallel, state: State, like: Like, me: Worker
    ) -> Program[State]:
        """One push of the worker, or one message of another keeper."""
        width = _N_HEAD + len(Numbers._fields)
        received: Received = yield Recv(source=ANY, kinds=_kinds(width, like), brief=_BRIEF)
        head, *packets = received.message.packets
        told = head.decode().tolist()
        numbers, row = tuple(told[:_N_HEAD]), told[_N_HEAD:]
        source, is_push = received.source, bool(packets)
        if source >= me.n and is_push:
            said = Said(source=source, numbers=numbers, vector=packets[0].decode())
            return (yield from self.heard(state, said, me))
        here = is_push or numbers[0] != LEFT
        after = yield from self._met(state, source % me.n, here, me)
        if source < me.n:
            after = {**after, "stale": False}
        if source >= me.n or not here:
            return after
        version, is_gradient = int(numbers[0]), is_push and numbers[1] == _GRADIENT
        if is_gradient:
            after = yield from self._updated(
                algorithm, after, packets[0].decode(), Numbers(*row), version, me
            )
        elif is_push:
            after = self.holding(after, packets[0].decode())
            after = {**after, "version": max(version, after["version"]) + 1}
        model = self.model(after)
        answer = Message(packets=(heading((after["version"],)), _packet(model)))
        yield Send(to=source, message=answer)
        return (yield from self.begun(after, me)) if is_gradient else after

    def _met(self, state: State, worker: int, here: bool, me: Worker) -> Program[State]:
        """Knows whether a worker is there; the worker's keeper tells all others of a change."""
        if state["present"][str(worker)] == here:
            return state
        if worker == me.rank - me.n:
            for other in range(me.n):
                if other != worker:
                    yield Send(to=me.n + other, message=_brief(HELLO if here else LEFT))
        return {**state, "present": {**state["present"], str(worker): here}}

    def _updated(
        self,
        algorithm: DataParallel,
        state: State,
        found: torch.Tensor,
        row: Numbers,
        version: int,
        me: Worker,
    ) -> Program[State]:
        """A step of the rule, if the gradient counts, and told of in any case."""
        step = int(self.reckoned(state))
        lr, delay = me.lr(step), state["version"] - version
        after = {**state, "step": state["step"] + 1, "progress": state["progress"] + 1.0}
        if row.finite and row.weight:
            model = self.model(state)
            delta, rule, _ = yield from stride(algorithm, model, found, state["rule"], lr, me)
            changed = {"params": state["params"] + delta, "rule": rule}
            after = {**after, **changed, "version": state["version"] + 1}
        yield peers.told(me.rank - me.n, row, step, lr, delay)
        return after


def tell(to: int, numbers: tuple[float, ...], vector: torch.Tensor) -> Program[None]:
    """Sends a keeper another's numbers and vector."""
    yield Send(to=to, message=_message(numbers, vector, _NOTHING))


def there(servers: Sequence[State]) -> Sequence[State]:
    """Keepers with models that are no old ones, of workers that are there.

    If there is none, of any workers; if there is none either, all.
    """
    fresh = [own for own, state in enumerate(servers) if not state["stale"]]
    present = [own for own in fresh if servers[own]["present"][str(own)]]
    return [servers[own] for own in present or fresh] or servers


def _brief(number: int) -> Message:
    """That a worker is there, or gone."""
    return Message(packets=(heading((number, 0.0), (_NOTHING,)),))


def _message(numbers: Sequence[float], vector: torch.Tensor, row: Numbers) -> Message:
    return Message(packets=(heading(numbers, (row,)), _packet(vector)))


def _packet(vector: torch.Tensor) -> Packet:
    like = Like((vector.numel(),), exchange.name(vector))
    return Packet(buffers=(vector,), like=like, kind=WHOLE)


def _kinds(width: int, like: Like) -> Kinds:
    return ((WHOLE, Like((width,), "float64")), (WHOLE, like))
