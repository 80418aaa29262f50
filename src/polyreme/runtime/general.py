"""Steps by an algorithm's program: one process a worker, each with parameters of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..algo.effects import Record, Seen
from ..algo.vector import mean
from ..algo.worker import Worker
from ..data.order import Ordering
from . import own
from .apply.data import Applied
from .driver import Said, StepResult
from .feed import Feed
from .gradients import Gradients
from .job import Job
from .mesh import World
from .pieces import Index, Reader
from .player import Player
from .route import Came
from .state import State
from .timing import step_times


class WorkerState(State):
    """Of one worker: what all share (the mean model, its buffers) and what is its own.

    `tensors` are in the stage, where `settle` brings the mean model and the mean of buffers;
    workers' own buffers go on as they are (the running mean of means is the mean of them).
    """

    def __init__(self, route: General, applied: Applied, world: World) -> None:
        super().__init__(applied, (), world)
        self._route = route

    def tensors(self) -> dict[str, torch.Tensor]:
        """The mean model by name; all ranks call it together."""
        self._route.settle()
        return super().tensors()

    def own(self) -> dict[str, torch.Tensor]:
        """This worker's own state by name."""
        return own.named(self._route.kept, self.world.rank)

    def lacking(self, index: Index) -> list[str]:
        """What of this worker's own state a checkpoint does not have."""
        if own.n_workers(index) != self.world.n_ranks:
            return []
        return list(own.missing(index, self._route.kept, self.world.rank))

    def take(self, reader: Reader, index: Index) -> None:
        """Read this worker's own state, once what all share is in the stage."""
        self._route.take(reader, index)


class General:
    """Any algorithm, one process a worker.

    Workers tell each other their wishes and the state of their checkpoints as they agree on
    losses, once a round.
    """

    def __init__(
        self,
        job: Job,
        applied: Applied,
        world: World,
        feed: Feed,
        order: Ordering,
        n_steps: int,
        *,
        say: Callable[[], Said],
    ) -> None:
        train = job.train
        self._job, self._world, self._feed = job, world, feed
        self._say = say
        self._gradients = Gradients(applied, {world.rank: feed}, seed=train.seed)
        self._records: list[Record] = []
        me = worker_of(job, world.rank, world.n_ranks, self._gradients, order, n_steps)
        self.player = Player(
            algorithm=job.algorithm,
            me=me,
            state=job.algorithm.sync.init(job.algorithm, self._gradients.start(), me),
            gradients=lambda params, batch: self._gradients(world.rank, params, batch),
            world=world,
            on_record=self._records.append,
            say=self._told,
        )
        self.state = WorkerState(self, applied, world)
        self.begin()

    def begin(self) -> None:
        """Start the clock of the next round here."""
        self._mark_s = time.perf_counter()
        self._computed_s, self._blocked_s = self.player.compute_s, self.player.blocked_s

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sent."""
        return sum(self.player.ledger.bytes.values())

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """A round at a time."""
        player = self.player
        assert player.state["step"] == first, "state and progress are of the same step"
        try:
            while player.state["step"] < stop:
                self._records.clear()
                sent_bytes = self.sent_bytes
                player.round()
                yield self._came(self.sent_bytes - sent_bytes)
        finally:
            self._gradients.close()

    def settle(self) -> None:
        """Bring the mean model, and the mean of buffers, into the stage."""
        sync, player, world = self._job.algorithm.sync, self.player, self._world
        model = sync.model(player.state)
        if not sync.agrees(self._job.algorithm):
            model = mean(self._each(model))
        self._gradients.put(model)
        buffers = self._gradients.buffers[world.rank]
        self._gradients.put_buffers([mean_buffer(self._each(buffer)) for buffer in buffers])

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint holds of this worker: its state, and its buffers by number."""
        buffers = self._gradients.buffers[self._world.rank]
        return {**self.player.state, "buffers": dict(enumerate(buffers))}

    def take(self, reader: Reader, index: Index) -> None:
        """This worker's state as it was, or the mean of all where there were more or fewer."""
        player, algorithm, rank = self.player, self._job.algorithm, self._world.rank
        if own.n_workers(index) == self._world.n_ranks:
            found = own.read(reader, self.kept, rank)
        else:
            state = algorithm.sync.init(algorithm, self._gradients.start(), player.me)
            found = own.shared(reader, index, {**state, "buffers": self.kept["buffers"]})
        self._gradients.buffers[rank] = list(found.pop("buffers").values())
        player.state = found

    def _each(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensors of all workers in their order, one at a time."""
        world = self._world
        if world.group is None:
            yield tensor
            return
        for rank in range(world.n_ranks):
            other = tensor.clone() if rank == world.rank else torch.empty_like(tensor)
            with world.record.inside("broadcast model", other, world.n_ranks):
                dist.broadcast(other, rank, group=world.group)
            yield other

    def _told(self) -> tuple[float, ...]:
        said = self._say()
        return (
            float(said.stop),
            float(said.save),
            self.player.compute_s - self._computed_s,
            float(self._world.accelerator.peak_bytes()),
        )

    def _came(self, sent_bytes: int) -> list[Came]:
        """What the round's steps came to, each with an equal part of its time and bytes."""
        player, records = self.player, list(self._records)
        n = max(1, len(records))
        step_s = time.perf_counter() - self._mark_s
        blocked_s = player.blocked_s - self._blocked_s
        self.begin()
        times = step_times(
            step_s / n,
            blocked_s / n,
            [row[2] / n for row in player.heard],
            self._world.rank,
        )
        worker, gradients = self._world.rank, self._gradients
        batch, read = gradients.bad.pop(worker, gradients.reads.get(worker, (0, [])))
        result = [
            StepResult(
                loss=record.seen.loss,
                grad_norm=record.grad_norm,
                weight=record.seen.weight,
                reason=_reason(record.seen),
                bad_ranks=record.seen.bad,
                said=tuple(Said(stop=row[0] > 0, save=int(row[1])) for row in player.heard),
                trails=(),
                memory_bytes=int(max(row[3] for row in player.heard)),
                times=times,
            )
            for record in records
        ]
        return [
            Came(
                result=each,
                n_samples=record.seen.n_samples,
                lr=record.lr,
                sent_bytes=sent_bytes * (number + 1) // n - sent_bytes * number // n,
                sample_ids=self._ids(record.step - 1),
                read=read,
                read_ids=lambda: self._feed.own_ids(batch),
            )
            for number, (each, record) in enumerate(zip(result, records, strict=True))
        ]

    def _ids(self, step: int) -> Callable[[], tuple[int, ...] | None]:
        in_step = self._job.algorithm.sync.in_step
        return lambda: self._feed.sample_ids(step) if in_step else None


def worker_of(
    job: Job, rank: int, n: int, gradients: Gradients, order: Ordering, n_steps: int
) -> Worker:
    """A worker of a job, the same on both clocks."""
    train, rate = job.train, job.algorithm.rule.lr
    return Worker(
        rank=rank,
        n=n,
        layout=gradients.layout,
        seed=train.seed,
        lr=lambda step: rate * train.schedule.factor(step, n_steps),
        clip_norm=train.clip_norm,
        n_samples=order.n_own(rank),
        n_steps=n_steps,
    )


def mean_buffer(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of float buffers; the maximum of others."""
    each = list(buffers)
    return mean(each) if each[0].is_floating_point() else torch.stack(each).amax(0)


def _reason(seen: Seen) -> str | None:
    if not seen.skipped:
        return None
    if not seen.bad:
        return "no label carries loss"
    return "loss or gradient is not finite"
