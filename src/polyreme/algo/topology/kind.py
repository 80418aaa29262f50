"""What every topology has: with whom a worker exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from ..effects import Combine, Program
from ..packet import Message


class TopologyKind(msgspec.Struct, frozen=True, kw_only=True):
    """A topology says who sends to whom so that workers have a function of what all have.

    One that is not `exact` mixes models of neighbours instead (gossip).
    """

    exact: ClassVar[bool] = True

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any]
    ) -> Program[Any]:
        """The function of the messages of all workers, in their order; the same on all."""
        return (yield Combine(message=message, function=function))
