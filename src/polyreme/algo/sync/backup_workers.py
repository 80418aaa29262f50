"""Synchronous training that does not wait for the last workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..effects import Split
from ..push import Push
from .barrier import Barrier
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class BackupWorkers(Barrier, frozen=True, kw_only=True, tag="BackupWorkers", tag_field="kind"):
    """A step is made of the first gradients at its parameters; the last ones are dropped.

    The server takes the first n - backups gradients of its version, then a step of the rule along
    their mean over labels, and answers all that wait. One of an older version is answered at once
    and not applied: it is recorded with its delay and a weight of 0, and `dropped` counts it. If
    fewer workers are present, or some gradients do not count, a step is made of those that there
    are. Without backups this is synchronous training.

    Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD", algorithm 2.
    Differs: a worker's gradient is held to a bound on its norm, not their mean; a step of the
    schedule is n pushes, dropped or not.

    Attributes:
        servers: 1, so that all parameters take the same gradients.
        ahead: 0, as it waits for one push of each worker.
        backups: Gradients that a step does not wait for; it takes 1 at the least.
    """

    promise: ClassVar[str] = "all gradients of a step are at its parameters"
    backups: Annotated[int, msgspec.Meta(ge=0)] = 1

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Sum of gradients by labels, those labels, how many were taken, and how many dropped."""
        return {
            **super().kept(algorithm, piece, me),
            "sum": piece.new_zeros(piece.shape),
            "weight": 0.0,
            "taken": 0,
            "dropped": 0,
        }

    def takes(self, state: State, push: Push) -> bool:
        """One of this version."""
        return bool(push.version == state["version"])

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """Who waits from now on, and what is dropped."""
        late = push.number >= 0 and not self.takes(state, push)
        waits = {**state["waits"], str(push.worker): push.number >= 0 and not late}
        return {"waits": waits, "dropped": state["dropped"] + late}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A gradient more of the step; the version is the step's."""
        (found,), (row,) = push.vectors, push.rows
        return {
            "sum": state["sum"] + found * row.weight,
            "weight": state["weight"] + row.weight,
            "taken": state["taken"] + 1,
            "version": state["version"],
        }

    def met(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> State | Split[State]:
        """The step, once there are enough, or none that could be taken is still to come."""
        waits, taken = state["waits"], state["taken"]
        here = [worker for worker, present in state["present"].items() if present]
        all_wait = bool(here) and all(waits[worker] for worker in here)
        if taken < max(1, me.n - self.backups) and not all_wait:
            return {}
        if not taken:
            return {"closed": True}
        return self._stepped(algorithm, state, lr, me)

    def _stepped(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> Split[State]:
        """The rule's step along the mean."""
        found = state["sum"] / state["weight"]
        changed = yield from self.ruled(algorithm, state, found, lr, me)
        return {
            **changed,
            "sum": state["sum"].new_zeros(state["sum"].shape),
            "weight": 0.0,
            "taken": 0,
            "version": state["version"] + 1,
            "closed": True,
        }
