"""R2SP: pushes are applied in a fixed order of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ..effects import Numbers
from ..push import Push
from .asgd import ASGD
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class R2SP(ASGD, frozen=True, kw_only=True, tag="R2SP", tag_field="kind"):
    """Round-robin synchronous parallel: gradients are applied worker by worker, each in its turn.

    One that comes before its turn is kept at the server, and its worker answered when it is
    applied; so workers are staggered, and each has the same share. The turn of a worker that is
    gone is passed over, and what is kept of it is dropped.

    Source: Chen et al. 2019, "Round-Robin Synchronization: Mitigating Communication Bottlenecks in
    Parameter Servers".
    Differs: gradients wait at the server, which keeps a vector for each worker; times at which
    workers start are not set.

    Attributes:
        servers: 1, so that all parameters take the same turns.
        ahead: 0, as it keeps one push of each worker for its turn.
    """

    not_ahead: ClassVar[str] = "keeps one push of each worker for its turn"
    promise: ClassVar[str] = "gradients are applied in a fixed order of workers"
    one_server: ClassVar[str] = "would wait for each other where workers come and go"

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Whose turn it is, and each worker's push that waits for it."""
        workers = [str(worker) for worker in range(me.n)]
        head = {"number": 0, "version": 0, "lr": 0.0}
        rows = {str(at): dict.fromkeys(Numbers._fields, 0.0) for at in range(self.per_push)}
        return {
            "turn": 0,
            "held": {worker: piece.new_zeros(piece.shape) for worker in workers},
            "heads": {worker: {**head, "rows": rows} for worker in workers},
            "waits": dict.fromkeys(workers, False),
        }

    def due(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[Push]]:
        """Notices at once, pushes as far as turns go."""
        worker, pushes = str(push.worker), [] if push.number >= 0 else [push]
        held, heads = dict(state["held"]), dict(state["heads"])
        waits, turn = {**state["waits"], worker: push.number >= 0}, state["turn"]
        if push.number >= 0:
            (held[worker],), heads[worker] = push.vectors, _head(push)
        n_passed = 0
        while n_passed < me.n:
            at = str(turn)
            if waits[at]:
                pushes.append(_push(turn, heads[at], held[at]))
                waits[at], n_passed = False, -1
            elif state["present"][at]:
                break
            turn, n_passed = (turn + 1) % me.n, n_passed + 1
        return {"turn": turn, "held": held, "heads": heads, "waits": waits}, pushes


def _head(push: Push) -> State:
    """What there is of a push beside its vector; a loss that is not finite is not known."""
    rows = [row if row.finite else row._replace(loss=0.0) for row in push.rows]
    return {
        "number": push.number,
        "version": push.version,
        "lr": push.lr,
        "rows": {str(at): row._asdict() for at, row in enumerate(rows)},
    }


def _push(worker: int, head: State, vector: torch.Tensor) -> Push:
    """The push again."""
    return Push(
        worker=worker,
        number=head["number"],
        version=head["version"],
        lr=head["lr"],
        vectors=(vector,),
        rows=tuple(Numbers(**row) for row in head["rows"].values()),
    )
