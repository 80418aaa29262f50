"""Local steps between exchanges of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Agree, Numbers, Program, Record, Seen
from ..feedback.kind import Turn
from ..rule.sgd import SGD
from . import way
from .kind import State, SyncKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..rule import Rule
    from ..worker import Worker

_Count = Annotated[int, msgspec.Meta(ge=1)]


class LocalSteps(SyncKind, frozen=True, kw_only=True, tag="LocalSteps", tag_field="kind"):
    """Every worker takes steps of its own; then the mean of their ways is gone by all.

    What is exchanged is the way since the last exchange, as a gradient at rate 1, so that
    compression and feedback apply to it. A worker skips a step of its own whose gradient is not
    finite or has no labels; one that took no step of a round does not count in its mean. If the
    way of any is not finite, all throw the round away and go on from its start with new batches,
    unless a robust aggregate bears so many.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; post-local
    SGD: Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", section 3.

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

    @property
    def n_vectors(self) -> int:
        """Those of the common step."""
        return self.outer.n_states

    def period(self, state: State) -> int:
        """Steps of the round that starts now."""
        return 1 if state["step"] < self.after else self.every

    def heard(self, state: State, seens: Sequence[Seen]) -> State:
        """Entries of the state that change by what workers told of a round's steps."""
        return {}

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Parameters, the rule's states and that of exchanges, of which `round` is the number."""
        return {
            **super().init(algorithm, params, me),
            "outer": self.outer.init(params),
            "round": 0,
        }

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Local steps, the exchange of their sum, a common step."""
        start, step = state["params"], state["step"]
        params, rule = start, state["rule"]
        n_steps = self.period(state)
        if me.n_steps is not None:
            n_steps = max(1, min(n_steps, me.n_steps - step))
        came: list[Numbers] = []
        for number in range(step, step + n_steps):
            params, rule, numbers = yield from way.stepped(
                algorithm, params, rule, state["exchange"], number, me.lr(number), me
            )
            came.append(numbers)
        gone = start - params
        *seens, arrived = yield Agree(batches=(*came, way.arrival(gone)))
        arrived = arrived.borne(algorithm.aggregate.bears)
        for number, seen in enumerate(seens, start=step):
            yield Record(step=number + 1, seen=way.marked(seen, arrived), lr=me.lr(number))
        after = {**state, **self.heard(state, seens), "step": step + n_steps}
        weights = way.took_part(seens, arrived)
        if way.lost(arrived) or not any(weights):
            return after
        turn = Turn(step=state["round"], lr=1.0)
        params, outer, exchanged = yield from way.together(
            algorithm, self.outer, start, gone, state, me, turn, weights
        )
        return {
            **after,
            "params": params,
            "rule": rule if self.keep_momentum else algorithm.rule.init(start),
            "outer": outer,
            "exchange": exchanged,
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
