"""What every feedback has: what is sent, and what becomes of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    import torch

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One exchange: its number from 0 and the learning rate of its step."""

    step: int
    lr: float


class FeedbackKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A feedback keeps what compression took away, and keeps no state itself.

    `prepare` gives what is compressed, `settle` learns what of it the others see, `receive` turns
    the aggregate of all workers into the gradient that the rule is given. All of them leave their
    arguments as they are.
    """

    owns_momentum: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    """Whether a worker that sends nothing still counts with what is known of it."""
    alone: ClassVar[bool] = True
    """Whether `receive` makes sense of what one worker sent, without state."""

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors of the parameters' size that each worker keeps."""
        return ()

    def init(self, params: torch.Tensor) -> State:
        """State before the first exchange: all zero."""
        return {name: params.new_zeros(params.shape) for name in self.vectors}

    def at(self, params: torch.Tensor, state: State) -> torch.Tensor:
        """Where the gradient is taken."""
        return params

    def sends_all(self, turn: Turn) -> bool:
        """Whether nothing is compressed in this turn; the same on all workers."""
        return False

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """What is compressed and sent, and the next state."""
        return gradient, state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """The state once the others see `sent` where `prepared` was meant.

        `kept` marks the entries that sparse packets named; none, where packets are not sparse.
        """
        return state

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient for the rule from the aggregate of what all sent, and the next state."""
        return combined, state
