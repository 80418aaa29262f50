"""Against the honest mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..vector import mean
from .kind import Aim, AttackKind, State

if TYPE_CHECKING:
    import torch


class InnerProduct(AttackKind, frozen=True, kw_only=True, tag="InnerProduct", tag_field="kind"):
    """Hostile workers send -epsilon times the mean of the honest (inner product manipulation).

    Source: Xie, Koyejo and Gupta 2020, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner
    Product Manipulation".

    Attributes:
        workers: Who is hostile, counted from 0.
        epsilon: Length of what is sent next to the mean.
    """

    sees: ClassVar[bool] = True
    epsilon: Annotated[float, msgspec.Meta(gt=0)] = 0.1

    def made(
        self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim
    ) -> tuple[torch.Tensor, State]:
        """The mean's opposite."""
        return mean(honest.values()) * -self.epsilon, state
