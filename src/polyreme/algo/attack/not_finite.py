"""Numbers that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .kind import AttackKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class NotFinite(AttackKind, frozen=True, kw_only=True, tag="NotFinite", tag_field="kind"):
    """Hostile workers send NaN or infinity in all entries, and say that what they have is finite.

    A robust aggregate sets such rows aside. With a mean the model is not finite after the first
    step: all later ones are skipped, and the run ends by `train.max_skipped`. Source: no paper.

    Attributes:
        workers: Who is hostile, counted from 0.
        value: What they send.
    """

    value: Literal["nan", "inf", "-inf"] = "nan"

    def sent(self, vector: torch.Tensor, state: State, draw: Draw) -> tuple[torch.Tensor, State]:
        """That value in every entry."""
        return vector.new_full(vector.shape, float(self.value)), state
