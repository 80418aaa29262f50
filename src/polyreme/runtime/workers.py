"""The workers of an algorithm that this process plays: one of several, or all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch

from .. import runlog
from ..algo.effects import Record, Seen
from ..algo.sync.kind import State as WorkerState
from ..algo.task import Sum, Task
from ..algo.vector import mean
from ..algo.worker import Worker
from ..convex.problem import Objective
from ..data.order import Ordering
from . import linear, own
from .agreed import Said
from .applied import Applied
from .driver import StepResult
from .feed import Feed
from .gradients import Gradients
from .job import Job
from .mesh import World
from .pieces import Index, Reader
from .route import Came
from .state import Progress, State
from .timing import StepTimes


class Workers(Protocol):
    """Who has the states of these workers, and tensors of all of them."""

    def states(self) -> Mapping[int, WorkerState]:
        """Of this process's workers, by number, between rounds."""

    def put_states(self, states: Mapping[int, WorkerState], done: int = 0) -> None:
        """Go on from these, after so many steps."""

    def each(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """One tensor of every worker, in order of workers; all processes call it together."""

    def rest(self) -> None:
        """Bring all of them between rounds."""


class Team:
    """What workers are made of, and what becomes of all of them together."""

    def __init__(
        self,
        job: Job,
        applied: Applied,
        feeds: Mapping[int, Feed],
        order: Ordering,
        n: int,
        n_steps: int,
    ) -> None:
        self.job, self.n = job, n
        self.algorithm, self._order, self._n_steps = job.algorithm, order, n_steps
        self._feed = next(iter(feeds.values()))
        self.tasks: dict[int, Sum] = {}
        self.gradients = self._gradients(applied, feeds)
        self.part = _part(applied)
        self.workers = {rank: self._worker(rank) for rank in feeds}
        self.lower: dict[int, float] = {}  # what each knew of the objective when it was settled
        self.algorithm.sync.fits(self.gradients.layout.n_entries)
        served = range(n, n + self.algorithm.sync.n_servers(n))
        self.servers = {rank: self._worker(rank) for rank in served}

    def begun(self) -> dict[int, WorkerState]:
        """States before the first round, at the parameters that are in the stage."""
        sync, start = self.algorithm.sync, self.gradients.start()
        players = self.workers | self.servers
        return {rank: sync.init(self.algorithm, start.clone(), me) for rank, me in players.items()}

    def settle(self, workers: Workers) -> None:
        """Bring the mean model, and the mean of buffers, into the stage."""
        sync, states = self.algorithm.sync, workers.states()
        self.lower = {
            rank: sync.lower(state, self.workers[rank])
            for rank, state in states.items()
            if rank in self.tasks
        }
        if self.servers:
            servers, players = self.servers, [states[rank] for rank in range(self.n)]
            self.gradients.put(sync.whole([states[rank] for rank in servers], players))
            self.settle_buffers(workers)
            return
        models = {rank: sync.model(state) for rank, state in states.items()}
        if sync.agrees(self.algorithm):
            self.gradients.put(next(iter(models.values())))
        else:
            self.gradients.put(mean(workers.each(models)))
        self.settle_buffers(workers)

    def certified(self, applied: Applied, world: World) -> dict[str, float]:
        """What is certified of the model in the stage, if anything; all ranks call it together."""
        if not self.tasks or self.job.objective is None:
            return {}
        found = linear.certified(self.tasks, applied, world, self.gradients.start(), self.lower)
        told = {name: getattr(found, name) for name in self.job.objective.figures}
        return {name: value for name, value in told.items() if math.isfinite(value)}

    def anchors(self, applied: Applied, world: World) -> tuple[runlog.Anchor, ...]:
        """How good the partition is, with the model in the stage; all ranks call it together.

        Nothing of one worker, of what is no linear model with a bound, and under group l1, where
        each step moves all weights.
        """
        match self.job.objective:
            case Objective(penalty=penalty) if self.n > 1 and penalty.bounds:
                if not penalty.group_l1:
                    own, w = cast("dict[int, Task]", self.tasks), self.gradients.start()
                    seed, lower = self.job.train.seed, self.lower
                    return linear.anchors(own, applied, world, w, seed, lower)
        return ()

    def settle_buffers(self, workers: Workers) -> None:
        """Bring the mean of workers' buffers into the stage."""
        buffers = self.gradients.buffers
        count = len(next(iter(buffers.values())))
        self.gradients.put_buffers(
            [
                _mean_buffer(workers.each({rank: own[i] for rank, own in buffers.items()}))
                for i in range(count)
            ]
        )

    def kept(self, workers: Workers) -> dict[int, WorkerState]:
        """What a checkpoint holds of each worker: its state, and its buffers by number."""
        return {
            rank: {
                **state,
                "buffers": {str(i): b for i, b in enumerate(self.gradients.buffers.get(rank, ()))},
            }
            for rank, state in workers.states().items()
        }

    def take(self, workers: Workers, reader: Reader, index: Index) -> None:
        """States as they were, or the mean of all where there were more or fewer workers."""
        if own.n_workers(index) == self.n + len(self.servers):
            kept = self.kept(workers)
            found = {r: own.read(reader, state, r, self.part) for r, state in kept.items()}
            for rank, state in found.items():
                buffers = list(state.pop("buffers").values())
                if rank in self.workers:
                    self.gradients.buffers[rank] = buffers
        else:
            begun = self.begun().items()
            found = {rank: own.shared(reader, index, state, self.part) for rank, state in begun}
            for rank in self.workers:  # what is in the stage is the mean already
                live = [slot.tensor for slot in self.gradients.applied.buffers]
                self.gradients.buffers[rank] = [tensor.clone() for tensor in live]
        workers.put_states(found)

    def came(
        self,
        records: list[Record],
        times: StepTimes,
        said: tuple[Said, ...],
        memory_bytes: int,
        sent_bytes: int,
    ) -> list[Came]:
        """What a round's steps came to, each with an equal part of its bytes."""
        gradients, n = self.gradients, len(records)
        told = gradients.reads | gradients.bad
        gradients.bad.clear()
        return [
            Came(
                result=StepResult(
                    loss=record.seen.loss,
                    grad_norm=record.grad_norm,
                    weight=record.seen.weight,
                    reason=_reason(record.seen),
                    bad_ranks=record.seen.bad,
                    said=said,
                    trails=(),
                    memory_bytes=memory_bytes,
                    times=times,
                ),
                n_samples=record.seen.n_samples,
                lr=record.lr,
                sent_bytes=sent_bytes * (number + 1) // n - sent_bytes * number // n,
                sample_ids=self._ids(record.step - 1),
                read={rank: read for rank, (_, read) in told.items()},
                read_ids=lambda rank: gradients.feeds[rank].own_ids(told[rank][0]),
                delays=tuple(zip(record.seen.workers, record.delays, strict=False)),
                suspects=record.suspects,
                objective=record.objective,
                gap=record.gap,
                gradient=record.gradient,
                passes=record.passes,
            )
            for number, record in enumerate(records)
        ]

    def _ids(self, step: int) -> Callable[[], tuple[int, ...] | None]:
        in_step = self.algorithm.sync.in_step
        return lambda: self._feed.sample_ids(step) if in_step else None

    def _gradients(self, applied: Applied, feeds: Mapping[int, Feed]) -> Gradients:
        """Of the model's layers; of one like a linear one, of samples, dealt out for good."""
        job, seed = self.job, self.job.train.seed
        if job.objective is None:
            return Gradients(applied, feeds, seed=seed)
        samples = job.objective.samples(job.source)
        self.tasks = linear.tasks(
            samples,
            job.source,
            job.partition,
            which=tuple(feeds),
            n_workers=self.n,
            global_batch=job.train.global_batch,
            seed=seed,
        )
        return linear.SumGradients(applied, feeds, seed=seed, samples=samples)

    def _worker(self, rank: int) -> Worker:
        train, rate, n_steps = self.job.train, self.algorithm.rule.lr, self._n_steps
        return Worker(
            rank=rank,
            n=self.n,
            layout=self.gradients.layout,
            seed=train.seed,
            lr=lambda step: rate * train.schedule.factor(step, n_steps),
            clip_norm=train.clip_norm,
            n_samples=self._order.n_own(rank),
            n_steps=n_steps,
            attack=self.job.attack,
            # Specs refuse syncs that ask more of a sum than it is.
            task=cast("Task | None", self.tasks.get(rank)),
            goal=train.goal,
        )


class TeamState(State):
    """What all workers share (the mean model, the mean of buffers), and what is each one's own.

    `tensors` are in the stage, where `settle` brings them; workers' own buffers go on as they
    are, as the running mean of means is the mean of running means.
    """

    def __init__(self, team: Team, workers: Workers, applied: Applied, world: World) -> None:
        super().__init__(applied, (), world)
        self._team, self._workers = team, workers
        self.team = applied.places.team

    def tensors(self) -> dict[str, torch.Tensor]:
        """The mean model by name; all ranks call it together."""
        self._workers.rest()
        self._team.settle(self._workers)
        return super().tensors()

    def own(self) -> dict[str, torch.Tensor]:
        """This process's workers' own state by name."""
        self._workers.rest()
        kept = self._team.kept(self._workers)
        part = self._team.part
        return {k: v for r, state in kept.items() for k, v in own.named(state, r, part).items()}

    def lacking(self, index: Index) -> list[str]:
        """Where workers' states in a checkpoint are not of this algorithm; none at all may be."""
        n, kept, part = own.n_workers(index), self._team.kept(self._workers), self._team.part
        if n == self._team.n + len(self._team.servers):
            return [
                words for r, state in kept.items() for words in own.unlike(index, state, r, part)
            ]
        return list(own.unlike_any(index, next(iter(kept.values())), part)) if n else []

    def take(self, reader: Reader, index: Index) -> None:
        """Read it, once what all share is in the stage."""
        self._team.take(self._workers, reader, index)

    def restored(self, progress: Progress) -> None:
        """Go on from there, also with workers that begin at a checkpoint which had none."""
        super().restored(progress)
        states = self._workers.states()
        if not self._team.servers:  # who come and go count steps of their own
            states = {rank: {**each, "step": progress.step} for rank, each in states.items()}
        self._workers.put_states(states, progress.step)


def _part(applied: Applied) -> str:
    """What sets this process's state apart from that of others of its worker."""
    cell, places = applied.places.cell, applied.places
    return "" if len(places.ranks) == 1 else f"part-{cell.pipe}-{cell.shard}-{cell.tp}/"


def _mean_buffer(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of float buffers; the maximum of others."""
    each = list(buffers)
    return mean(each) if each[0].is_floating_point() else torch.stack(each).amax(0)


def _reason(seen: Seen) -> str | None:
    if not seen.skipped:
        return None
    if not seen.bad:
        return "no label carries loss"
    return "loss or gradient is not finite"
