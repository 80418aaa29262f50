"""What each process of a command does; every function here is run by all ranks together."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .. import runlog, summary
from .. import spec as specs
from ..cluster.accelerator import Accelerator
from ..cluster.detect import hardware
from ..cluster.types import Cluster
from ..data.source import Source
from ..errors import PolyremeError, RunError
from ..measure.measure import measure
from ..plan.describe import describe
from ..plan.explain import unused
from ..plan.ir import Plan, devices
from ..profile.record import Profile
from ..runtime import checkpoint, checkpoints, loop, mesh
from ..runtime.final import save_final
from ..runtime.job import Job
from ..runtime.mesh import World
from ..runtime.place import is_watched
from ..runtime.progress import ProgressBar
from ..runtime.route import MakeRoute, Route
from ..runtime.saver import Saver
from ..runtime.state import Progress, State
from ..runtime.trackers import open_trackers
from ..runtime.watchdog import OnVerdict
from . import folders, starting, steps
from .problem import Problem, pose
from .starting import Start

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ranks are told; the rest each makes from the spec, as every other rank does.

    `cluster` is what the command found here; `plans` begins with the one to run, if there is one.
    `all_devices` asks for a plan that leaves none unused: the number was asked for, or fixed by a
    launcher from outside. `start_s` is when the command, or this attempt of it, began
    (``time.time``), so that start-up counts as time lost. `again` says that the run folder is
    this run's already, `attempt` how its events are numbered (unset: as the next in the log);
    `devices` are indices of this host's devices by local rank (unset: the first ones). `start` is
    how the run began, `resume` the checkpoints of which the first that is whole is loaded.
    """

    spec: specs.Spec
    cluster: Cluster
    accelerator: Accelerator
    folder: Path
    plans: tuple[Plan, ...] = ()
    start: Start
    resume: tuple[Path, ...] = ()
    progress: bool = False
    all_devices: bool = False
    start_s: float
    again: bool = False
    attempt: int | None = None
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a request: a summary, or plans of which the best wants fewer processes."""

    summary: runlog.Summary | None
    plans: tuple[Plan, ...]


def measured(spec: specs.Spec, cluster: Cluster, accelerator: Accelerator) -> Profile:
    """The profile of this machine; the same on all ranks."""
    with mesh.watched(accelerator, spec.train.timeout_s) as world, world.record.doing("measuring"):
        problem = pose(spec, machines=(cluster, accelerator))
        return _measured(problem, world)


def _measured(problem: Problem, world: World) -> Profile:
    work = problem.workload
    return measure(problem.graph, problem.cluster, work.precision, world, work.global_batch)


def work(
    request: Request,
    on_verdict: OnVerdict | None = None,
    begin: Callable[[Request], Request] | None = None,
) -> Result:
    """Profile and plan if need be, then train; rank 0 writes the run folder.

    A plan for fewer devices than there are processes is returned without training, so that the
    caller starts as many; under torchrun or Slurm the best plan for all of them is run.
    `on_verdict` is called before all end where ranks watch each other and find one that stalls.
    `begin` is asked on rank 0 alone what the run is begun from, since ranks may see a shared
    folder at different times.
    """
    timeout_s = request.spec.train.timeout_s
    with (
        _asked_to_stop() as stop,
        mesh.watched(request.accelerator, timeout_s, request.devices) as world,
    ):
        if world.watchdog is not None and on_verdict is not None:
            world.watchdog.on_verdict = on_verdict
        if begin is not None:
            wanted, find = request, begin
            request = _on_first(world, lambda: find(wanted))
        problem = pose(request.spec, machines=(request.cluster, request.accelerator))
        profile, found = _plans(request, problem, world)
        plan = found[0]
        if n_devices(plan) < world.n_ranks:
            return Result(summary=None, plans=found)
        spec = problem.spec
        source = spec.data.open(spec.train.seq_len, spec.train.seed)
        steps.arranged(spec, source, n_workers=steps.n_replicas(plan))
        if world.is_first:
            if not request.again:
                folders.make_way(request.folder, request.resume)
            folders.begin(request.folder, spec, found, profile)
            _leave_start(request)
            _say(request, "; ".join([f"running {describe(plan)}", *unused(plan)]))
            world.record.enter("begun")
        world.barrier()
        summary_ = _train(request, problem, profile, plan, source, world, stop)
        return Result(summary=summary_, plans=found)


def simulated(request: Request, problem: Problem, make_route: MakeRoute) -> None:
    """Train with all workers in this process, on the clock of the route that is made."""
    _from_here(request, problem, None, _Virtually(make_route), "on a virtual clock")


def served(request: Request, problem: Problem, profile: Profile, make_route: MakeRoute) -> None:
    """Train with workers and servers in processes of their own, which the route begins."""
    _from_here(request, problem, profile, make_route, "and their servers")


def _from_here(
    request: Request, problem: Problem, profile: Profile | None, make_route: MakeRoute, how: str
) -> None:
    """Train with workers that are no ranks: this process writes the run folder and evaluates."""
    with _asked_to_stop() as stop, mesh.watched(request.accelerator, 0.0) as world:
        spec, plan = problem.spec, request.plans[0]
        source = spec.data.open(spec.train.seq_len, spec.train.seed)
        n_workers = steps.n_replicas(plan)
        steps.arranged(spec, source, n_workers=n_workers)
        folders.make_way(request.folder, request.resume)
        folders.begin(request.folder, spec, request.plans, profile)
        _leave_start(request)
        _say(request, f"{n_workers} worker{'s' * (n_workers > 1)} {how}")
        _train(request, problem, profile, plan, source, world, stop, make_route)


class _Virtually:
    """Makes the route of a simulation, and tells its time."""

    route: Any = None

    def __init__(self, make_route: MakeRoute) -> None:
        self._make_route = make_route

    def __call__(self, *team: Any, **how: Any) -> Route:
        self.route = self._make_route(*team, **how)
        return cast("Route", self.route)

    def now_s(self) -> float:
        return 0.0 if self.route is None else float(self.route.now_s)  # virtual


def _leave_start(request: Request) -> None:
    """For later attempts; a run that goes on while the disk is full does without."""
    if request.again:
        return
    try:
        starting.leave(request.start, request.folder)
    except RunError as error:
        sys.stderr.write(f"polyreme: {error}\n")


def n_devices(plan: Plan) -> int:
    """Devices that a plan uses."""
    return len({device for layer in plan.layer_plans.values() for device in devices(layer.split)})


def _plans(
    request: Request, problem: Problem, world: World
) -> tuple[Profile | None, tuple[Plan, ...]]:
    """The best plans, or the given one, and the profile that they were found with."""
    if request.plans:
        given = (_on_first(world, lambda: steps.given_plan(problem, request.plans[0])),)
        profile = _on_first(world, lambda: steps.kept_profile(problem))
        return profile, given + request.plans[1:]
    profile = _on_first(world, lambda: steps.kept_profile(problem))
    if profile is None:
        _on_first(world, lambda: steps.something_offered(problem, problem.spec.parallel))
        if world.is_first:
            _say(request, f"measuring layers and links on {hardware(problem.cluster)}")
        with world.record.doing("measuring"):
            profile = _measured(problem, world)
        if world.is_first:
            steps.keep_profile(profile)
    costs = profile
    with world.record.doing("planning"):
        return costs, _on_first(
            world,
            lambda: steps.best_plans(
                problem, costs, all_devices=request.all_devices, progress=request.progress
            ),
        )


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
            place = _on_first(world, partial(checkpoints.set_aside, folder))
            if world.is_first:
                rule = error.violations[0].rule
                sys.stderr.write(
                    f"polyreme: {folder.name} {rule}; it is kept as {place.name}, "
                    f"going on from {older.name}\n"
                )
    raise AssertionError("it is asked only where there are some")


def _settings(spec: specs.Spec) -> dict[str, Any]:
    """From which the order of samples follows, so that the position in it says which were seen."""
    train = spec.train
    return {
        "train.seed": train.seed,
        "train.global_batch": train.global_batch,
        "train.tail": train.tail,
    }


def _say(request: Request, what: str) -> None:
    """A line for whoever waits."""
    if request.progress:
        sys.stderr.write(f"polyreme: {what}\n")


def _train(
    request: Request,
    problem: Problem,
    profile: Profile | None,
    plan: Plan,
    source: Source,
    world: World,
    stop: Callable[[], bool],
    make_route: MakeRoute | None = None,
) -> runlog.Summary | None:
    spec, folder = problem.spec, request.folder
    virtually = make_route if isinstance(make_route, _Virtually) else None
    trackers = open_trackers(spec.report.trackers, folder) if world.is_first else []
    log = None
    if world.is_first:
        listeners = [tracker.write for tracker in trackers]
        log = runlog.Writer(
            folder / folders.LOG,
            attempt=request.attempt,
            listeners=listeners,
            **({"began_s": request.start_s} if virtually is None else {"clock": virtually.now_s}),
        )
        if request.again and not request.resume:
            log.write(
                runlog.RestartEvent(t=log.t, attempt=log.attempt, step=0, devices=world.n_ranks)
            )
    setting = summary.Setting(
        graph=problem.graph, plan=plan, cluster=problem.cluster, profile=profile
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

    def load(state: State) -> Progress:
        found = _load(request, state, problem)
        if log is not None:
            log.write(
                runlog.RestartEvent(
                    t=log.t, attempt=log.attempt, step=found.step, devices=world.n_ranks
                )
            )
        return found

    bar = ProgressBar(
        silent=not (request.progress and world.is_first), tokens_per_sample=spec.train.seq_len
    )
    with bar:
        outcome = loop.train(
            Job(
                graph=problem.graph,
                plan=plan,
                source=source,
                train=spec.train,
                algorithm=spec.data_parallel,
                folder=folder,
                partition=spec.data.partition,
                general=make_route is not None,
            ),
            world,
            log=log,
            stop=stop,
            save=saver,
            load=load if request.resume else None,
            progress=bar,
            make_route=make_route,
        )
        try:
            save_final(outcome.state, folder, graph=problem.graph)
        except RunError as error:
            if spec.train.on_save_error == "stop":
                raise
            if log is not None:
                sys.stderr.write(f"polyreme: {error}\n")
                log.write(runlog.FaultEvent(t=log.t, attempt=log.attempt, what=str(error)))
    if log is None:
        return None
    log.close()
    for tracker in trackers:
        tracker.close()
    found = summary.summarise(
        runlog.read(folder / folders.LOG),
        setting,
        status=outcome.status,
        wall_s=time.time() - request.start_s if virtually is None else None,
        virtual=virtually is not None,
    )
    runlog.save_summary(found, folder)
    return found


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT came: the loop then ends at its next safe point.

    A launcher's own handler is told too.
    """
    asked: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        known = before.get(signal.Signals(number))
        if callable(known) and is_watched():
            known(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_first(world: World, make: Callable[[], _T]) -> _T:
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
