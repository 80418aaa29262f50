"""A run from its plan on: the checkpoint that it begins from, its folder, the loop, the summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch.distributed as dist

from .. import runlog, summary
from .. import spec as specs
from ..algo.legal import tag
from ..data.source import Source
from ..errors import PolyremeError, RunError
from ..plan.ir import Plan
from ..profile.record import Profile
from ..runtime import checkpoint, checkpoints, loop
from ..runtime.final import save_final
from ..runtime.job import Job
from ..runtime.mesh import World
from ..runtime.progress import ProgressBar
from ..runtime.route import MakeRoute, Route
from ..runtime.saver import Saver
from ..runtime.state import Progress, State
from ..runtime.trackers import Tracker, open_trackers
from . import folders, starting
from .linear_of import objective_of
from .problem import Problem

if TYPE_CHECKING:
    from .ranks import Request

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run: the first of the plans. `what` says so to whoever waits."""

    problem: Problem
    profile: Profile | None
    plans: tuple[Plan, ...]
    source: Source
    what: str


class Virtually:
    """Makes the route of a simulation, and tells its time."""

    route: Any = None

    def __init__(self, make_route: MakeRoute) -> None:
        self._make_route = make_route

    def __call__(self, *team: Any, **how: Any) -> Route:
        """The route."""
        self.route = self._make_route(*team, **how)
        return cast("Route", self.route)

    def now_s(self) -> float:
        """Virtual seconds; 0 before there is a route."""
        return 0.0 if self.route is None else float(self.route.now_s)


def train(
    request: Request,
    run: Run,
    world: World,
    stop: Callable[[], bool],
    make_route: MakeRoute | None = None,
) -> runlog.Summary | None:
    """Train; rank 0 writes the run folder.

    A run that goes on from a checkpoint writes nothing before that is found to be of its state:
    one that is refused leaves the folder as it was. Raises ConfigError then.
    """
    problem, folder = run.problem, request.folder
    spec, plan = problem.spec, run.plans[0]
    virtually = isinstance(make_route, Virtually)
    clock = make_route.now_s if isinstance(make_route, Virtually) else None
    goes_on = bool(request.resume) and not request.again
    log, trackers = (None, ()) if goes_on else _begin(request, run, world, clock)
    bar = ProgressBar(
        silent=not (request.progress and world.is_first), tokens_per_sample=spec.train.seq_len
    )
    job = Job(
        graph=problem.graph,
        plan=plan,
        source=run.source,
        train=spec.train,
        algorithm=spec.data_parallel,
        folder=folder,
        partition=spec.data.partition,
        general=make_route is not None
        or bool(spec.simulate.attacks)
        or spec.model.trains_by_program,
        attack=spec.simulate.attacks,
        objective=objective_of(spec),
    )
    loop_ = loop.Run(job, world, stop=stop, progress=bar, make_route=make_route)
    progress = None
    if request.resume:
        progress = loop_.load(lambda state: _load(request, state, problem))
    if goes_on:
        log, trackers = _begin(request, run, world, clock)
    if log is not None and (request.again or progress is not None):
        step = 0 if progress is None else progress.step
        log.write(
            runlog.RestartEvent(t=log.t, attempt=log.attempt, step=step, devices=world.n_ranks)
        )
    saver = Saver(
        folder,
        problem.graph,
        world,
        keep=spec.train.keep,
        best=spec.train.keep_best,
        on_error=spec.train.on_save_error,
        settings=_settings(spec),
        timeout_s=spec.train.timeout_s,
        log=log,
    )
    with bar:
        outcome = loop_.play(log=log, save=saver)
        try:
            save_final(outcome.state, folder, graph=problem.graph)
        except RunError as error:
            if spec.train.on_save_error == "stop":
                raise
            if log is not None:
                sys.stderr.write(f"polyreme: {error}\n")
                log.write(runlog.FaultEvent(t=log.t, attempt=log.attempt, what=str(error)))
        if outcome.status == "done" and spec.report.partition:
            _judge_partition(loop_, outcome.steps, log)
    if log is None:
        return None
    log.close()
    for tracker in trackers:
        tracker.close()
    setting = summary.Setting(
        graph=problem.graph, plan=plan, cluster=problem.cluster, profile=run.profile
    )
    found = summary.summarise(
        runlog.read(folder / folders.LOG),
        setting,
        status=outcome.status,
        wall_s=time.time() - request.start_s if not virtually else None,
        virtual=virtually,
    )
    runlog.save_summary(found, folder)
    return found


