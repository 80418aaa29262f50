"""Partial reduce: models of those that are ready first are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ...errors import Violation
from ..effects import ANY, Now, Numbers, Program, Received, Recv, Send
from ..packet import Kinds, Like, Message
from ..push import LEFT, WHOLE, heading
from ..topology.passing import ring_sum
from ..vector import mean
from . import peers
from .kind import State, gradient, moved
from .peers import Peers

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_N_READY = 3  # number, clock, rate; then what is to be known of the batch
_READY: Kinds = ((WHOLE, Like((_N_READY + len(Numbers._fields),), "float64")),)
_N_TOLD = 2  # steps told of, clock; then a weight for each worker
_ABSENT = -1.0  # in place of the weight of one that is not in the group
_NEVER = -1.0  # in place of seconds
_USUAL = 3


class PartialReduce(Peers, frozen=True, kw_only=True, tag="PartialReduce", tag_field="kind"):
    """Workers average their models in groups of those that are ready first.

    Each takes a step of its own and tells a controller, which is one player more and has no model.
    It closes a group at `group_size` members, or `wait_s` after the first came, or when nobody is
    left to come; members take the mean of their models round a ring and go on. The rule's state
    stays with its worker. After `filter_period` groups that do not connect all workers, the next
    must have members of two of the parts that they fall into, for which those who came wait.

    Source: Miao et al. 2021, "Heterogeneity-Aware Distributed Machine Learning Training via Partial
    Reduce".
    Differs: weights by age are (1 - alpha)^age (derived), and all members go on with the clock of
    the newest; the learning rate goes by the steps of all, which the controller counts.

    Attributes:
        group_size: Members of a group; of fewer where fewer are there. Unless given, 3, and with
            `wait_s` as many as come.
        wait_s: Seconds after the first came at which a group is closed; never unless given.
        weights: Whether members count alike, or less by the steps that they are behind.
        alpha: Share of its weight that a member loses with each step behind.
        filter_period: Groups after which they must connect all workers; as many as workers
            unless given.
        warmup: Groups at the start that all workers are in.
    """

    promise: ClassVar[str] = "nobody waits for all, groups connect all"

    group_size: Annotated[int, msgspec.Meta(ge=2)] | None = None
    wait_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    weights: Literal["constant", "dynamic"] = "constant"
    alpha: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    filter_period: Annotated[int, msgspec.Meta(ge=1)] | None = None
    warmup: Annotated[int, msgspec.Meta(ge=0)] = 0

    def n_servers(self, n: int) -> int:
        """The controller."""
        return 1

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The mean of workers' models."""
        return mean(state["params"] for state in workers)

    def refused(self, n: int) -> list[Violation]:
        """Groups of more than there are; one worker alone is a group."""
        if self.group_size is None or self.group_size <= max(n, 2):
            return []
        rule = f"is more than the {n} workers"
        path = "data_parallel.sync.group_size"
        return [Violation(path=path, value=self.group_size, rule=rule, legal=f"2 to {max(n, 2)}")]

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Of a worker, or of the controller.

        The controller has of each worker when it came (0: it is not waiting), its clock, whether it
        is there, and the part of the graph that it is in; of time when the next group is due, and
        how long that is from the end of a round (below 0: no time is set).
        """
        if me.rank < me.n:
            rule = algorithm.rule.init(params)
            return {
                "params": params,
                "rule": rule,
                "awaits": False,
                "clock": 0,
                "told": 0,
                "step": 0,
            }
        names = [str(worker) for worker in range(me.n)]
        return {
            "params": params[:0].clone(),
            "came": dict.fromkeys(names, 0),
            "clock": dict.fromkeys(names, 0),
            "present": dict.fromkeys(names, True),
            "part": {name: int(name) for name in names},
            "groups": 0,
            "formed": 0,
            "due_s": 0.0,
            "left_s": _NEVER,
            "late": False,
            "step": 0,
        }

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A worker's step or its reduce, or what the controller does when it hears something."""
        if me.rank >= me.n:
            return (yield from self._control(state, me))
        if state["awaits"]:
            return (yield from self._reduce(state, me))
        params, rule, step = state["params"], state["rule"], state["step"]
        lr, clock = me.lr(state["told"] // me.n), state["clock"] + 1
        own = yield from gradient(algorithm, params, (step,), me)
        if own.is_finite and own.weight:
            params, rule, _ = yield from moved(algorithm, params, own.gradient, rule, lr, me)
        yield Send(to=me.n, message=ready(step, clock, lr, own.numbers))
        after = {**state, "params": params, "rule": rule, "clock": clock}
        return {**after, "awaits": True, "step": step + 1}

    def _reduce(self, state: State, me: Worker) -> Program[State]:
        """The weighted mean of the models of a group."""
        kinds: Kinds = ((WHOLE, Like((_N_TOLD + me.n,), "float64")),)
        received: Received = yield Recv(source=me.n, kinds=kinds)
        told, clock, *weights = received.message.packets[0].decode().tolist()
        members = [worker for worker, weight in enumerate(weights) if weight != _ABSENT]
        own = (state["params"] * weights[me.rank],)
        (params,) = yield from ring_sum(own, members, me.rank)
        after = {**state, "params": params, "awaits": False}
        return {**after, "clock": int(clock), "told": int(told)}

    # The controller -----------------------------------------------------------------------------

    def _control(self, state: State, me: Worker) -> Program[State]:
        """One arrival, or the end of a wait; then all groups that can be closed."""
        left_s = state["left_s"]
        timeout_s = None if left_s < 0 else left_s
        received: Received | None = yield Recv(source=ANY, kinds=_READY, timeout_s=timeout_s)
        now_s: float = (yield Now()) if self.wait_s is not None else 0.0
        after, waited = state, any(state["came"].values())
        if received is None:
            after = {**state, "late": True}
        else:
            numbers = received.message.packets[0].decode().tolist()
            number, clock, lr = numbers[:_N_READY]
            gone = number == LEFT
            if not gone:
                row = Numbers(*numbers[_N_READY:])
                yield peers.told(received.source, row, state["step"] // me.n, lr)
            after = _heard(state, received.source, gone=gone, clock=int(clock))
        while members := self.closing(after, me.n):
            clocks = [after["clock"][str(worker)] for worker in members]
            weights = [_ABSENT] * me.n
            for worker, weight in zip(members, self.weighed(clocks), strict=True):
                weights[worker] = weight
            said = Message(packets=(heading((after["step"], max(clocks), *weights)),))
            for worker in members:
                yield Send(to=worker, message=said)
            after, waited = _closed(after, members), False
        return self._timed(after, waited, now_s)

    def closing(self, state: State, n: int) -> list[int]:
        """Members of the group that is closed now; none if there is none to close yet."""
        came, part, present = state["came"], state["part"], state["present"]
        waiting = sorted((w for w in range(n) if came[str(w)]), key=lambda w: came[str(w)])
        size = here = sum(present.values())
        late = state["late"]
        if state["formed"] < self.warmup:
            late = False
        elif self.group_size is not None or self.wait_s is None:
            size = min(self.group_size or _USUAL, here)
        if not waiting or (len(waiting) < size and not late):
            return []
        period = n if self.filter_period is None else self.filter_period
        if state["groups"] < period or len(_parts(state)) == 1:
            return sorted(waiting[:size])
        first = waiting[0]
        others = [w for w in waiting if part[str(w)] != part[str(first)]]
        if not others:
            return []
        rest = [w for w in waiting if w not in (first, others[0])]
        return sorted([first, others[0], *rest[: size - 2]])

    def weighed(self, clocks: Sequence[int]) -> list[float]:
        """What each member of a group counts, by its clock."""
        newest, keeps = max(clocks), 1.0
        if self.weights == "dynamic":
            keeps -= self.alpha
        weights = [keeps ** (newest - clock) for clock in clocks]
        return [weight / sum(weights) for weight in weights]

    def _timed(self, state: State, waited: bool, now_s: float) -> State:
        """The state with the seconds until a group is due; `waited` says that some were before.

        They are counted down, since the clock of a run that goes on starts anew.
        """
        if self.wait_s is None or state["late"] or not any(state["came"].values()):
            return {**state, "left_s": _NEVER}
        if not waited:
            return {**state, "due_s": now_s + self.wait_s, "left_s": self.wait_s}
        return {**state, "left_s": min(state["left_s"], max(state["due_s"] - now_s, 0.0))}


def ready(number: int, clock: int, lr: float, row: Numbers) -> Message:
    """What a worker tells the controller after a step; with number LEFT in the name of one gone."""
    return Message(packets=(heading((number, clock, lr), (row,)),))


def _heard(state: State, worker: int, *, gone: bool, clock: int) -> State:
    """A worker waits for a group, or is gone."""
    name, step = str(worker), state["step"] + (not gone)
    return {
        **state,
        "came": {**state["came"], name: 0 if gone else step},
        "clock": {**state["clock"], name: clock},
        "present": {**state["present"], name: not gone},
        "step": step,
    }


def _closed(state: State, members: Sequence[int]) -> State:
    """A group is on its way: its parts are one; once all who are there are one, all begins anew."""
    part = state["part"]
    joined = {part[str(worker)] for worker in members}
    part = {name: min(joined) if each in joined else each for name, each in part.items()}
    after = {
        **state,
        "came": {**state["came"], **dict.fromkeys(map(str, members), 0)},
        "part": part,
        "groups": state["groups"] + 1,
        "formed": state["formed"] + 1,
        "late": False,
    }
    if len(_parts(after)) == 1:
        return {**after, "part": {name: int(name) for name in part}, "groups": 0}
    return after


def _parts(state: State) -> set[int]:
    """The parts that workers who are there fall into."""
    return {each for name, each in state["part"].items() if state["present"][name]}
