"""What every rule has: a rate, state of the parameters' size, and a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ...errors import undefined

if TYPE_CHECKING:
    import torch

    from ..effects import Split
    from ..vector import Layout

Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

State = dict[str, Any]
"""Tensors and numbers by name: what a checkpoint holds of a rule."""


class RuleKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule turns a gradient into a change of the parameters and keeps no state itself.

    Attributes:
        lr: Learning rate, before the schedule.
        weight_decay: Pull of the weights to zero; where it enters is the rule's.
    """

    settles: ClassVar[bool] = False
    """Whether its step ends in `settle`, so that changes of several workers do not add up."""
    penalties: ClassVar[tuple[str, ...]] = ()
    """A linear model's penalties without a gradient that it takes."""

    lr: Positive = 0.1
    weight_decay: NotNegative = 0.0

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors of the parameters' size that it keeps."""
        return ()

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the numbers that it keeps."""
        return ()

    @property
    def n_states(self) -> int:
        """Tensors of a parameter's size kept per parameter."""
        return len(self.vectors)

    @property
    def n_scalars(self) -> int:
        """4-byte scalars kept per parameter tensor."""
        return len(self.counts)

    def init(self, params: torch.Tensor) -> State:
        """State before the first step: all zero."""
        return {name: params.new_zeros(params.shape) for name in self.vectors} | dict.fromkeys(
            self.counts, 0
        )

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State] | Split[tuple[torch.Tensor, State]]:
        """What is to be added to the parameters, and the next state; arguments stay as they are.

        All three vectors are laid out by `layout`. One that needs a sum over the parts of a split
        replica is a generator of `SumShards`.
        """
        raise undefined(self, "update")

    @property
    def additive(self) -> RuleKind:
        """The rule without `settle`: what it adds to the parameters may be added up."""
        return self

    def settle(
        self, params: torch.Tensor, state: State, *, lr: float | torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, State]:
        """Parameters, and the next state, after what ends a step that added up to rate `lr`.

        That may be one for each entry, alike where entries are tied.
        """
        return params, state

    def of_sum(self, n: int) -> RuleKind:
        """The rule for a gradient that is the sum of n: what it adds of its own counts n times."""
        return self

    def of_penalty(self, l1: float, group_l1: float, group_size: int) -> RuleKind:
        """The rule with a linear model's penalty, where that is left to the model."""
        return self

    def at_delay(self, lr: float, delay: int, n: int) -> float:
        """The rate for a gradient that `delay` pushes of n workers were applied after: as it is.

        Zhang et al. 2016, "Staleness-aware Async-SGD", divide by the delay.
        """
        return lr

    def native(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
        """An optimizer of torch that does the same, to each entry apart, if there is one."""
        return None

    @property
    def by_entry(self) -> bool:
        """Whether the update of an entry needs no gradient but its own."""
        return type(self).native is not RuleKind.native

    @property
    def by_piece(self) -> bool:
        """Whether pieces of a vector may be updated apart."""
        return self.by_entry

    @property
    def ties(self) -> bool:
        """Whether entries that follow one another are tied, so that a tensor must be whole."""
        return False

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The same as an optimizer over parameters that this process holds whole."""
        from ..optimizer import RuleOptimizer

        held = list(params)
        native = self.native(held)
        return RuleOptimizer(held, self) if native is None else native

    @property
    def keeps_momentum(self) -> bool:
        """Whether its steps go along gradients of earlier steps too."""
        return bool(self.vectors)

    @property
    def coupled_decay(self) -> float:
        """Weight decay that is added to the gradient before all else, and so may be at once."""
        return 0.0

    def _coupled(self, gradient: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """The gradient with weight decay as that of a penalty."""
        return gradient.add(params, alpha=self.weight_decay) if self.weight_decay else gradient
