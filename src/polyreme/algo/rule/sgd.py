"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...errors import Violation

if TYPE_CHECKING:
    import torch


class SGD(msgspec.Struct, frozen=True, kw_only=True, tag="SGD", tag_field="kind"):
    """SGD with (Nesterov) momentum and coupled weight decay.

    Source: Robbins and Monro 1951; Polyak 1964; Nesterov 1983; as in torch.optim.SGD.

    Attributes:
        lr: Learning rate, before the schedule.
        momentum: Share of the last update that is kept; 0 keeps none and no state.
        nesterov: Whether the gradient is taken as if one momentum step ahead.
        weight_decay: Added to the gradient, times the weights.
    """

    lr: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def check(self) -> list[Violation]:
        """Nesterov's step is a form of momentum."""
        if not self.nesterov or self.momentum > 0:
            return []
        path = "data_parallel.rule.nesterov"
        legal = "false (or data_parallel.rule.momentum > 0)"
        return [Violation(path=path, value=True, rule="needs momentum, which is 0", legal=legal)]

    @property
    def n_states(self) -> int:
        """Tensors of a parameter's size kept per parameter."""
        return 1 if self.momentum else 0

    @property
    def n_scalars(self) -> int:
        """4-byte scalars kept per parameter tensor."""
        return 0

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The native optimizer over these (local master) parameters."""
        import torch

        return torch.optim.SGD(
            params,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            foreach=True,
        )
