"""OrMo: momentum over gradients in the order of the parameters that they were computed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ..push import Push
from .kind import State
from .momentum import ServedMomentum, group

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class OrMo(ServedMomentum, frozen=True, kw_only=True, tag="OrMo", tag_field="kind"):
    """Gradients join the momentum as if they had come in order: late ones as old ones.

    Gradients are of groups by the version of their parameters: K at version 0, then K at each
    following K versions. One that is j groups late counts beta^j in the momentum, and parameters
    take the steps that it missed. With one worker this is heavy ball, without momentum ASGD.

    Source: Shi et al. 2024, "Ordered Momentum for Asynchronous SGD", algorithm 2 (the order of
    what happens at a new group is derived: heavy ball with one worker).

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
        momentum: Share of the momentum that is kept over a group of K gradients.
    """

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Momentum."""
        return {"momentum": piece.new_zeros(piece.shape)}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A group's turn if it is time, then the gradient in its place."""
        params, momentum, beta = state["params"], state["momentum"], self.momentum
        version = state["version"]
        now = group(version, me.n)
        if version and now > group(version - 1, me.n):
            params, momentum = params - beta * momentum, beta * momentum
        late = now - group(push.version, me.n)
        (found,) = push.vectors
        step = self.rate_at(lr, version - push.version, me.n) * found
        return {
            "params": params - (1 - beta ** (late + 1)) / (1 - beta) * step,
            "momentum": momentum + beta**late * step,
        }

    def rate_at(self, lr: float, delay: int, n: int) -> float:
        """The rate of a gradient of such a delay."""
        return lr


class OrMoDA(OrMo, frozen=True, kw_only=True, tag="OrMoDA", tag_field="kind"):
    """OrMo with smaller steps for gradients that are later than 2 K.

    Source: Shi et al. 2024, "Ordered Momentum for Asynchronous SGD" (delay-adaptive); Koloskova et
    al. 2022, "Sharper Convergence Guarantees for Asynchronous SGD", for the rule of steps.
    Differs: without a smoothness the rate is lr 2 K / delay, which meets lr at 2 K.

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
        momentum: Share of the momentum that is kept over a group of K gradients.
        smoothness: L of the loss: later gradients have min(lr, 1 / (4 L delay)).
    """

    smoothness: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def rate_at(self, lr: float, delay: int, n: int) -> float:
        """Smaller beyond 2 K."""
        if delay <= 2 * n:
            return lr
        if self.smoothness is None:
            return lr * 2 * n / delay
        return min(lr, 1 / (4 * self.smoothness * delay))
