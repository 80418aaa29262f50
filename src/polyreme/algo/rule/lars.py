"""Steps scaled, tensor by tensor, to the length of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kind import Beta, Positive, RuleKind, State
from .moments import Moments

if TYPE_CHECKING:
    import torch

    from ..effects import Split
    from ..vector import Layout


class LARS(RuleKind, frozen=True, kw_only=True, tag="LARS", tag_field="kind"):
    """Momentum SGD with a rate of its own for every tensor.

    Weight decay is coupled. Where weights or gradient of a tensor are zero its ratio is 1.

    Source: You et al. 2017, algorithm 1.
    Differs: the ratio is over the length of gradient and decay together, as in optax, not over the
    sum of their lengths.

    Attributes:
        lr: Learning rate, before the schedule.
        momentum: Share of the last update that is kept.
        nesterov: Whether the step is taken as if one momentum step ahead.
        trust: Length of a step as a share of the weights' length, at lr 1.
        weight_decay: Added to the gradient, times the weights.
    """

    momentum: Beta = 0.9
    nesterov: bool = False
    trust: Positive = 1e-3

    @property
    def keeps_momentum(self) -> bool:
        """Unless its share is 0."""
        return self.momentum > 0

    @property
    def vectors(self) -> tuple[str, ...]:
        """Momentum, with the rates inside."""
        return ("momentum_buffer",)

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> Split[tuple[torch.Tensor, State]]:
        """Momentum of lr trust |w| / |g| g; a step along it."""
        from ..norm import trusted

        gradient = self._coupled(gradient, params)
        step = lr * (yield from trusted(gradient, params, layout, self.trust))
        kept = state["momentum_buffer"] * self.momentum + step
        direction = step + self.momentum * kept if self.nesterov else kept
        return -direction, {"momentum_buffer": kept}


class LAMB(Moments, frozen=True, kw_only=True, tag="LAMB", tag_field="kind"):
    """Adam with steps as long as each tensor's weights. Source: You et al. 2020, algorithm 2.

    The trust ratio is of Adam's step (bias taken out) and the decay together; where either it or
    the weights are zero the ratio is 1.

    Attributes:
        lr: Learning rate, before the schedule.
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Share of the weights in the step, before it is scaled.
    """

    lr: Positive = 1e-3
    eps: Positive = 1e-6

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> Split[tuple[torch.Tensor, State]]:
        """Adam's step, scaled."""
        from ..norm import trusted

        direction, state = self._direction(gradient, state)
        direction = yield from trusted(self._coupled(direction, params), params, layout, 1.0)
        return -lr * direction, state
