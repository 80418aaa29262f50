"""What served syncs with momentum of their own have: plain SGD with it, at the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import Violation
from ..legal import tag
from ..rule.kind import Beta
from .served import Served

if TYPE_CHECKING:
    from ..compose import DataParallel


class ServedMomentum(Served, frozen=True, kw_only=True):
    """The momentum is the sync's: the rule is SGD, which gives rate and weight decay.

    Decay is in the gradient, at the parameters that a worker computed it at.

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
        momentum: Share of the momentum that is kept.
    """

    owns_momentum: ClassVar[bool] = True
    momentum: Beta = 0.9

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """Momentum in one place, and decay as that of a penalty."""
        found, name = [], type(self).__name__
        if algorithm.feedback.owns_momentum:
            found.append(
                Violation(
                    path="data_parallel.feedback.kind",
                    value=tag(algorithm.feedback),
                    rule=f"keeps momentum, and so does data_parallel.sync {name}",
                    legal='"None", "ErrorFeedback"',
                )
            )
        if getattr(algorithm.rule, "decoupled", False):
            rule = f"is decay of the rule's own step, and the step is that of {name}"
            path = "data_parallel.rule.decoupled"
            found.append(Violation(path=path, value=True, rule=rule, legal="false"))
        return found


def group(version: int, n: int) -> int:
    """The group of gradients that one at a version is of: 0 alone, then n each. Source: OrMo."""
    return -(-version // n)