def _judge_partition(run: loop.Run, step: int, log: runlog.Writer | None) -> None:
    """Log how good the partition of rows is, if there is one; all ranks call it together."""
    if run.team is None:
        return
    with run.world.record.doing("judging the partition"):
        anchors = run.team.anchors(run.applied, run.world)
    if log is not None and anchors:
        constant = max(anchor.constant for anchor in anchors)
        log.write(
            runlog.PartitionEvent(
                t=log.t, attempt=log.attempt, step=step, constant=constant, anchors=anchors
            )
        )


def _begin(
    request: Request, run: Run, world: World, clock: Callable[[], float] | None
) -> tuple[runlog.Writer | None, Sequence[Tracker]]:
    """Make the run folder this run's; its log and the trackers, on the first rank."""
    folder, log, trackers = request.folder, None, list[Tracker]()
    if world.is_first:
        if not request.again:
            folders.make_way(folder, request.resume)
        folders.begin(folder, run.problem.spec, run.plans, run.profile)
        _leave_start(request)
        say(request, run.what)
        world.record.enter("begun")
    world.barrier()
    if world.is_first:
        trackers = open_trackers(run.problem.spec.report.trackers, folder)
        log = runlog.Writer(
            folder / folders.LOG,
            attempt=request.attempt,
            listeners=[tracker.write for tracker in trackers],
            **({"began_s": request.start_s} if clock is None else {"clock": clock}),
        )
    return log, trackers


def _leave_start(request: Request) -> None:
    """For later attempts; a run that goes on while the disk is full does without."""
    if request.again:
        return
    try:
        starting.leave(request.start, request.folder)
    except RunError as error:
        sys.stderr.write(f"polyreme: {error}\n")


def _load(request: Request, state: State, problem: Problem) -> Progress:
    """Load the first checkpoint that is whole; those of the run that are damaged are set aside.

    Raises ConfigError where the last to be tried is damaged, or one belongs to another run.
    """
    world = state.world
    for folder, older in zip(request.resume, (*request.resume[1:], None), strict=True):
        try:
            return checkpoint.load(
                state, folder, graph=problem.graph, settings=_settings(problem.spec)
            )
        except checkpoint.Damaged as error:
            if older is None:
                raise
            place = on_first(world, partial(checkpoints.set_aside, folder))
            if world.is_first:
                rule = error.violations[0].rule
                sys.stderr.write(
                    f"polyreme: {folder.name} {rule}; it is kept as {place.name}, "
                    f"going on from {older.name}\n"
                )
    raise AssertionError("it is asked only where there are some")


def _settings(spec: specs.Spec) -> dict[str, Any]:
    """What is told of a checkpoint that goes on under another.

    From settings of training the order of samples follows, so that the position in it says which
    were seen; from the algorithm and attacks, what workers keep.
    """
    train, found = spec.train, dict[str, Any]()
    for name in ("feedback", "compress", "sync", "topology", "aggregate"):
        part = msgspec.to_builtins(getattr(spec.data_parallel, name))
        found |= {f"data_parallel.{name}.{key}": value for key, value in part.items()}
    attacks = [f"{tag(each)} {list(each.workers)}" for each in spec.simulate.attacks]
    return {
        "train.seed": train.seed,
        "train.global_batch": train.global_batch,
        "train.tail": train.tail,
        **found,
        "simulate.attack": attacks,
    }


def say(request: Request, what: str) -> None:
    """A line for whoever waits."""
    if request.progress:
        sys.stderr.write(f"polyreme: {what}\n")


def on_first(world: World, make: Callable[[], _T]) -> _T:
    """What `make` gives on rank 0, on all ranks; what it raises is raised on all."""
    box: list[tuple[_T | None, PolyremeError | None]] = [(None, None)]
    if world.is_first:
        try:
            box = [(make(), None)]
        except PolyremeError as error:
            box = [(None, error)]
    if world.group is not None:
        with world.record.inside("broadcast", n_ranks=world.n_ranks):
            dist.broadcast_object_list(box, src=0, device=world.device)
    value, raised = box[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[return-value]
