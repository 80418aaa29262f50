"""Local steps whose number falls with the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Seen
from .kind import State
from .local_steps import LocalSteps

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_Count = Annotated[int, msgspec.Meta(ge=1)]


class AdaptivePeriod(LocalSteps, frozen=True, kw_only=True, tag="AdaptivePeriod", tag_field="kind"):
    """Local steps, rarely exchanged at first and ever more often as the loss falls (AdaComm).

    The period of interval l is ceil(sqrt(F_l / F_0) tau_0), where F_l is the mean loss over all
    workers and labels in the last round before it, and F_0 that of the first round.

    Source: Wang and Joshi 2019, "Adaptive Communication Strategies to Achieve the Best
    Error-Runtime Trade-off in Local-Update SGD", section 4.
    Differs: an interval is so many steps, not seconds, so that a run does not depend on its
    clock; the period is never above the first, as a loss that rises would have it. While no loss
    was seen that is above zero the period stays.

    Attributes:
        every: Steps between exchanges at first (tau_0).
        after: Steps at the start with an exchange after each.
        keep_momentum: Whether the rule's state is kept over an exchange, or starts anew.
        interval: Steps after which the period is chosen anew, at the end of a round.
        stuck: Factor on the period where the loss alone would not lower it; 1 leaves it to the
            loss (the paper proposes 1/2).
    """

    interval: _Count = 100
    stuck: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """As for local steps; the first period, and no loss yet (infinity)."""
        return {
            **super().init(algorithm, params, me),
            "period": self.every,
            "first_loss": math.inf,
        }

    def period(self, state: State) -> int:
        """That of the interval."""
        period: int = state["period"]
        return 1 if state["step"] < self.after else period

    def heard(self, state: State, seens: Sequence[Seen]) -> State:
        """The first loss; at the end of an interval, the next period."""
        loss = _mean_loss(seens)
        if loss is None:
            return {}
        first = loss if math.isinf(state["first_loss"]) else state["first_loss"]
        step, period = state["step"], state["period"]
        if (step + len(seens)) // self.interval > step // self.interval and first > 0:
            wanted = math.ceil(math.sqrt(max(loss, 0.0) / first) * self.every)
            if wanted >= period:
                wanted = math.ceil(self.stuck * period) if self.stuck < 1 else wanted
            period = min(max(1, wanted), self.every)
        return {"first_loss": first, "period": period}


def _mean_loss(seens: Sequence[Seen]) -> float | None:
    """Over all labels whose loss and gradient are finite."""
    rows = [row for seen in seens for row in seen.rows if row.finite and row.weight]
    if not rows:
        return None
    return sum(row.loss * row.weight for row in rows) / sum(row.weight for row in rows)
