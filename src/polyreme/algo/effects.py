"""What an algorithm asks of the world: its program yields these and is sent the answers.

A program is a generator. The virtual clock and the processes play the same one; each decides what
an effect costs and how it is carried out, none decides what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .once import once
from .vector import all_finite

if TYPE_CHECKING:
    import torch

    from .packet import Kinds, Message

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The mean gradient of a batch at these parameters; answered with a `Computed`.

    `params` is this worker's vector, `batch` counts the batches of this worker from 0.
    """

    params: torch.Tensor
    batch: int


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A mean gradient over `weight` labels of `n_samples` samples; `loss` is their mean loss.

    `known_finite` is what whoever computed it knows of loss and gradient, if that was looked at.
    """

    gradient: torch.Tensor
    loss: float
    weight: float
    n_samples: int = 0
    known_finite: bool | None = None

    @once
    def is_finite(self) -> bool:
        """Whether loss and gradient are."""
        if self.known_finite is not None:
            return self.known_finite
        return math.isfinite(self.loss) and all_finite(self.gradient)

    @property
    def numbers(self) -> Numbers:
        """What others must know of it."""
        return Numbers(self.loss, self.weight, float(self.is_finite), float(self.n_samples))


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a worker works out on all its own samples; answered with what `work` returns.

    It takes as long as the gradients of so many `batches`, which may be a part of one.
    """

    work: Callable[[], Any]
    batches: float = 0.0


