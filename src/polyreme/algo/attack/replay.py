"""What was sent before, once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .kind import AttackKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class Replay(AttackKind, frozen=True, kw_only=True, tag="Replay", tag_field="kind"):
    """Hostile workers send what they had some steps ago, and at first the first that they had.

    Each keeps `steps` vectors of the model's size, or 1. Source: no paper; the replay of messages.

    Attributes:
        workers: Who is hostile, counted from 0.
        steps: How many steps ago; unless given, the first vector for good.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, examples=[10])] | None = None

    def init(self, like: torch.Tensor, n: int) -> State:
        """No vector yet."""
        kept = like.new_zeros((self.steps or 1, *like.shape))
        return {"kept": kept, "n_kept": 0}

    def sent(self, vector: torch.Tensor, state: State, draw: Draw) -> tuple[torch.Tensor, State]:
        """The oldest that is kept; the new one takes its place."""
        kept, n = state["kept"], state["n_kept"]
        size = len(kept)
        if n and self.steps is None:
            return kept[0].clone(), state
        old = vector if not n else kept[n % size if n >= size else 0].clone()
        kept = kept.clone()
        kept[n % size] = vector
        return old, {"kept": kept, "n_kept": n + 1}
