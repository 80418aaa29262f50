"""Steps along the sign of the gradient, or of its running mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kind import Beta, Positive, RuleKind, State

if TYPE_CHECKING:
    import torch

    from ..vector import Layout


class SignSGD(RuleKind, frozen=True, kw_only=True, tag="SignSGD", tag_field="kind"):
    """SGD along signs; the sign of 0 is 0. Source: Bernstein et al. 2018, algorithm 1.

    Attributes:
        lr: Learning rate, before the schedule: the step of every entry.
        weight_decay: Added to the gradient, times the weights.
    """

    lr: Positive = 1e-3

    @property
    def coupled_decay(self) -> float:
        """That of a penalty."""
        return self.weight_decay

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """A step along the sign."""
        return -lr * self._coupled(gradient, params).sign(), state


class Signum(SignSGD, frozen=True, kw_only=True, tag="Signum", tag_field="kind"):
    """SGD along signs of the running mean. Source: Bernstein et al. 2018, algorithm 2.

    Attributes:
        lr: Learning rate, before the schedule: the step of every entry.
        momentum: Decay of the mean.
        weight_decay: Added to the gradient, times the weights.
    """

    momentum: Beta = 0.9

    @property
    def keeps_momentum(self) -> bool:
        """Unless its share is 0."""
        return self.momentum > 0

    @property
    def vectors(self) -> tuple[str, ...]:
        """The mean."""
        return ("momentum_buffer",)

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """A step along the sign of m = beta m + (1 - beta) g."""
        mean = state["momentum_buffer"].lerp(self._coupled(gradient, params), 1 - self.momentum)
        return -lr * mean.sign(), {"momentum_buffer": mean}
