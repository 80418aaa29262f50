"""Delayed block proximal gradient: blocks of features in turn, with a bounded delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Local, Numbers, Program
from ..legal import tag
from ..push import HELLO, LEFT, Form, Push
from ..vector import Layout, all_finite, span
from .coming_alone import undressed
from .kind import State
from .served import Served
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..packet import Message
    from ..worker import Worker


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Entries in `n` blocks as equal as can be, which cut none of the groups of `unit` entries."""

    n_entries: int
    n: int
    unit: int

    def of(self, iteration: int) -> tuple[int, int]:
        """Where the block of an iteration starts and stops."""
        n_units = -(-self.n_entries // self.unit)
        n = max(1, min(self.n, n_units))
        start, stop = span(n_units, n, iteration % n)
        return start * self.unit, min(stop * self.unit, self.n_entries)

    @property
    def layout(self) -> Layout:
        """Of a vector that holds any of them."""
        spans = (self.of(at) for at in range(self.n))
        return Layout.of({"block": (max(stop - start for start, stop in spans),)})


@dataclass(frozen=True, kw_only=True)
class BlockForm(Form):
    """Pushes of one block."""

    n_blocks: int
    unit: int

    def layout(self, me: Worker) -> Layout:
        """Of a block."""
        key = ("block", self.n_blocks, self.unit)
        blocks = Blocks(n_entries=me.layout.n_entries, n=self.n_blocks, unit=self.unit)
        return me.layout.once(key, lambda: blocks.layout)


class DelayedBlockProximal(
    Served, frozen=True, kw_only=True, tag="DelayedBlockProximal", tag_field="kind"
):
    """Proximal gradient steps on one block after another, each of all workers' gradients.

    In iteration t workers push the gradient of block t mod `blocks` over all samples of their own,
    and bounds u of its curvature (for a model that is not linear: of a batch, without bounds). Once
    all that are present have, the server takes w <- prox(w - eta g / u) on the block, with the
    penalty of the rule, at the rule's rate where u is 0, and answers. A worker begins an iteration
    when all are done but the last `ahead`. One that is gone is not waited for, nor in the sum. An
    iteration with a gradient that is not finite changes nothing.

    Source: Li, Andersen, Smola and Yu 2014, "Communication Efficient Distributed Machine Learning
    with the Parameter Server", algorithm 3.
    Differs: blocks go round; nothing is filtered; u_j is sum_i h |x_ij| sum_k |x_ik| over k of the
    block, with h the largest second derivative of the loss, of which the step is safe without
    delay; a group has the largest of its u_j.

    Attributes:
        servers: 1, so that all blocks are of the same iterations.
        ahead: The delay: iterations that may not be done when one begins.
        blocks: Blocks of features; unless given, ahead + 1.
        eta: Share of the step that u allows; unless given, 1 / (ahead + 1).
    """

    one_server: ClassVar[str] = "cuts blocks, of which a server has iterations of its own"
    n_pushed: ClassVar[int] = 2
    settles: ClassVar[bool] = True
    decays_at_worker: ClassVar[bool] = True
    by_version: ClassVar[bool] = True
    promise: ClassVar[str] = "no gradient lacks more than the last `ahead` iterations"

    blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    eta: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """Steps are its own: of the rule there are rate and penalty."""
        rule: Any = algorithm.rule
        found = undressed("DelayedBlockProximal", "sends blocks of them", algorithm)
        plain = type(rule).__name__ == "SGD" and not rule.keeps_momentum and not rule.decoupled
        if not (plain or rule.settles):
            path, name = "data_parallel.rule.kind", tag(rule)
            why = "has a step of its own, and DelayedBlockProximal takes proximal gradient steps"
            legal = '"ProximalSGD", "SGD" (without momentum, not decoupled)'
            found.append(Violation(path=path, value=name, rule=why, legal=legal))
        return found

    @property
    def n_blocks(self) -> int:
        """As many as are given, or as may be under way."""
        return self.blocks or self.ahead + 1

    def cut(self, algorithm: DataParallel, me: Worker) -> Blocks:
        """The blocks of a model."""
        return Blocks(n_entries=me.layout.n_entries, n=self.n_blocks, unit=_unit(algorithm))

    def form(self, algorithm: DataParallel) -> Form:
        """Pushes of one block each."""
        return BlockForm(
            algorithm=algorithm,
            servers=1,
            n_vectors=self.n_pushed,
            n_batches=1,
            n_blocks=self.n_blocks,
            unit=_unit(algorithm),
        )

    # At workers ---------------------------------------------------------------------------------

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """Gradient and curvature, summed over samples, of the block that is next."""
        params = state["params"]
        blocks = self.cut(algorithm, me)
        start, stop = blocks.of(state["pushes"])
        task, bounds = me.task, None
        if task is None:
            found, row = yield from self.found(algorithm, params, state["step"], me)
            gradient = found[start:stop] * row.weight
        else:
            here = yield Local(work=partial(task.at, params), batches=task.batches(task.n_own))
            n, l2 = float(task.n_own), task.l2 + algorithm.rule.coupled_decay
            gradient = here.gradient[start:stop] + n * l2 * params[start:stop]
            bounds = task.bounds(start, stop) + n * l2
            finite = float(all_finite(gradient) and abs(here.loss) < float("inf"))
            row = Numbers(here.loss / max(1.0, n), n, finite, n)
        vectors = params.new_zeros(2, blocks.layout.n_entries)
        vectors[0, : stop - start] = gradient
        if bounds is not None:
            vectors[1, : stop - start] = bounds
        return Work(vectors=tuple(vectors), rows=(row,), changed={})

    def pulled(
        self, algorithm: DataParallel, state: State, server: str, message: Message, me: Worker
    ) -> State:
        """Its own pushes are counted as iterations: a version says which of them are done."""
        after = super().pulled(algorithm, state, server, message, me)
        version = after["versions"][server]
        pushes = version if state["new"] else max(state["pushes"], version)
        return {**after, "pushes": pushes, "awaits": {server: pushes - version}, "new": False}

    # At the server ------------------------------------------------------------------------------

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Sums of iterations that are not done, and the next iteration of each worker."""
        n_entries = self.cut(algorithm, me).layout.n_entries
        workers, slots = list(map(str, range(me.n))), list(map(str, range(self.ahead + 1)))
        return {
            "sums": {slot: piece.new_zeros(2, n_entries) for slot in slots},
            "weights": dict.fromkeys(slots, 0.0),
            "spoilt": dict.fromkeys(slots, False),
            "clocks": dict.fromkeys(workers, 0),
            "waits": dict.fromkeys(workers, False),
            "fresh": False,
            "late": False,
            "closed": False,
            **self.ending(algorithm, piece),
        }

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """Which iteration a worker is at; what came before in an earlier life of it is kept."""
        worker, version = str(push.worker), state["version"]
        clock = max(state["clocks"][worker], version)
        fresh = push.number == clock
        slot, spoilt = self._slot(push.number), state["spoilt"]
        if fresh and not push.counts:
            spoilt = {**spoilt, slot: True}
        return {
            "clocks": {**state["clocks"], worker: clock + fresh},
            "waits": {**state["waits"], worker: push.number != LEFT and clock + fresh > version},
            "spoilt": spoilt,
            "fresh": fresh,
            "late": push.number == HELLO or 0 <= push.number < version,
        }

    def takes(self, state: State, push: Push) -> bool:
        """One of an iteration that lacks it."""
        return bool(state["fresh"])

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A part more of the sums; the version counts iterations."""
        import torch

        slot, (row,) = self._slot(push.number), push.rows
        sums = state["sums"][slot] + torch.stack(push.vectors)
        return {
            "sums": {**state["sums"], slot: sums},
            "weights": {**state["weights"], slot: state["weights"][slot] + row.weight},
            "version": state["version"],
        }

    def met(self, algorithm: DataParallel, state: State, lr: float, me: Worker) -> State:
        """Iterations that all who are present are through with."""
        before, clocks = state["version"], state["clocks"]
        here = [worker for worker, present in state["present"].items() if present]
        while here and all(clocks[worker] > state["version"] for worker in here):
            state = {**state, **self._done(algorithm, state, lr, me)}
        if state["version"] == before:
            return {}
        waits = {w: state["waits"][w] and clock > state["version"] for w, clock in clocks.items()}
        return {**state, "waits": waits, "closed": True}

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """All, of iterations that are done; one that comes, or is late."""
        if state["closed"]:
            return {"closed": False}, [int(w) for w, here in state["present"].items() if here]
        return {}, (push.worker,) if state["late"] else ()

    def _slot(self, iteration: int) -> str:
        return str(iteration % (self.ahead + 1))

    def _done(self, algorithm: DataParallel, state: State, lr: float, me: Worker) -> State:
        """The step of the iteration that is next."""
        slot = self._slot(state["version"])
        sums, weight = state["sums"][slot], state["weights"][slot]
        after = {
            "sums": {**state["sums"], slot: sums.new_zeros(sums.shape)},
            "weights": {**state["weights"], slot: 0.0},
            "spoilt": {**state["spoilt"], slot: False},
            "version": state["version"] + 1,
        }
        if state["spoilt"][slot] or not weight:
            return after
        start, stop = self.cut(algorithm, me).of(state["version"])
        layout = Layout.of({"block": (stop - start,)})
        gradient, curvature = sums[:, : stop - start] / weight
        curvature = _largest(curvature, _unit(algorithm))
        eta = self.eta or 1 / (self.ahead + 1)
        rate = (eta / curvature).where(curvature > 0, lr)
        params, rule = state["params"].clone(), algorithm.rule
        block, ending = params[start:stop] - rate * gradient, state.get("ending", {})
        params[start:stop], ending = rule.settle(block, ending, lr=rate, layout=layout)
        return {**after, "params": params, **({"ending": ending} if rule.settles else {})}


def _unit(algorithm: DataParallel) -> int:
    """Entries that no block may cut."""
    rule: Any = algorithm.rule
    return int(rule.group_size or 1) if rule.ties else 1


def _largest(vector: torch.Tensor, size: int) -> torch.Tensor:
    """The largest of its group, for each entry."""
    import torch

    if size == 1:
        return vector
    rows = torch.nn.functional.pad(vector, (0, -vector.numel() % size)).view(-1, size)
    return rows.amax(1, keepdim=True).expand_as(rows).reshape(-1)[: vector.numel()]
