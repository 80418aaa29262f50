"""What every topology has: with whom a worker exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ...errors import undefined
from ..effects import Combine, Program, Split
from ..packet import Message, total
from .cost import Cost

if TYPE_CHECKING:
    import torch

    from ...errors import Violation
    from ..compose import DataParallel
    from ..draw import Draw
    from ..feedback.kind import Turn
    from ..worker import Worker

State = dict[str, Any]
Aggregating = Callable[[Sequence[Message]], "Split[tuple[torch.Tensor, Any]]"]
"""The aggregate of messages in order of workers, as one vector, and the aggregator's next state."""


class TopologyKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A topology says who sends to whom so that workers have a function of what all have.

    One that is not `exact` mixes models of neighbours instead (gossip): its `mix` takes the place
    of `combine` and `sum`.
    """

    exact: ClassVar[bool] = True
    """Whether all workers end with the same."""
    at_servers: ClassVar[bool] = False
    """Whether aggregates are made at servers (`serve`), so that only they travel back."""

    @property
    def compresses_back(self) -> bool:
        """Whether aggregates of servers travel compressed."""
        return False

    def refused(self, n: int, algorithm: DataParallel) -> list[Violation]:
        """What forbids this topology for so many workers."""
        return []

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """State before the first exchange."""
        return {}

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """The function of the messages of all workers, in their order; the same on all."""
        return (yield Combine(message=message, function=function))

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """The sum of messages whose packets add, buffer by buffer; the same bits on all workers.

        The order of summation is fixed by topology and number of workers; here it is theirs.
        """
        summed: Message = yield from self.combine(message, total, me)
        return summed

    def serve(
        self, message: Message, function: Aggregating, state: State, me: Worker, draw: Draw | None
    ) -> Program[tuple[list[torch.Tensor], Any, State]]:
        """The aggregate of each packet, the aggregator's next state and one's own; of servers.

        `function` is given packets alike of all workers, as `combine` is. `draw` is for packets
        of the way back; without one they are dense.
        """
        raise undefined(self, "serve")

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """What `sum` of messages of so many bytes costs, or, unless they add, `combine`.

        Bytes of `sum` are those of messages that divide evenly among workers; chunks that differ
        by an entry add less than an entry a message, and chunks of no entries are not sent.
        """
        raise undefined(self, "cost")

    def mix(
        self, x: torch.Tensor, state: State, me: Worker, turn: Turn, algorithm: DataParallel
    ) -> Program[tuple[torch.Tensor, State]]:
        """The model after an exchange with neighbours, and the next state; of gossip alone.

        `x` is the model after this worker's own step (or steps).
        """
        raise undefined(self, "mix")
