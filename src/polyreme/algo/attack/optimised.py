"""As far as the aggregator lets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ..effects import Split
from ..norm import length
from ..vector import mean
from .alie import spread
from .kind import Aim, AttackKind, Made, State

if TYPE_CHECKING:
    import torch


class Optimised(AttackKind, frozen=True, kw_only=True, tag="Optimised", tag_field="kind"):
    """Hostile workers send mean + gamma times a direction, at the gamma that does the most harm.

    The direction is minus the honest workers' standard deviation ("deviation", as in ALIE) or minus
    their mean ("mean", as in InnerProduct). gamma is searched on a line: it is doubled from 1 while
    the run's own aggregate goes farther from the honest mean, then tried on both sides of the best
    at distances that halve. Each try makes one aggregate more in every step.

    Source: Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine: Optimizing Model Poisoning
    Attacks and Defenses for Federated Learning" (attacks that know the aggregator).
    Differs: what is maximised is the aggregate's distance from the honest mean, whether or not the
    hostile vectors are selected.

    Attributes:
        workers: Who is hostile, counted from 0.
        direction: Which way.
        tries: Aggregates that are made to find gamma.
    """

    sees: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    direction: Literal["deviation", "mean"] = "deviation"
    tries: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16

    def made(self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim) -> Split[Made]:
        """The vector of the best gamma; of those as good, the first that was tried."""
        if self.direction == "deviation":
            middle, away = spread(honest)
        else:
            middle = away = mean(honest.values())
        best, harm, gamma, left = 0.0, -1.0, 1.0, self.tries
        while left:
            left -= 1
            found = yield from _harm(aim, middle, away, gamma)
            if not found > harm:
                break
            best, harm, gamma = gamma, found, 2 * gamma
        step = best / 2
        while left > 0:
            for gamma in (best + step, best - step)[:left]:
                found = yield from _harm(aim, middle, away, gamma)
                if found > harm:
                    best, harm = gamma, found
            left, step = left - 2, step / 2
        return middle - away * best, state


def _harm(aim: Aim, middle: torch.Tensor, away: torch.Tensor, gamma: float) -> Split[float]:
    """How far from the honest mean the aggregate goes."""
    out = yield from aim.aggregate(middle - away * gamma)
    return (yield from length(out - middle))
