"""What served syncs have whose workers wait until enough of them have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ..push import Push
from .kind import State
from .served import Served

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class Barrier(Served, frozen=True, kw_only=True):
    """Workers that wait are answered together, once `met` closes what they wait for.

    `heard` says who waits. One that does not is answered at once, such as one that comes.

    Attributes:
        servers: 1.
        ahead: 0, as it waits for one push of each worker.
    """

    not_ahead: ClassVar[str] = "waits for one push of each worker"
    one_server: ClassVar[str] = "would wait for different workers, and for each other"

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Who waits, and whether what they wait for was just closed."""
        return {"waits": {str(worker): False for worker in range(me.n)}, "closed": False}

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """All that wait, if it is closed; one that does not wait."""
        waits = state["waits"]
        _, alone = super().answered(state, push, me)
        at_once = [worker for worker in alone if not waits[str(worker)]]
        if not state["closed"]:
            return {}, at_once
        free = [int(worker) for worker, waiting in waits.items() if waiting]
        return {"closed": False, "waits": dict.fromkeys(waits, False)}, free + at_once
