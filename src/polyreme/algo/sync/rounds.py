"""What syncs of a linear model have in common: rounds in which all workers sum what they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import Violation, undefined
from ..compress.dense import Dense
from ..effects import Agree, Combine, Numbers, Program, Record, Sum
from ..legal import tag
from ..packet import Like, Message, Packet
from .kind import State, SyncKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_PARTS = ("topology", "compress", "feedback", "aggregate")


@dataclass(frozen=True, kw_only=True)
class Went:
    """The next model, what else of the state changes, and what the log is told of the round.

    `loss` is of this worker's samples, summed; `objective`, `gap` and `gradient` are of a model of
    the round.
    """

    params: torch.Tensor
    changed: State
    loss: float
    grad_norm: float | None = None
    objective: float | None = None
    gap: float | None = None
    gradient: float | None = None


class Rounds(SyncKind, frozen=True, kw_only=True):
    """Rounds over all samples of a linear model; a step is a round.

    Subclasses say in `went` what a round is.
    """

    finite_sum: ClassVar[bool] = True
    in_step: ClassVar[bool] = False

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """The model, and what the method keeps."""
        return {"params": params, "step": 0, **self.own(params, me)}

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """What the method keeps from round to round."""
        return {}

    def went(self, state: State, me: Worker) -> Program[Went]:
        """One round."""
        raise undefined(self, "went")

    def rate(self, state: State, me: Worker) -> float:
        """The step size that a round had, for the log; 1 where the data say how long steps are."""
        return 1.0

    def length(self, state: State) -> float | None:
        """Local steps that a round had, over the samples of a worker, where it chooses them."""
        return None

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """One round, and what all tell of it."""
        assert me.task is not None, "a linear model has a task"
        went = yield from self.went(state, me)
        after = {**state, **went.changed, "params": went.params, "step": state["step"] + 1}
        n, finite = float(me.task.n_own), float(self.finite(went))
        (seen,) = yield Agree(batches=(Numbers(went.loss / max(1.0, n), n, finite, n),))
        yield Record(
            step=after["step"],
            seen=seen,
            lr=self.rate(after, me),
            grad_norm=went.grad_norm,
            objective=went.objective,
            gap=went.gap,
            gradient=went.gradient,
            passes=self.length(after),
        )
        return after

    def finite(self, went: Went) -> bool:
        """Whether a round may count."""
        return math.isfinite(went.loss)

    def summed(self, *vectors: torch.Tensor) -> Program[tuple[torch.Tensor, ...]]:
        """Vectors of one type, each summed over workers."""
        import torch

        whole = torch.cat(vectors)
        message = yield Sum(message=_message(whole))
        parts: tuple[torch.Tensor, ...] = (
            message.packets[0].decode().split([len(each) for each in vectors])
        )
        return parts

    def joined(
        self, own: torch.Tensor, function: Callable[[Sequence[torch.Tensor]], Any]
    ) -> Program[Any]:
        """A function of all workers' tensors of one shape, in order of workers."""
        return (yield Combine(message=_message(own), function=_OfTensors(function)))

    def least(self, number: float) -> Program[float]:
        """The smallest of all workers' numbers."""
        import torch

        own = torch.tensor([number], dtype=torch.float64)
        return float((yield from self.joined(own, _least)))

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


@dataclass(frozen=True)
class _OfTensors:
    """A function of messages, from one of the tensors in them."""

    function: Callable[[Sequence[torch.Tensor]], Any]

    def __call__(self, messages: Sequence[Message]) -> Any:
        return self.function([message.packets[0].decode() for message in messages])


def _message(tensor: torch.Tensor) -> Message:
    like = Like.of(tensor)
    return Message(packets=(Packet(buffers=(tensor.reshape(-1),), like=like, kind=Dense()),))


def _least(numbers: Sequence[torch.Tensor]) -> float:
    return min(float(number) for number in numbers)
