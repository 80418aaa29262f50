"""What every sync has: the program that each worker plays, round after round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..effects import Program

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

State = dict[str, Any]


class SyncKind(msgspec.Struct, frozen=True, kw_only=True):
    """A sync says when workers compute and when they exchange.

    A round starts from a state and returns the next one: nothing else survives it. Every state has
    ``params`` (the worker's vector) and ``step`` (steps done).
    """

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """State before the first round."""
        raise NotImplementedError

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """One round."""
        raise NotImplementedError
