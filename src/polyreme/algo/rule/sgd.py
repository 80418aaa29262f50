"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import Violation
from .kind import Beta, NotNegative, RuleKind, State

if TYPE_CHECKING:
    import torch

    from ..vector import Layout


class SGD(RuleKind, frozen=True, kw_only=True, tag="SGD", tag_field="kind"):
    """SGD with (Nesterov) momentum; weight decay coupled or decoupled.

    Source: Robbins and Monro 1951; Polyak 1964; Nesterov 1983; as in torch.optim.SGD; decoupled:
    Loshchilov and Hutter 2019, algorithm 1.
    Differs: decoupled decay is scaled by the learning rate.

    Attributes:
        lr: Learning rate, before the schedule.
        momentum: Share of the last update that is kept; 0 keeps none and no state.
        nesterov: Whether the gradient is taken as if one momentum step ahead.
        weight_decay: Added to the gradient, times the weights.
        decoupled: Takes the decay off the weights instead, times the learning rate.
    """

    momentum: Beta = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    decoupled: bool = False

    def check(self) -> list[Violation]:
        """Nesterov's step is a form of momentum."""
        if not self.nesterov or self.momentum > 0:
            return []
        path = "data_parallel.rule.nesterov"
        legal = "false (or data_parallel.rule.momentum > 0)"
        return [Violation(path=path, value=True, rule="needs momentum, which is 0", legal=legal)]

    @property
    def coupled_decay(self) -> float:
        """That of a penalty, unless it is decoupled."""
        return 0.0 if self.decoupled else self.weight_decay

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
    ) -> tuple[torch.Tensor, State]:
        """A step along m = beta m + g, or along g + beta m."""
        if not self.decoupled:
            gradient = self._coupled(gradient, params)
        direction = gradient
        if self.momentum:
            kept = state["momentum_buffer"] * self.momentum + gradient
            state = {"momentum_buffer": kept}
            direction = gradient + self.momentum * kept if self.nesterov else kept
        if self.decoupled and self.weight_decay:
            direction = direction + self.weight_decay * params
        return -lr * direction, state

    @property
    def by_entry(self) -> bool:
        """Torch has none whose decay is decoupled."""
        return not self.decoupled

    def native(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
        """That of torch, unless decay is decoupled."""
        import torch

        if self.decoupled:
            return None
        return torch.optim.SGD(
            params,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            foreach=True,
        )
