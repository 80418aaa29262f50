"""Partial reduce: models of those that are ready first are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import msgspec

from ...errors import Violation
from ..effects import ANY, Now, Numbers, Program, Received, Recv, Send
from ..packet import Kinds, Like, Message
from ..push import HELLO, LEFT, WHOLE, heading
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
_HAS = -3  # in place of a number: a member has the mean of the group that the clock says
_FORMED, _TAKEN, _DROPPED, _GONE = range(4)  # what is said of a group
_N_TOLD = 4  # one of those, group, steps told of, clock; then a weight for each worker
_ABSENT = -1.0  # in place of the weight of one that is not in the group
_NEVER = -1.0  # in place of seconds
_USUAL = 3
_T = TypeVar("_T")


class PartialReduce(Peers, frozen=True, kw_only=True, tag="PartialReduce", tag_field="kind"):
    """Workers average their models in groups of those that are ready first.

    Each takes a step of its own and tells a controller, which is one player more and has no model.
    It closes a group at `group_size` members, or `wait_s` after the first came, or when nobody is
    left to come; members find the mean of their models round a ring, take it once all have it, and
    go on. The rule's state stays with its worker. After `filter_period` groups that do not connect
    all workers, the next must have members of two of the parts that they fall into, for which those
    who came wait.

    If a member goes before all have the mean, nobody takes it: the others wait for a group with
    the models that they had. So a group's mean is taken by all or by none, and leaves the mean of
    models where it is. A worker that comes back takes the mean of the first group that it is in,
    and counts 0 there. Where nobody has a model left, processes begin with the mean that was
    evaluated last, or the first model before that; simulated workers with what they had.

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

    remembers: ClassVar[bool] = True
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
        have = [state for state in workers if not state["new"]]
        return mean(state["params"] for state in have or workers)

    def gone(self) -> Message:
        """What the worker itself would tell."""
        return ready(LEFT, 0, 0.0, Numbers())

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
        is there, whether it has no model yet, the group that it is in and waits for, from 1 (0:
        none), whether it has that one's mean, and the part of the graph that it is in; of time when
        the next group is due, and how long that is from the end of a round (below 0: no time is
        set).
        """
        if me.rank < me.n:
            rule = algorithm.rule.init(params)
            return {
                "params": params,
                "rule": rule,
                "awaits": False,
                "new": False,
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
            "new": dict.fromkeys(names, False),
            "in": dict.fromkeys(names, 0),
            "has": dict.fromkeys(names, False),
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
            return (yield from self._reduce(algorithm, state, me))
        if state["new"]:
            yield Send(to=me.n, message=ready(HELLO, 0, 0.0, Numbers()))
            return {**state, "awaits": True}
        params, rule, step = state["params"], state["rule"], state["step"]
        lr, clock = me.lr(state["told"] // me.n), state["clock"] + 1
        own = yield from gradient(algorithm, params, (step,), me)
        if own.is_finite and own.weight:
            params, rule, _ = yield from moved(algorithm, params, own.gradient, rule, lr, me)
        yield Send(to=me.n, message=ready(step, clock, lr, own.numbers))
        after = {**state, "params": params, "rule": rule, "clock": clock}
        return {**after, "awaits": True, "step": step + 1}

    def _reduce(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """The weighted mean of the models of a group, if all stay until they have it."""
        kinds: Kinds = ((WHOLE, Like((_N_TOLD + me.n,), "float64")),)
        received: Received = yield Recv(source=me.n, kinds=kinds)
        said, group, told, clock, *weights = received.message.packets[0].decode().tolist()
        if said != _FORMED:  # a group that is dropped before it began here, or this worker is
            return self.anew(algorithm, state) if said == _GONE else state
        members = [worker for worker, weight in enumerate(weights) if weight != _ABSENT]
        own = (state["params"] * weights[me.rank],)
        found = yield from _apart(ring_sum(own, members, me.rank), int(group), me.n)
        if found is not None:
            yield Send(to=me.n, message=ready(_HAS, int(group), 0.0, Numbers()))
        received = yield Recv(source=me.n, kinds=kinds)
        said, *_ = received.message.packets[0].decode().tolist()
        if said != _TAKEN:
            return self.anew(algorithm, state) if said == _GONE else state
        assert found is not None, "all members have it"
        after = {**state, "params": found[0], "awaits": False, "new": False}
        return {**after, "clock": int(clock), "told": int(told)}

    # The controller -----------------------------------------------------------------------------

    def _control(self, state: State, me: Worker) -> Program[State]:
        """One arrival, or the end of a wait; then all groups that can be closed."""
        left_s = state["left_s"]
        timeout_s = None if left_s < 0 else left_s
        received: Received | None = yield Recv(source=ANY, kinds=_READY, timeout_s=timeout_s)
        now_s: float = (yield Now()) if self.wait_s is not None else 0.0
        after, waited = state, bool(waiting(state))
        if received is None:
            after = {**state, "late": True}
        else:
            numbers = received.message.packets[0].decode().tolist()
            number, clock, lr = numbers[:_N_READY]
            if number == _HAS:
                after = yield from _had(state, received.source, int(clock), me)
            elif number == LEFT:
                after = yield from _lost(state, received.source, me)
            else:
                if number != HELLO:
                    row = Numbers(*numbers[_N_READY:])
                    yield peers.told(received.source, row, state["step"] // me.n, lr)
                after = _came(state, received.source, int(clock), new=number == HELLO)
        while members := self.closing(after, me.n):
            clocks = [after["clock"][str(worker)] for worker in members]
            weights = [_ABSENT] * me.n
            for worker in members:
                weights[worker] = 0.0
            have = [worker for worker in members if not after["new"][str(worker)]] or members
            shares = self.weighed([after["clock"][str(worker)] for worker in have])
            for worker, weight in zip(have, shares, strict=True):
                weights[worker] = weight
            after, waited = _closed(after, members), False
            group, step = after["formed"], after["step"]
            yield from _say(members, _FORMED, (group, step, max(clocks), *weights), me)
        return self._timed(after, waited, now_s)

    def closing(self, state: State, n: int) -> list[int]:
        """Members of the group that is closed now; none if there is none to close yet."""
        part, present, new = state["part"], state["present"], state["new"]
        queue = waiting(state)
        if any(here and not new[w] for w, here in present.items()):
            first = next((w for w in queue if not new[str(w)]), None)
            if first is None:
                return []
            queue = [first, *(w for w in queue if w != first)]
        size = here = sum(present.values())
        late = state["late"]
        if state["formed"] < self.warmup:
            late = False
        elif self.group_size is not None or self.wait_s is None:
            size = min(self.group_size or _USUAL, here)
        if not queue or (len(queue) < size and not late):
            return []
        period = n if self.filter_period is None else self.filter_period
        if state["groups"] < period or len(_parts(state)) == 1:
            return sorted(queue[:size])
        first = queue[0]
        others = [w for w in queue if part[str(w)] != part[str(first)]]
        if not others:
            return []
        rest = [w for w in queue if w not in (first, others[0])]
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
        if self.wait_s is None or state["late"] or not waiting(state):
            return {**state, "left_s": _NEVER}
        if not waited:
            return {**state, "due_s": now_s + self.wait_s, "left_s": self.wait_s}
        return {**state, "left_s": min(state["left_s"], max(state["due_s"] - now_s, 0.0))}


def ready(number: int, clock: int, lr: float, row: Numbers) -> Message:
    """What a worker tells the controller after a step; with number LEFT in the name of one gone."""
    return Message(packets=(heading((number, clock, lr), (row,)),))


def waiting(state: State) -> list[int]:
    """Workers that wait for a group and are in none, in the order in which they came."""
    came, group = state["came"], state["in"]
    queue = (int(name) for name, at in came.items() if at and not group[name])
    return sorted(queue, key=lambda worker: came[str(worker)])


def _came(state: State, worker: int, clock: int, *, new: bool) -> State:
    """A worker waits for a group; a new one has no model."""
    name = str(worker)
    return {
        **state,
        "came": {**state["came"], name: state["step"] + 1},
        "clock": {**state["clock"], name: clock},
        "present": {**state["present"], name: True},
        "new": {**state["new"], name: new},
        "step": state["step"] + (not new),
    }


def _had(state: State, worker: int, group: int, me: Worker) -> Program[State]:
    """A member has the mean of its group: once all have it, all take it."""
    members = _members(state, group)
    if worker not in members:  # that group was dropped
        return state
    has = {**state["has"], str(worker): True}
    if not all(has[str(each)] for each in members):
        return {**state, "has": has}
    yield from _say(members, _TAKEN, (group,), me)
    none, ready = dict.fromkeys(map(str, members), 0), dict.fromkeys(map(str, members), False)
    return {
        **state,
        "came": {**state["came"], **none},
        "in": {**state["in"], **none},
        "has": {**has, **ready},
        "new": {**state["new"], **ready},
    }


def _lost(state: State, worker: int, me: Worker) -> Program[State]:
    """A worker is gone: the group that it was in is dropped, whose others wait as before."""
    name, group = str(worker), state["in"][str(worker)]
    if state["came"][name]:  # it may be there all the same
        yield from _say([worker], _GONE, (group,), me)
    after = {
        **state,
        "came": {**state["came"], name: 0},
        "present": {**state["present"], name: False},
    }
    if not group:
        return after
    members = _members(state, group)
    yield from _say([each for each in members if each != worker], _DROPPED, (group,), me)
    none = dict.fromkeys(map(str, members), 0)
    has = {**state["has"], **dict.fromkeys(none, False)}
    return {**after, "in": {**state["in"], **none}, "has": has}


def _members(state: State, group: int) -> list[int]:
    return [int(name) for name, each in state["in"].items() if each == group]


def _say(workers: Sequence[int], what: int, more: Sequence[float], me: Worker) -> Program[None]:
    """Tell workers of a group."""
    numbers = (what, *more, *[_ABSENT] * (_N_TOLD - 1 + me.n - len(more)))
    for worker in workers:
        yield Send(to=worker, message=Message(packets=(heading(numbers),)))


def _apart(program: Program[_T], group: int, controller: int) -> Program[_T | None]:
    """Plays what members of a group do; None once the controller has something else to say."""
    answer: Received | None = None
    while True:
        try:
            effect = program.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        if isinstance(effect, Recv):
            answer = yield replace(effect, tag=group, unless=controller)
            if answer is None:
                program.close()
                return None
        else:
            assert isinstance(effect, Send), f"{effect} is none of a ring"
            answer = yield replace(effect, tag=group)


def _closed(state: State, members: Sequence[int]) -> State:
    """A group is on its way: its parts are one; once all who are there are one, all begins anew."""
    part = state["part"]
    joined = {part[str(worker)] for worker in members}
    part = {name: min(joined) if each in joined else each for name, each in part.items()}
    after = {
        **state,
        "in": {**state["in"], **dict.fromkeys(map(str, members), state["formed"] + 1)},
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
