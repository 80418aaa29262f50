"""The opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .kind import AttackKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class SignFlip(AttackKind, frozen=True, kw_only=True, tag="SignFlip", tag_field="kind"):
    """Hostile workers send the opposite of what they have, times `scale`.

    Source: Li et al. 2019, "RSA: Byzantine-Robust Stochastic Aggregation Methods"; with
    scale 10 the negative gradient attack of Yang and Li 2021, "BASGD".

    Attributes:
        workers: Who is hostile, counted from 0.
        scale: Length of what is sent next to what is meant.
    """

    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def sent(self, vector: torch.Tensor, state: State, draw: Draw) -> tuple[torch.Tensor, State]:
        """-scale times the vector."""
        return vector * -self.scale, state
