"""Asynchronous SGD: every push is a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..effects import Split
from ..push import Push
from .kind import State
from .served import Served

if TYPE_CHECKING:
    from ..compose import DataParallel
    from ..worker import Worker


class ASGD(Served, frozen=True, kw_only=True, tag="ASGD", tag_field="kind"):
    """Each gradient is a step of the rule, as it comes, whatever its age.

    With momentum in the rule this is asynchronous momentum SGD as it is usually done ("naive"):
    momentum mixes gradients in the order in which they come. K workers take K steps of the rule
    where synchronous ones take one. A rule may have a rate of its own for each delay.

    Source: Agarwal and Duchi 2011, "Distributed Delayed Stochastic Optimization"; Recht et al.
    2011; with a server Dean et al. 2012.

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
    """

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Split[State]:
        """A step of the rule."""
        (found,) = push.vectors
        rate = algorithm.rule.at_delay(lr, state["version"] - push.version, me.n)
        return self.ruled(algorithm, state, found, rate, me)
