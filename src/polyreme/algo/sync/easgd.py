"""EASGD: workers' models and a centre pull each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Program
from ..push import HELLO, LEFT, Push
from . import way
from .coming_alone import undressed
from .kind import State
from .served import Served
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class EASGD(Served, frozen=True, kw_only=True, tag="EASGD", tag_field="kind"):
    """Asynchronous elastic averaging: each worker has a model, and meets the centre now and then.

    Every `local_steps` steps of the rule a worker x and the centre c pull each other: x loses
    alpha (x - c) and c gains it, and the step goes along the gradient at x before. Each worker has
    a rule's state of its own. A step whose gradient is not finite is skipped, and so is the pull.
    A rule with Nesterov's momentum makes this EAMSGD. The model is the centre. A server keeps what
    each worker was sent last, a vector for each.

    Source: Zhang, Choromanska and LeCun 2015, "Deep learning with Elastic Averaging SGD",
    algorithms 1 and 2.
    Differs: clocks count from 1, which leaves out a first pull of equal models; in EAMSGD what
    momentum looks ahead to is what is pulled, as torch writes Nesterov's.

    Attributes:
        servers: How many servers there are.
        ahead: 0, as it pulls a model as it is.
        alpha: Share of the difference that both move (unset: 0.9 over the number of workers).
        local_steps: Steps between two pulls of a worker.
    """

    not_ahead: ClassVar[str] = "pulls a model as it is"
    whole_answers: ClassVar[str] = "sends what a model loses, which the centre gains"
    steps_at_worker: ClassVar[bool] = True
    promise: ClassVar[str] = "nobody waits for another; what a worker loses the centre gains"
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    local_steps: Annotated[int, msgspec.Meta(ge=1)] = 4

    @property
    def per_push(self) -> int:
        """The local steps."""
        return self.local_steps

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """A model is pushed as it is."""
        return undressed("EASGD", "pushes a model, not a change of it", algorithm)

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """What each was sent last."""
        return {"sent": {str(worker): piece.clone() for worker in range(me.n)}}

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """Local steps, and the model before the last of them."""
        params, rule, lr = state["params"], state["rule"], self.rate(state, me)
        pushed, rows = params, []
        for batch in range(state["step"], state["step"] + self.local_steps):
            pushed = params
            params, rule, numbers = yield from way.stepped(
                algorithm, params, rule, state["exchange"]["0"], batch, lr, me
            )
            rows.append(numbers)
        changed = {"params": params, "rule": rule}
        return Work(vectors=(pushed,), rows=tuple(rows), changed=changed)

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """The centre for one that comes; no pull, unless the push counts."""
        if push.number == LEFT:  # one that was not gone is to lose what it was told to
            return {}
        centre = state["params"]
        sent = centre if push.number == HELLO else centre.new_zeros(centre.shape)
        return {"sent": {**state["sent"], str(push.worker): sent}}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """The pull."""
        (model,) = push.vectors
        alpha = 0.9 / me.n if self.alpha is None else self.alpha
        pull = alpha * (model - state["params"])
        sent = {**state["sent"], str(push.worker): pull}
        return {"params": state["params"] + pull, "sent": sent}

    def answer(self, state: State, worker: int, me: Worker) -> torch.Tensor:
        """What its model loses, or the centre to begin with."""
        sent: torch.Tensor = state["sent"][str(worker)]
        return sent

    def joined(self, state: State, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """The model less the pull."""
        return came if state["new"] else own - came