class Numbers(NamedTuple):
    """Of one worker's batch: mean loss, labels that carry loss, whether all is finite, samples."""

    loss: float = 0.0
    weight: float = 0.0
    finite: float = 1.0
    n_samples: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Agree:
    """What every worker tells all others of its last batches, as many on all of them.

    Answered with a `Seen` for each batch. What else all must know at that point (wishes to stop,
    parts of a checkpoint) rides with it.
    """

    batches: tuple[Numbers, ...]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all workers told of one batch each, in order of workers.

    `apart` says that each steps on its own: then one whose batch is not finite has a weight of 0.
    `workers` says whose the rows are (unset: all workers' in their order).
    """

    rows: tuple[Numbers, ...]
    apart: bool = False
    workers: tuple[int, ...] = ()

    @staticmethod
    def of(told: Sequence[Sequence[Numbers]]) -> tuple[Seen, ...]:
        """One for each batch, from what each worker told of its own."""
        return tuple(Seen(rows=rows) for rows in zip(*told, strict=True))

    @property
    def weight(self) -> float:
        """Labels that carry loss, over all workers."""
        return sum(row.weight for row in self.rows)

    @property
    def n_samples(self) -> int:
        """Samples, over all workers."""
        return int(sum(row.n_samples for row in self.rows))

    @property
    def bad(self) -> tuple[int, ...]:
        """Workers whose loss or gradient is not finite."""
        workers = self.workers or range(len(self.rows))
        bad = (w for w, row in zip(workers, self.rows, strict=True) if not row.finite)
        return tuple(sorted(set(bad)))

    @property
    def skipped(self) -> bool:
        """Whether nobody may use these gradients, or nobody used one."""
        return not self.weight or (bool(self.bad) and not self.apart)

    @property
    def loss(self) -> float | None:
        """Mean loss over all labels."""
        if self.skipped:
            return None
        return sum(row.loss * row.weight for row in self.rows if row.weight) / self.weight

    def borne(self, n: int) -> Seen:
        """The same, if up to so many workers may be not finite: those that are do not count."""
        if not 0 < len(self.bad) <= n:
            return self
        rows = tuple(row if row.finite else row._replace(weight=0.0) for row in self.rows)
        return replace(self, rows=rows, apart=True)

    def share(self, rank: int) -> float:
        """What a worker multiplies its mean gradient with, so that the plain mean is right."""
        return self.rows[rank].weight * len(self.rows) / self.weight


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a step came to, for the log; answered with nothing.

    `step` counts from 1; `grad_norm` is of the gradient that the rule was given, where all of
    them were given the same. A server records each worker's alone, with its delay: how many
    pushes were applied between the parameters that it was computed at and its own. `delays` are
    of the rows of `seen`, if they have any. `suspects` are those of the last `Suspect`; whoever
    plays the program joins them.
    """

    step: int
    seen: Seen
    lr: float
    grad_norm: float | None = None
    delays: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    objective: float | None = None
    gap: float | None = None
    gradient: float | None = None
    passes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Workers that an aggregate set aside, or that stood farthest from it; answered with nothing.

    They go to the log with the next `Record`.
    """

    workers: tuple[int, ...]


def with_suspects(record: Record, workers: tuple[int, ...]) -> Record:
    """The record with those that are suspects since the last one, ascending, each once."""
    return replace(record, suspects=tuple(sorted({*workers}))) if workers else record


@dataclass(frozen=True, kw_only=True)
class Send:
    """Hands a message to the network; answered with nothing, at once.

    `tag` says what it belongs to, if its receiver asks for that.
    """

    to: int
    message: Message
    tag: int = 0


@dataclass(frozen=True, kw_only=True)
class Recv:
    """The next message of a worker, or of any (`ANY`); answered with a `Received`.

    `kinds` says what it must hold (`Message.kinds` of one alike), `brief` what it may hold
    instead. It has this `tag`; where that is not 0, what its source sent with lower ones is
    dropped.
    After `timeout_s` seconds without one the answer is None; also where there is none and the
    player `unless` has sent something, which is there to be received then.
    """

    source: int
    kinds: Kinds
    timeout_s: float | None = None
    brief: Kinds | None = None
    tag: int = 0
    unless: int | None = None

    def wants(self, source: int, tag: int) -> bool:
        """Whether a message from there, of that tag, is one of these."""
        return self.source in (ANY, source) and self.tag == tag

    def drops(self, source: int, tag: int) -> bool:
        """Whether one is of something that is over."""
        return 0 < tag < self.tag and self.source == source


ANY = -1


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message and who sent it."""

    source: int
    message: Message


@dataclass(frozen=True, kw_only=True)
class Combine:
    """All workers give a message; each is answered with a function of all, in order of workers.

    The network's own collective carries it. The function gives the same on all workers and
    changes none of its arguments, so that one clock for all may call it once.
    """

    message: Message
    function: Callable[[Sequence[Message]], Any]


@dataclass(frozen=True, kw_only=True)
class Sum:
    """All workers give a message whose packets add; each is answered with the sum.

    Summed in order of workers, so that bits do not depend on how: the network's own collectives
    carry it, each worker summing a share of the entries. Integers stay at home.
    """

    message: Message


@dataclass(frozen=True, kw_only=True)
class SumShards:
    """Sum of a small tensor over the parts that a replica is split in.

    Parts are devices, and also single tensors where a rule is played tensor by tensor;
    `per_tensor` marks partial results of each tensor, which are summed over devices alone.
    """

    partial: torch.Tensor
    per_tensor: bool = False


@dataclass(frozen=True, kw_only=True)
class Now:
    """Seconds since the run began, on this clock."""


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """Waits."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Members:
    """The workers that are there now, in order."""


Effect = (
    Compute
    | Local
    | Agree
    | Record
    | Suspect
    | Send
    | Recv
    | Combine
    | Sum
    | SumShards
    | Now
    | Sleep
    | Members
)
Program = Generator[Effect, Any, _T]
Split = Generator[SumShards, "torch.Tensor", _T]


def settled(result: _T | Split[_T]) -> Split[_T]:
    """What a member gives, whether or not it asks for sums on the way."""
    if isinstance(result, Generator):
        return (yield from result)
    return result


def alone(program: Split[_T]) -> _T:
    """Plays a program that asks for sums over shards where there is one shard."""
    try:
        effect = next(program)
        while True:
            effect = program.send(effect.partial)
    except StopIteration as end:
        result: _T = end.value
        return result


def together(
    programs: Sequence[Split[_T]],
    over_devices: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial,
    over_stages: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[_T]:
    """Plays the programs of several parts of one replica in step, and sums what they ask for.

    What is of all parts goes over stages too (unset: there is one); what is of single tensors has
    a place for each tensor of all programs.
    """
    import torch

    results: list[Any] = [None] * len(programs)
    answers: list[torch.Tensor | None] = [None] * len(programs)
    waiting = list(range(len(programs)))
    while waiting:
        asked: list[tuple[int, SumShards]] = []
        for index in waiting:
            try:
                asked.append((index, programs[index].send(answers[index])))  # type: ignore[arg-type]
            except StopIteration as end:
                results[index] = end.value
        waiting = [index for index, _ in asked]
        if not asked:
            break
        assert len(asked) == len(programs), "all parts of a replica ask alike"
        over = over_devices if asked[0][1].per_tensor else over_stages or over_devices
        total = over(torch.stack([effect.partial for _, effect in asked]).sum(0))
        answers = [total] * len(programs)
    return results
