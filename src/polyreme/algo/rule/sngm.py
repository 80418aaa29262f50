"""Stochastic normalised gradient descent, with and without momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kind import Beta, RuleKind, State

if TYPE_CHECKING:
    import torch

    from ..effects import Split
    from ..vector import Layout


class SNGM(RuleKind, frozen=True, kw_only=True, tag="SNGM", tag_field="kind"):
    """SGD on gradients of length 1, with momentum, for large batches.

    Source: Zhao, Xie and Li 2020, "Stochastic Normalized Gradient Descent with Momentum for
    Large-Batch Training", algorithm 1. The norm is one over all parameters; weight decay is
    coupled and inside it. A gradient that is exactly zero adds nothing.

    Attributes:
        lr: Learning rate, before the schedule; no step is longer than lr / (1 - momentum).
        momentum: Share of the last update that is kept.
        weight_decay: Added to the gradient before it is normalised, times the weights.
    """

    momentum: Beta = 0.9

    @property
    def coupled_decay(self) -> float:
        """That of a penalty."""
        return self.weight_decay

    @property
    def vectors(self) -> tuple[str, ...]:
        """Momentum, if there is any."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> Split[tuple[torch.Tensor, State]]:
        """A step along m = beta m + g / |g|."""
        from ..norm import normalised

        direction = yield from normalised(self._coupled(gradient, params))
        if self.momentum:
            direction = state["momentum_buffer"] * self.momentum + direction
            state = {"momentum_buffer": direction}
        return -lr * direction, state


class SNGD(SNGM, frozen=True, kw_only=True, tag="SNGD", tag_field="kind"):
    """SGD on gradients of length 1. Source: Hazan, Levy and Shalev-Shwartz 2015, algorithm 1.

    Attributes:
        lr: Learning rate, before the schedule: the length of every step.
        momentum: Share of the last update that is kept; with any this is SNGM.
        weight_decay: Added to the gradient before it is normalised, times the weights.
    """

    momentum: Beta = 0.0
