"""Asynchronous SGD: every push is a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..effects import Split, settled
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
    where synchronous ones take one.

    Source: Agarwal and Duchi 2011, "Distributed Delayed Stochastic Optimization"; Recht et al.
    2011; with a server Dean et al. 2012.

    Attributes:
        servers: How many servers there are.
    """

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Split[State]:
        """A step of the rule."""
        (found,) = push.vectors
        params = state["params"]
        layout = me.layout.pieces(self.servers)[me.rank - me.n]
        delta, rule = yield from settled(
            algorithm.rule.update(found, state["rule"], params, lr=lr, layout=layout)
        )
        return {"params": params + delta, "rule": rule}
