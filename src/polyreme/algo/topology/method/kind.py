"""What every gossip method has: what a worker's model becomes of its neighbours'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ....errors import undefined
from ...effects import Program

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...feedback.kind import Turn
    from ...worker import Worker
    from ..graph.kind import GraphKind

State = dict[str, Any]


class MethodKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method sends a worker's model, or what neighbours lack of it, and mixes theirs in.

    Keeps no state itself. All workers start from the same model.
    """

    columns_only: ClassVar[bool] = False
    """Whether it is enough that columns of the weights sum to 1 (push-sum)."""

    keeps_copies: ClassVar[bool] = False
    """Whether workers keep copies of all that may ever be neighbours, and hear them each time."""

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """State before the first exchange."""
        return {}

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """The model after the exchange, of the one after the worker's own step; the next state."""
        raise undefined(self, "mix")
