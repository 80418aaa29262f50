"""OrLoMo: local steps with momentum, whose momentum is put in order at the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..effects import Program
from ..push import Push
from .kind import State
from .momentum import ServedMomentum, group
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class OrLoMo(ServedMomentum, frozen=True, kw_only=True, tag="OrLoMo", tag_field="kind"):
    """Workers take local steps with momentum and push what these added to way and momentum.

    A worker begins with the server's momentum, so that with one worker this is momentum SGD. What
    it pushes is its way and its momentum, less those that the server's momentum alone would have
    come to: the server takes that part itself when a group begins. It puts pushes in order by the
    version that they began at, as OrMo does gradients: one that is j groups late counts beta^(S j)
    in the momentum, and parameters take the steps that it missed. A push counts 1 / K, or 1 / delay
    where it is later than 2 K.

    Source: Shi et al. 2026, "Ordered Local Momentum for Asynchronous Distributed Learning"
    (aggregation derived from its statement: with one local step it is OrMo).

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
        momentum: Share of the momentum that is kept over a local step.
        local_steps: Steps of a worker between two pushes.
    """

    n_pushed: ClassVar[int] = 2
    beside: ClassVar[tuple[str, ...]] = ("momentum",)
    local_steps: Annotated[int, msgspec.Meta(ge=1)] = 8

    @property
    def per_push(self) -> int:
        """The local steps."""
        return self.local_steps

    def own(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """The momentum that it begins with."""
        return {"momentum": params.new_zeros(params.shape)}

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Momentum."""
        return {"momentum": piece.new_zeros(piece.shape)}

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """Local steps: what they added to the momentum and to the way."""
        start, begun, lr = state["params"], state["momentum"], self.rate(state, me)
        at, momentum, rows = start, begun, []
        for batch in range(state["step"], state["step"] + self.local_steps):
            found, numbers = yield from self.found(algorithm, at, batch, me)
            rows.append(numbers)
            momentum = self.momentum * momentum + lr * found
            at = at - momentum
        added = momentum - self.momentum**self.local_steps * begun
        way = start - at - _rest(self.momentum, self.local_steps) * begun
        return Work(vectors=(added, way), rows=tuple(rows), changed={})

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A group's turn if it is time, then the way and its momentum in their place."""
        beta, n_steps, version = self.momentum, self.local_steps, state["version"]
        params, momentum = state["params"], state["momentum"]
        now = group(version, me.n)
        if version and now > group(version - 1, me.n):
            params = params - _rest(beta, n_steps) * momentum
            momentum = beta**n_steps * momentum
        own, way = push.vectors
        missed, delay = n_steps * (now - group(push.version, me.n)), version - push.version
        share = 1 / me.n if delay <= 2 * me.n else 1 / delay
        return {
            "params": params - share * (way + _rest(beta, missed) * own),
            "momentum": momentum + share * beta**missed * own,
        }


def _rest(beta: float, n_steps: int) -> float:
    """What a momentum moves parameters in so many steps after: beta + beta^2 + ..."""
    return beta * (1 - beta**n_steps) / (1 - beta)
