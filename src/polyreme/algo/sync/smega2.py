"""SMEGA2: momentum of cycles of K gradients, and parameters sent as they will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ..push import Push
from .kind import State
from .momentum import ServedMomentum

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class SMEGA2(ServedMomentum, frozen=True, kw_only=True, tag="SMEGA2", tag_field="kind"):
    """Momentum changes once in K gradients, with their mean; workers are sent an estimate.

    A worker is sent where parameters will be K gradients later if only momentum moves them. With
    one worker this is Nesterov's momentum.

    Source: Cohen et al. 2022, "SMEGA2: Distributed Asynchronous Deep Neural Network Training with
    a Single Momentum Buffer", and its published code.
    Differs: weight decay is that of the parameters that a worker was sent, not of the server's.

    Attributes:
        servers: How many servers there are.
        ahead: 0, as it sends parameters as they will be after one push of each worker.
        momentum: Share of the momentum that is kept over a cycle.
        estimate: Whether what came in the unfinished cycle counts ("cycle") or not ("plain").
    """

    not_ahead: ClassVar[str] = "sends parameters as they will be after one push of each worker"
    estimate: Literal["cycle", "plain"] = "cycle"

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Momentum, the sum of the cycle's gradients, how many there are, the last rate."""
        zero = piece.new_zeros(piece.shape)
        return {"momentum": zero, "sum": zero.clone(), "in_cycle": 0, "rate": me.lr(0)}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A step along the gradient and the momentum before it."""
        params, momentum = state["params"], state["momentum"]
        (found,) = push.vectors
        total, at = state["sum"] + found, (state["in_cycle"] + 1) % me.n
        params = params - lr * (found + self.momentum * momentum)
        if at == 0:
            momentum, total = self.momentum * momentum + total / me.n, total.new_zeros(total.shape)
        return {
            "params": params,
            "momentum": momentum,
            "sum": total,
            "in_cycle": at,
            "rate": lr,
        }

    def answer(self, state: State, worker: int, me: Worker) -> torch.Tensor:
        """Parameters K gradients later, as far as momentum says."""
        n, at, beta, lr = me.n, state["in_cycle"], self.momentum, state["rate"]
        ahead: torch.Tensor = state["params"]
        if self.estimate == "plain":
            ahead = ahead - lr * beta * n * state["momentum"]
        else:
            ahead = ahead - lr * beta * (n + at * (beta - 1)) * state["momentum"]
            ahead = ahead - lr * beta * (at / n) * state["sum"]
        return ahead
