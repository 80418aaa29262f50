"""What syncs have in common that see the whole objective of a linear model at every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ...errors import Violation
from ..compress.dense import Dense
from ..effects import Agree, Combine, Local, Numbers, Program, Record, Sum
from ..legal import tag
from ..packet import Like, Message, Packet
from .kind import State, SyncKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..task import Certificate, Here
    from ..worker import Worker

_PARTS = ("topology", "compress", "feedback", "aggregate")


@dataclass(frozen=True, kw_only=True)
class Found:
    """At a model w: the whole sum's mean gradient `z` and certificate, and this worker's part."""

    w: torch.Tensor
    z: torch.Tensor
    n: float
    here: Here
    certificate: Certificate


class FiniteSum(SyncKind, frozen=True, kw_only=True):
    """Rounds that begin with the gradient of all samples, and so with a certificate.

    Subclasses say in `moved` how the next model is found. For linear models; a step is a round.
    """

    finite_sum: ClassVar[bool] = True
    in_step: ClassVar[bool] = False

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """The model, and what the method keeps."""
        return {"params": params, "step": 0, **self.own(params)}

    def own(self, params: torch.Tensor) -> State:
        """What the method keeps from round to round."""
        return {}

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """The next model, and what of the state changes."""
        raise NotImplementedError

    def rate(self, state: State, me: Worker) -> float:
        """The step size that a round had, for the log."""
        return me.lr(state["step"])

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """The whole gradient, then a move."""
        assert me.task is not None, "a linear model has a task"
        found = yield from self.found(state["params"], me)
        params, changed = yield from self.moved(state, found, me)
        after = {**state, **changed, "params": params, "step": state["step"] + 1}
        n = me.task.n_own
        (seen,) = yield Agree(
            batches=(Numbers(found.here.loss / max(1, n), float(n), 1.0, float(n)),)
        )
        yield Record(
            step=after["step"],
            seen=seen,
            lr=self.rate(after, me),
            grad_norm=float(found.z.norm()),
            objective=found.certificate.objective,
            gap=found.certificate.gap,
        )
        return after

    def found(self, w: torch.Tensor, me: Worker) -> Program[Found]:
        """What is known of a model: two sums over workers, of D + 2 numbers and of one."""
        task = me.task
        assert task is not None
        here = yield Local(work=partial(task.at, w), batches=task.batches(task.n_own))
        sums, own = yield from self.summed(
            here.gradient, here.gradient.new_tensor([here.loss, task.n_own])
        )
        loss, n = own.tolist()
        z = sums / n
        conjugates = task.conjugates(here.slopes, task.shrink(z))
        (told,) = yield from self.summed(z.new_tensor([conjugates]))
        certificate = task.certificate(w, z, loss / n, float(told) / n)
        return Found(w=w, z=z, n=n, here=here, certificate=certificate)

    def summed(self, *vectors: torch.Tensor) -> Program[tuple[torch.Tensor, ...]]:
        """Vectors of one type, each summed over workers."""
        import torch

        whole = torch.cat(vectors)
        message = yield Sum(message=_message(whole))
        parts: tuple[torch.Tensor, ...] = (
            message.packets[0].decode().split([len(each) for each in vectors])
        )
        return parts

    def least(self, number: float) -> Program[float]:
        """The smallest of all workers' numbers."""
        import torch

        told = yield Combine(
            message=_message(torch.tensor([number], dtype=torch.float64)), function=_least
        )
        return float(told)

    def refused_with(self, algorithm: DataParallel) -> list[Violation]:
        """What says how gradients of batches are exchanged."""
        name, usual = type(self).__name__, algorithm.__class__()
        rule = f"is of gradients of batches, and {name} exchanges whole sums and models"
        return [
            Violation(
                path=f"data_parallel.{part}.kind",
                value=tag(getattr(algorithm, part)),
                rule=rule,
                legal=f'"{tag(getattr(usual, part))}"',
            )
            for part in _PARTS
            if getattr(algorithm, part) != getattr(usual, part)
        ]

    def agrees(self, algorithm: DataParallel) -> bool:
        """All have the same model between rounds."""
        return True


def _message(vector: torch.Tensor) -> Message:
    return Message(packets=(Packet(buffers=(vector,), like=Like.of(vector), kind=Dense()),))


def _least(messages: Sequence[Message]) -> float:
    return min(float(message.packets[0].decode()) for message in messages)
