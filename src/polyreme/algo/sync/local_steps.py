"""Local steps between exchanges of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import exchange
from ..effects import Agree, Numbers, Program, Record, settled
from ..feedback.kind import Turn
from ..rule.sgd import SGD
from .kind import State, SyncKind, gradient, moved

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..rule import Rule
    from ..worker import Worker

_Count = Annotated[int, msgspec.Meta(ge=1)]


class LocalSteps(SyncKind, frozen=True, kw_only=True, tag="LocalSteps", tag_field="kind"):
    """Every worker takes steps of its own; then the mean of their ways is gone by all.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; post-local
    SGD: Lin et al. 2020, section 3. What is exchanged is the way since the last exchange, as a
    gradient at rate 1, so that compression and feedback apply to it.

    Attributes:
        every: Steps between exchanges.
        after: Steps at the start with an exchange after each (post-local SGD).
        keep_momentum: Whether the rule's state is kept over an exchange, or starts anew.
    """

    every: _Count = 8
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    keep_momentum: bool = True

    @property
    def outer(self) -> Rule:
        """What the mean way is given to, as a gradient."""
        return SGD(lr=1.0)

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Parameters, the rule's states and that of exchanges."""
        return {
            "params": params,
            "rule": algorithm.rule.init(params),
            "outer": self.outer.init(params),
            "exchange": exchange.init(algorithm, params, me),
            "step": 0,
            "round": 0,
        }

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Local steps, the exchange of their sum, a common step."""
        start, step = state["params"], state["step"]
        params, rule = start, state["rule"]
        n_steps = 1 if step < self.after else self.every
        came: list[Numbers] = []
        for number in range(step, step + n_steps):
            own = yield from gradient(algorithm, params, number, me)
            came.append(own.numbers)
            if own.is_finite:
                params, rule, _ = yield from moved(
                    algorithm, params, own.gradient, rule, me.lr(number), me
                )
        for number, seen in enumerate((yield Agree(batches=tuple(came))), start=step):
            yield Record(step=number + 1, seen=seen, lr=me.lr(number))
        turn = Turn(step=state["round"], lr=1.0)
        topology, way = algorithm.topology, start - params
        if topology.exact:
            way, exchanged = yield from exchange.combined(
                algorithm, way, state["exchange"], me, turn
            )
        else:
            way, exchanged = exchange.own(algorithm, way, state["exchange"], turn)
        delta, outer = yield from settled(
            self.outer.update(way, state["outer"], start, lr=self.outer.lr, layout=me.layout)
        )
        params = start + delta
        if not topology.exact:
            params, mixed = yield from topology.mix(
                params, exchanged["topology"], me, turn, algorithm
            )
            exchanged = {**exchanged, "topology": mixed}
        return {
            "params": params,
            "rule": rule if self.keep_momentum else algorithm.rule.init(start),
            "outer": outer,
            "exchange": exchanged,
            "step": step + n_steps,
            "round": state["round"] + 1,
        }


class DiLoCo(LocalSteps, frozen=True, kw_only=True, tag="DiLoCo", tag_field="kind"):
    """Many local steps, then a Nesterov step along their mean.

    Source: Douillard et al. 2023, "DiLoCo", algorithm 1 (with AdamW as the rule).

    Attributes:
        every: Steps between exchanges.
        after: Steps at the start with an exchange after each.
        keep_momentum: Whether the rule's state is kept over an exchange, or starts anew.
        outer_lr: Rate of the common step.
        outer_momentum: Momentum of the common step.
    """

    every: _Count = 500
    outer_lr: Annotated[float, msgspec.Meta(gt=0)] = 0.7
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9

    @property
    def outer(self) -> Rule:
        """Nesterov's momentum."""
        momentum = self.outer_momentum
        return SGD(lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)
