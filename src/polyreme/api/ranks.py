"""What each process of a command does; every function here is run by all ranks together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from .. import runlog, summary
from .. import spec as specs
from ..cluster.accelerator import Accelerator
from ..cluster.types import Cluster
from ..errors import PolyremeError
from ..measure.measure import measure
from ..plan.ir import Plan, devices
from ..planner.search import search
from ..profile.record import Profile
from ..runtime import checkpoint, loop, mesh
from ..runtime.final import save_final
from ..runtime.job import Job
from ..runtime.mesh import World
from ..runtime.progress import ProgressBar
from ..runtime.state import Progress, State
from ..runtime.trackers import open_trackers
from . import folders, steps
from .problem import Problem, pose

_T = TypeVar("_T")
_ALL = 10**6


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ranks are told; the rest each makes from the spec, as every other rank does.

    `cluster` is what the command found here. `all_devices` asks for a plan that leaves none
    unused: the number was asked for, or fixed by a launcher from outside. `start_s` is when the
    command began (``time.time``), so that start-up counts as time lost.
    """

    spec: specs.Spec
    cluster: Cluster
    accelerator: Accelerator
    folder: Path
    plan: Plan | None = None
    resume: Path | None = None
    progress: bool = False
    all_devices: bool = False
    start_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a request: a run's summary, or a plan that wants fewer processes."""

    summary: runlog.Summary | None
    plan: Plan


def measured(spec: specs.Spec, cluster: Cluster, accelerator: Accelerator) -> Profile:
    """The profile of this machine; the same on all ranks."""
    with _world(accelerator) as world:
        problem = pose(spec, machines=(cluster, accelerator))
        return measure(problem.graph, problem.cluster, problem.workload.precision, world)


def work(request: Request) -> Result:
    """Profile and plan if need be, then train; rank 0 writes the run folder.

    A plan for fewer devices than there are processes is returned without training, so that the
    caller starts as many; under torchrun or Slurm the best plan for all of them is run.
    """
    with _world(request.accelerator) as world:
        problem = pose(request.spec, machines=(request.cluster, request.accelerator))
        profile, plan = _plan(request, problem, world)
        if n_devices(plan) < world.n_ranks:
            return Result(summary=None, plan=plan)
        if world.is_first:
            folders.begin(request.folder, problem.spec, plan, profile)
        world.barrier()
        return Result(summary=_train(request, problem, profile, plan, world), plan=plan)


def n_devices(plan: Plan) -> int:
    """Devices that a plan uses."""
    return len({device for layer in plan.layer_plans.values() for device in devices(layer.split)})


def _plan(request: Request, problem: Problem, world: World) -> tuple[Profile | None, Plan]:
    given = request.plan
    if given is not None:
        plan = _on_first(world, lambda: steps.given_plan(problem, given))
        return _on_first(world, lambda: steps.kept_profile(problem)), plan
    profile = _on_first(world, lambda: steps.kept_profile(problem))
    if profile is None:
        profile = measure(problem.graph, problem.cluster, problem.workload.precision, world)
        if world.is_first:
            steps.keep_profile(profile)
    return profile, _on_first(world, lambda: _search(request, problem, profile, world))


def _search(request: Request, problem: Problem, profile: Profile, world: World) -> Plan:
    """The best plan; if none may stay unused, the best that uses all devices, if any does."""
    found = search(
        problem.graph,
        problem.cluster,
        profile,
        problem.workload,
        problem.spec.parallel,
        top=_ALL if request.all_devices else 1,
    )
    whole = (plan for plan in found if n_devices(plan) == world.n_ranks)
    chosen = next(whole, found[0]) if request.all_devices else found[0]
    record = found[0].search
    if record is not None and chosen is not found[0]:
        record = msgspec.structs.replace(record, proved=False, unused_devices=())
    return msgspec.structs.replace(chosen, search=record)


def _train(
    request: Request, problem: Problem, profile: Profile | None, plan: Plan, world: World
) -> runlog.Summary | None:
    spec, folder = problem.spec, request.folder
    trackers = open_trackers(spec.report.trackers, folder) if world.is_first else []
    log = None
    if world.is_first:
        listeners = [tracker.write for tracker in trackers]
        log = runlog.Writer(folder / folders.LOG, listeners=listeners, began_s=request.start_s)
    setting = summary.Setting(
        graph=problem.graph, plan=plan, cluster=problem.cluster, profile=profile
    )

    def save(state: State) -> None:
        checkpoint.save(state, folder, graph=problem.graph, keep=spec.train.keep, log=log)

    def load(state: State) -> Progress:
        assert request.resume is not None
        found = checkpoint.load(state, request.resume, graph=problem.graph)
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
    with _asked_to_stop() as stop, bar:
        outcome = loop.train(
            Job(
                graph=problem.graph,
                plan=plan,
                source=spec.data.open(spec.train.seq_len, spec.train.seed),
                train=spec.train,
                algorithm=spec.data_parallel,
                folder=folder,
                partition=spec.data.partition,
                resume=request.resume,
            ),
            world,
            log=log,
            stop=stop,
            save=save,
            load=None if request.resume is None else load,
            progress=bar,
        )
        save_final(outcome.state, folder, graph=problem.graph)
    if log is None:
        return None
    log.close()
    for tracker in trackers:
        tracker.close()
    found = summary.summarise(
        runlog.read(folder / folders.LOG),
        setting,
        status=outcome.status,
        wall_s=time.time() - request.start_s,
    )
    runlog.save_summary(found, folder)
    return found


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT came: the loop then ends at its next safe point."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: asked.append(got))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _world(accelerator: Accelerator) -> Iterator[World]:
    """This process among all."""
    if accelerator.on_host:
        torch.set_num_threads(1)
    world = mesh.open(accelerator)
    try:
        yield world
    finally:
        mesh.close(world)


def _on_first(world: World, make: Callable[[], _T]) -> _T:
    """What `make` gives on rank 0, on all ranks; what it raises is raised on all."""
    box: list[tuple[_T | None, PolyremeError | None]] = [(None, None)]
    if world.is_first:
        try:
            box = [(make(), None)]
        except PolyremeError as error:
            box = [(None, error)]
    if world.group is not None:
        dist.broadcast_object_list(box, src=0, device=world.device)
    value, raised = box[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[return-value]
