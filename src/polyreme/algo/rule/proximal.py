"""Gradient steps that end in a penalty's own step, so that weights come to be exactly 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from .kind import NotNegative, RuleKind, State
from .sgd import SGD

if TYPE_CHECKING:
    import torch

    from ..vector import Layout

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Settling(RuleKind, frozen=True, kw_only=True):
    """A step of SGD, then what `settle` does to the parameters, in which changes do not add up."""

    settles: ClassVar[bool] = True

    @property
    def coupled_decay(self) -> float:
        """That of a penalty."""
        return self.weight_decay

    @property
    def additive(self) -> SGD:
        """The step of SGD."""
        return SGD(lr=self.lr, weight_decay=self.weight_decay)

    @property
    def by_piece(self) -> bool:
        """Unless it ties entries."""
        return not self.ties

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """What both come to."""
        moved = params - lr * self._coupled(gradient, params)
        after, state = self.settle(moved, state, lr=lr, layout=layout)
        return after - params, state  # p + (0 - p) is 0 in any type


class ProximalSGD(Settling, frozen=True, kw_only=True, tag="ProximalSGD", tag_field="kind"):
    """SGD whose step ends in the prox of a penalty that has no gradient at 0: sparse weights.

    w <- prox(w - lr g), prox(v) = argmin_u lr R(u) + |u - v|^2 / 2, with
    R(u) = l1 |u|_1 + group_l1 sum_g |u_g|_2. What of a penalty is smooth is in g. Where servers
    add up changes of workers, workers send the step of SGD and servers take the prox once it is
    added (Li et al. 2014), as means of proxes are none.

    Source: Duchi and Singer 2009, "Efficient Online and Batch Learning Using Forward Backward
    Splitting"; groups: Yuan and Lin 2006; both: Friedman, Hastie and Tibshirani 2010.

    Attributes:
        lr: Learning rate, before the schedule.
        weight_decay: Added to the gradient, times the weights.
        l1: Weight of the sum of absolute weights; unless given, a linear model's, else 0.
        group_l1: Weight of the sum of groups' norms; unless given, a linear model's, else 0.
        group_size: Entries of a group, which follow one another in a tensor (its last may be
            smaller); unless given, a linear model's, else 1.
    """

    penalties: ClassVar[tuple[str, ...]] = ("l1", "group_l1")

    l1: NotNegative | None = None
    group_l1: NotNegative | None = None
    group_size: _Count | None = None

    @property
    def ties(self) -> bool:
        """Groups do."""
        return bool(self.group_l1)

    def of_sum(self, n: int) -> ProximalSGD:
        """So many penalties."""
        return msgspec.structs.replace(
            self, l1=n * (self.l1 or 0.0), group_l1=n * (self.group_l1 or 0.0)
        )

    def of_penalty(self, l1: float, group_l1: float, group_size: int) -> ProximalSGD:
        """Where it has none of its own."""
        return msgspec.structs.replace(
            self,
            l1=l1 if self.l1 is None else self.l1,
            group_l1=group_l1 if self.group_l1 is None else self.group_l1,
            group_size=group_size if self.group_size is None else self.group_size,
        )

    def settle(
        self, params: torch.Tensor, state: State, *, lr: float | torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, State]:
        """The prox: first entries, then groups shrink."""
        if self.l1:
            params = _shrunk(params, lr * self.l1)
        if self.group_l1:
            params = _groups_shrunk(params, lr * self.group_l1, self.group_size or 1, layout)
        return params, state


class TruncatedGradient(
    Settling, frozen=True, kw_only=True, tag="TruncatedGradient", tag_field="kind"
):
    """SGD that pulls small weights to 0 every few steps, and no further: sparse, for streams.

    Every `period` steps each weight of at most `threshold` loses lr period gravity of its size,
    down to 0. With a period of 1 and no threshold this is ProximalSGD with l1 = gravity.

    Source: Langford, Li and Zhang 2009, "Sparse Online Learning via Truncated Gradient",
    equations 4 to 6.

    Attributes:
        lr: Learning rate, before the schedule.
        weight_decay: Added to the gradient, times the weights.
        gravity: Pull of a step; unless given, a linear model's l1, else 0.
        period: Steps from one truncation to the next.
        threshold: Size beyond which weights are left as they are; unless given, none are.
    """

    penalties: ClassVar[tuple[str, ...]] = ("l1",)

    gravity: NotNegative | None = None
    period: _Count = 1
    threshold: NotNegative | None = None

    @property
    def counts(self) -> tuple[str, ...]:
        """Steps, if some have no truncation."""
        return ("step",) if self.period > 1 else ()

    def of_sum(self, n: int) -> TruncatedGradient:
        """So many pulls."""
        return msgspec.structs.replace(self, gravity=n * (self.gravity or 0.0))

    def of_penalty(self, l1: float, group_l1: float, group_size: int) -> TruncatedGradient:
        """Where it has no gravity of its own."""
        return msgspec.structs.replace(self, gravity=l1 if self.gravity is None else self.gravity)

    def settle(
        self, params: torch.Tensor, state: State, *, lr: float | torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, State]:
        """The truncation, if it is due."""
        if self.counts:
            state = {"step": state["step"] + 1}
            if state["step"] % self.period:
                return params, state
        if not self.gravity:
            return params, state
        after = _shrunk(params, lr * self.period * self.gravity)
        if self.threshold is not None:
            after = after.where(params.abs() <= self.threshold, params)
        return after, state


def _shrunk(vector: torch.Tensor, by: float | torch.Tensor) -> torch.Tensor:
    """Each entry nearer to 0 by so much; NaN stays so."""
    bound: Any = by
    return vector - vector.clamp(-bound, bound)


def _groups_shrunk(
    vector: torch.Tensor, by: float | torch.Tensor, size: int, layout: Layout
) -> torch.Tensor:
    """Each group's norm nearer to 0 by so much."""
    import torch

    parts = []
    for each in layout.segments:
        part = vector[each.start : each.stop]
        rows = torch.nn.functional.pad(part, (0, -part.numel() % size)).view(-1, size)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        less = by[each.start : each.stop : size].unsqueeze(1) if torch.is_tensor(by) else by
        kept = (norms - less).clamp(min=0) / norms.where(norms != 0, 1.0)
        parts.append((rows * kept).view(-1)[: part.numel()])
    return torch.cat(parts) if parts else vector
