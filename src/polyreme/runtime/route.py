"""How a run does its steps: natively, or (`general`) by an algorithm's program."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .. import runlog
from .agreed import Said
from .applied import Applied
from .driver import Driver, OnGradients, StepResult
from .feed import Feed
from .gradients import Read
from .job import Job
from .mesh import World
from .passes import seed_of, set_seed
from .state import State, average_buffers

if TYPE_CHECKING:
    from .workers import Team


@dataclass(frozen=True, kw_only=True)
class Came:
    """What a step came to. `lr`, `n_samples`, `sample_ids` are of all workers together.

    `sent_bytes` are this rank's; `read` is what the parts of the ranks in this process were made
    of, `read_ids` gives the numbers of a rank's samples. `delays` are of gradients that were
    applied, with the worker of each; `suspects` are workers that an aggregate set aside, or that
    stood farthest from it; `faults` befell members that were begun anew.
    `objective`, `gap` and `gradient` are of the parameters before it, where they are known.
    `passes` are local steps that a sync chose.
    """

    result: StepResult
    n_samples: int
    lr: float
    sent_bytes: int
    sample_ids: Callable[[], tuple[int, ...] | None]
    read: Mapping[int, Read]
    read_ids: Callable[[int], list[list[int]]]
    delays: tuple[tuple[int, int], ...] = ()
    suspects: tuple[int, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    objective: float | None = None
    gap: float | None = None
    gradient: float | None = None
    passes: float | None = None

    def event(
        self, log: runlog.Writer, step: int, tokens_per_sample: int, *, lists: bool
    ) -> runlog.StepEvent:
        """What a log keeps of it; the numbers of its samples if it `lists` them, or was skipped."""
        result, skipped = self.result, self.result.skipped
        return runlog.StepEvent(
            t=log.t,
            attempt=log.attempt,
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self.lr,
            samples=self.n_samples,
            tokens=self.n_samples * tokens_per_sample,
            step_s=result.times.step_s,
            compute_s=result.times.compute_s,
            comm_s=result.times.comm_s,
            wait_s=result.times.wait_s,
            hidden_s=result.times.hidden_s,
            wire_bytes=self.sent_bytes,
            memory_bytes=result.memory_bytes,
            skipped=skipped,
            reason=result.reason,
            rank=result.rank,
            ranks=result.bad_ranks if skipped else None,
            sample_ids=self.sample_ids() if lists or skipped else None,
            delays=runlog.histogram(d for _, d in self.delays) if self.delays else None,
            suspects=self.suspects or None,
            objective=self.objective,
            gap=self.gap,
            gradient=self.gradient,
            passes=self.passes,
        )


class Route(Protocol):
    """Steps of a run, on all ranks together."""

    @property
    def state(self) -> State:
        """What a checkpoint holds."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent."""

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """Steps from `first` up to `stop`, one or several at a time; then it rests."""

    def begin(self) -> None:
        """Start the clock of the next step here."""

    def settle(self) -> None:
        """Bring the model that is evaluated and kept into the stage, the same on all ranks."""


class MakeRoute(Protocol):
    """Makes the route of all workers of a team that are in this process."""

    def __call__(
        self, team: Team, applied: Applied, world: World, *, say: Callable[[], Said]
    ) -> Route:
        """The route."""


class Native:
    """Every step, mean, dense: the backend's own collectives."""

    def __init__(
        self,
        job: Job,
        applied: Applied,
        world: World,
        feed: Feed,
        n_steps: int,
        *,
        say: Callable[[], Said],
        on_gradients: OnGradients | None,
    ) -> None:
        self._job, self._applied, self._world, self._feed = job, applied, world, feed
        self._n_steps, self._say = n_steps, say
        self._driver = Driver(
            applied,
            world,
            job.algorithm.rule,
            clip_norm=job.train.clip_norm,
            on_gradients=on_gradients,
        )
        self.state = State(applied, self._driver.optimizers, world)
        cell, grid = applied.places.cell, applied.grid
        self._seed_rank = applied.places.data_rank + cell.pipe * grid.degrees.data

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent."""
        return self._applied.traffic.sent_bytes

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """One at a time."""
        with self._feed.steps(first, stop) as reads:
            self._driver.begin()
            for step in range(first, stop):
                with self._world.record.doing("reading data"):
                    read = next(reads)
                yield [self._step(step, read)]

    def begin(self) -> None:
        """Start the clock of the next step here."""
        self._driver.begin()

    def settle(self) -> None:
        """Ranks differ in buffers alone; parameters may wait for what is gathered."""
        self._applied.buckets.settle()
        average_buffers(self._applied, self._world)

    def _step(self, step: int, read: Read) -> Came:
        job, feed, traffic = self._job, self._feed, self._applied.traffic
        n_samples, sent_bytes = feed.n_samples(step), traffic.sent_bytes
        set_seed(self._world.device, seed_of(job.train.seed, step, self._seed_rank))
        factor = job.train.schedule.factor(step, self._n_steps)
        result = self._driver.step(
            feed.to_device(read, with_fillers=self._applied.fills),
            nominal_weight=float(n_samples * feed.labels_per_sample),
            rate_factor=factor,
            say=self._say,
        )
        return Came(
            result=result,
            n_samples=n_samples,
            lr=job.algorithm.rule.lr * factor,
            sent_bytes=traffic.sent_bytes - sent_bytes,
            sample_ids=lambda: feed.sample_ids(step),
            read={self._world.rank: read},
            read_ids=lambda _: feed.own_ids(step),
        )
