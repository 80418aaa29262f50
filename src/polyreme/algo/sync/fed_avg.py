"""Federated averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from .. import exchange
from ..effects import Agree, Combine, Numbers, Program, Record
from ..feedback.kind import Turn
from ..rule.sgd import SGD
from . import way
from .kind import State, SyncKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..packet import Message
    from ..worker import Worker

_SAMPLING = -1


class FedAvg(SyncKind, frozen=True, kw_only=True, tag="FedAvg", tag_field="kind"):
    """Each round some clients train for epochs of their own data; their mean is the next model.

    A client counts by its samples: its way is scaled by n_k n / (sum over the sampled), then the
    plain mean of all is taken (an aggregate that takes weights has n_k instead, one that takes none
    is refused unless clients count `alike`), so that compression, feedback and topology apply as
    ever (signs without a scale do not tell how much a client counts). Feedbacks that go on counting
    silent workers by what they sent last (EF21, DIANA) have the sum over all instead. Clients that
    are not sampled compute nothing, their packets are empty, and what their feedback keeps stays.
    Clients without data are never sampled; where all share one order (workers own no samples) all
    count alike, and an epoch is a batch. The rule's state starts anew each round. A step is a
    round, and the learning rate is that of the round. A client's steps that are not finite and
    rounds thrown away are as with LocalSteps. Under gossip those sampled train and all mix.

    Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", algorithm 1.
    Differs: an epoch ends with the batch that brings the client's samples together.

    Attributes:
        fraction: Share of the clients with data that is sampled, rounded down; at least one is.
        epochs: Local passes over a client's own samples; 1 where neither is given.
        batches: Local batches instead of epochs.
        alike: Whether clients count alike, whatever samples they have.
    """

    in_step: ClassVar[bool] = False
    fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    batches: Annotated[int, msgspec.Meta(ge=1)] | None = None
    alike: bool = False

    def check(self) -> list[Violation]:
        """At most one of epochs and batches."""
        if self.epochs is None or self.batches is None:
            return []
        rule = "stands beside data_parallel.sync.epochs; at most one of them is wanted"
        path = "data_parallel.sync.batches"
        return [Violation(path=path, value=self.batches, rule=rule, legal="leave it out")]

    def n_rows(self, n: int) -> int:
        """Of the clients that are sampled, if all have data."""
        return max(1, int(self.fraction * n + 1e-9))

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Parameters, the state of exchanges, and the batches that this client took."""
        kept = super().init(algorithm, params, me)
        del kept["rule"]
        return {**kept, "outer": {}, "batch": 0}

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """Sampling, local epochs, the weighted mean of ways."""
        start, step = state["params"], state["step"]
        lr = me.lr(step)
        holds = yield from _holdings(start, me)
        sampled = self.sampled(holds, step, me)
        if self.alike:
            holds = tuple(float(n > 0) for n in holds)
        params, told, n_batches = start, Numbers(), 0
        if me.rank in sampled:
            params, told, n_batches = yield from self._trained(algorithm, state, lr, me)
        gone = start - params
        seen, arrived = yield Agree(batches=(told, way.arrival(gone)))
        arrived = arrived.borne(algorithm.aggregate.bears)
        yield Record(step=step + 1, seen=way.marked(seen, arrived), lr=lr)
        after = {**state, "step": step + 1, "batch": state["batch"] + n_batches}
        weights = tuple(
            n * float(row.weight > 0) * float(rank in sampled) * came.finite
            for rank, (n, row, came) in enumerate(zip(holds, seen.rows, arrived.rows, strict=True))
        )
        if way.lost(arrived) or not any(weights):
            return after
        params, _, exchanged = yield from way.together(
            algorithm,
            SGD(lr=1.0),
            start,
            gone,
            state,
            me,
            Turn(step=step, lr=1.0),
            weights,
            total=sum(holds) if algorithm.feedback.remembers else None,
            expected=len(sampled),
        )
        return {**after, "params": params, "exchange": exchanged}

    def sampled(self, holds: Sequence[float], step: int, me: Worker) -> frozenset[int]:
        """The clients of a round, the same on all workers."""
        import torch

        able = [rank for rank, n in enumerate(holds) if n]
        n_sampled = max(1, int(self.fraction * len(able) + 1e-9))
        generator = me.draw(step).at(_SAMPLING).shared()
        order = torch.randperm(len(able), generator=generator).tolist()
        return frozenset(able[i] for i in order[:n_sampled])

    def _trained(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> Program[tuple[torch.Tensor, Numbers, int]]:
        """Parameters after local epochs, what others must know, and batches taken."""
        params, rule = state["params"], algorithm.rule.init(state["params"])
        came: list[Numbers] = []
        while not self._enough(came, me):
            params, rule, numbers = yield from way.stepped(
                algorithm, params, rule, state["exchange"], state["batch"] + len(came), lr, me
            )
            came.append(numbers)
        usable = [each for each in came if each.finite and each.weight]
        weight = sum(each.weight for each in usable)
        loss = sum(each.loss * each.weight for each in usable) / weight if usable else 0.0
        told = Numbers(
            loss=loss,
            weight=weight,
            finite=min(each.finite for each in came),
            n_samples=sum(each.n_samples for each in came),
        )
        return params, told, len(came)

    def _enough(self, came: Sequence[Numbers], me: Worker) -> bool:
        """Whether these batches are a round's; one without samples ends it too."""
        if self.batches is not None:
            return len(came) >= self.batches
        epochs = self.epochs or 1
        if not me.n_samples:
            return len(came) >= epochs
        if came and not came[-1].n_samples:
            return True
        return sum(each.n_samples for each in came) >= epochs * me.n_samples


def _holdings(params: torch.Tensor, me: Worker) -> Program[tuple[float, ...]]:
    """How many samples each worker owns; 1 each, where none owns any."""
    import torch

    own = params.new_tensor([me.n_samples], dtype=torch.float64)

    def numbers(messages: Sequence[Message]) -> tuple[float, ...]:
        held = tuple(float(each.packets[0].decode()) for each in messages)
        return held if any(held) else (1.0,) * len(held)

    found: tuple[float, ...] = yield Combine(message=exchange.dense([own]), function=numbers)
    return found
