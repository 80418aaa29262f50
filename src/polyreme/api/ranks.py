"""What each process of a command does; every function here is run by all ranks together."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import runlog
from .. import spec as specs
from ..cluster.accelerator import Accelerator
from ..cluster.detect import hardware
from ..cluster.types import Cluster
from ..measure.measure import measure
from ..plan.describe import describe
from ..plan.explain import unused
from ..plan.ir import Plan, devices
from ..profile.record import Profile
from ..runtime import mesh
from ..runtime.mesh import World
from ..runtime.place import is_watched
from ..runtime.route import MakeRoute
from ..runtime.watchdog import OnVerdict
from . import compiling, running, steps
from .problem import Problem, pose
from .running import on_first, say
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
    return measure(
        problem.graph,
        problem.cluster,
        work.precision,
        world,
        work.global_batch,
        compiled=problem.spec.train.compile,
    )


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
        ExitStack() as saying,
        _asked_to_stop() as stop,
        mesh.watched(request.accelerator, timeout_s, request.devices) as world,
    ):
        if world.watchdog is not None and on_verdict is not None:
            world.watchdog.on_verdict = on_verdict
        if begin is not None:
            wanted, find = request, begin
            request = on_first(world, lambda: find(wanted))
        saying.enter_context(compiling.said(request.progress and world.is_first))
        problem = pose(request.spec, machines=(request.cluster, request.accelerator))
        profile, found = _plans(request, problem, world)
        plan = found[0]
        if n_devices(plan) < world.n_ranks:
            return Result(summary=None, plans=found)
        spec = problem.spec
        source = spec.data.open(spec.train.seq_len, spec.train.seed)
        steps.arranged(spec, source, n_workers=steps.n_replicas(plan))
        what = "; ".join([f"running {describe(plan)}", *unused(plan)])
        run = running.Run(problem=problem, profile=profile, plans=found, source=source, what=what)
        summary_ = running.train(request, run, world, stop)
        return Result(summary=summary_, plans=found)


def simulated(request: Request, problem: Problem, make_route: MakeRoute) -> None:
    """Train with all workers in this process, on the clock of the route that is made."""
    what = f"{_counted(steps.n_replicas(request.plans[0]), 'worker')} on a virtual clock"
    _from_here(request, problem, None, running.Virtually(make_route), what)


def served(request: Request, problem: Problem, profile: Profile, make_route: MakeRoute) -> None:
    """Train with workers and servers in processes of their own, which the route begins."""
    n = steps.n_replicas(request.plans[0])
    n_servers = problem.spec.data_parallel.sync.n_servers(n)
    what = f"{_counted(n, 'worker')} and {_counted(n_servers, 'server')}"
    _from_here(request, problem, profile, make_route, what)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def _from_here(
    request: Request, problem: Problem, profile: Profile | None, make_route: MakeRoute, what: str
) -> None:
    """Train with workers that are no ranks: this process writes the run folder and evaluates."""
    with _asked_to_stop() as stop, mesh.watched(request.accelerator, 0.0) as world:
        spec, plans = problem.spec, request.plans
        source = spec.data.open(spec.train.seq_len, spec.train.seed)
        steps.arranged(spec, source, n_workers=steps.n_replicas(plans[0]))
        run = running.Run(problem=problem, profile=profile, plans=plans, source=source, what=what)
        running.train(request, run, world, stop, make_route)


def n_devices(plan: Plan) -> int:
    """Devices that a plan uses."""
    return len({device for layer in plan.layer_plans.values() for device in devices(layer.split)})


def _plans(
    request: Request, problem: Problem, world: World
) -> tuple[Profile | None, tuple[Plan, ...]]:
    """The best plans, or the given one, and the profile that they were found with."""
    if request.plans:
        given = (on_first(world, lambda: steps.given_plan(problem, request.plans[0])),)
        profile = on_first(world, lambda: steps.kept_profile(problem))
        return profile, given + request.plans[1:]
    profile = on_first(world, lambda: steps.kept_profile(problem))
    if profile is None:
        on_first(world, lambda: steps.something_offered(problem, problem.spec.parallel))
        if world.is_first:
            say(request, f"measuring layers and links on {hardware(problem.cluster)}")
        with world.record.doing("measuring"):
            profile = _measured(problem, world)
        if world.is_first:
            steps.keep_profile(profile)
    costs = profile
    with world.record.doing("planning"):
        return costs, on_first(
            world,
            lambda: steps.best_plans(
                problem, costs, all_devices=request.all_devices, progress=request.progress
            ),
        )


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
