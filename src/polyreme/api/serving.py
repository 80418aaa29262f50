"""`polyreme train` of an algorithm with servers: workers and servers that may come and go."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import runlog
from .. import spec as specs
from ..algo.sync.peers import Peers
from ..cluster.detect import hardware
from ..errors import ConfigError, PolyremeError, Violation
from ..plan.ir import Plan
from ..runtime.place import is_launched
from . import compiling, folders, steps
from .simulating import plan_of

if TYPE_CHECKING:
    from ..algo.sync import Sync
    from ..cluster.accelerator import Accelerator
    from ..cluster.types import Cluster
    from ..data.source import Source
    from ..runtime.transport.local import Address
    from .problem import Problem

_PRELOAD = ("torch", "polyreme.api.ranks", "polyreme.runtime.served.player")


def train(
    spec: specs.Spec, folder: Path, *, devices: int | None, resume: str | None, progress: bool
) -> runlog.Summary:
    """See `api.train`."""
    if is_launched():
        rule = "is run by processes that may come and go, and a launcher's may not"
        legal = "one process, without a launcher, or another sync"
        kind = type(spec.data_parallel.sync).__name__
        violation = Violation(path="data_parallel.sync.kind", value=kind, rule=rule, legal=legal)
        raise ConfigError([violation])
    start_s = time.time()
    with folders.claimed(folder), compiling.said(progress):
        return _run(spec, folder, devices, resume, progress, start_s)


def _run(
    spec: specs.Spec,
    folder: Path,
    devices: int | None,
    resume: str | None,
    progress: bool,
    start_s: float,
) -> runlog.Summary:
    from ..runtime.served.among import Among
    from ..runtime.served.route import Members
    from . import ranks, starting
    from .aftermath import conclude
    from .problem import here, pose
    from .training import judged

    cluster, accelerator = here(spec, devices)
    if rule := _not_there(spec.data_parallel.sync, accelerator):
        violation = Violation(
            path="data_parallel.sync.kind",
            value=type(spec.data_parallel.sync).__name__,
            rule=rule,
            legal='"ASGD"',
        )
        raise ConfigError([violation])
    problem = pose(spec, machines=(cluster, accelerator), apart=True)
    start = starting.begin(resume, folder, uuid.uuid4().hex)
    if progress and steps.kept_profile(problem) is None:
        sys.stderr.write(f"polyreme: measuring layers and links on {hardware(cluster)}\n")
    profile = steps.measured_profile(problem)
    plan = plan_of(problem)
    request = ranks.Request(
        spec=spec,
        cluster=cluster,
        accelerator=accelerator,
        folder=folder,
        plans=(plan,),
        start=start,
        resume=start.first,
        progress=progress,
        start_s=start_s,
    )
    kind = Among if isinstance(spec.data_parallel.sync, Peers) else Members
    begin = partial(_member, (spec, cluster, accelerator, plan))
    preload = (*_PRELOAD, *spec.imports)
    # A process that has used an accelerator may not be forked.
    warm = (_posed, (spec, cluster, accelerator)) if accelerator.on_host else None
    try:
        ranks.served(
            request, problem, profile, partial(kind, begin, folder / "servers", preload, warm)
        )
    except (PolyremeError, KeyboardInterrupt) as error:
        if starting.begun(folder, start.launch) is not None:
            status: runlog.Status = "failed" if isinstance(error, PolyremeError) else "interrupted"
            conclude(spec, folder, status, (cluster, accelerator))
        raise
    return judged(spec, folder)


def _member(
    given: tuple[specs.Spec, Cluster, Accelerator, Plan], *member: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What the process of a worker or server calls."""
    return be, (*given, *member)


def _not_there(sync: Sync, accelerator: Accelerator) -> str:
    """Why a sync cannot be played on such devices, if it cannot."""
    if accelerator.on_host:
        return ""
    if sync.in_memory:
        return f"is memory of the host, which workers on {accelerator.name} have no part in"
    if isinstance(sync, Peers):
        return f"plays models in the host's memory, not on {accelerator.name}, outside `simulate`"
    return ""


def _posed(spec: specs.Spec, cluster: Cluster, accelerator: Accelerator) -> tuple[Problem, Source]:
    """What is trained, and on what."""
    from .problem import pose

    problem = pose(spec, machines=(cluster, accelerator), apart=True)
    return problem, problem.spec.data.open(problem.spec.train.seq_len, problem.spec.train.seed)


def be(
    spec: specs.Spec,
    cluster: Cluster,
    accelerator: Accelerator,
    plan: Plan,
    rank: int,
    life: int,
    step: int,
    address: Address,
    folder: Path,
) -> None:
    """Be the worker or server of that number, in a process of its own."""
    from ..runtime import mesh
    from ..runtime.job import Job
    from ..runtime.served.player import play
    from .linear_of import objective_of

    device = 0 if accelerator.on_host else rank % accelerator.count()
    with mesh.watched(accelerator, 0.0, [device]) as world:
        problem, source = _posed(spec, cluster, accelerator)
        spec = problem.spec
        job = Job(
            graph=problem.graph,
            plan=plan,
            source=source,
            train=spec.train,
            algorithm=spec.data_parallel,
            partition=spec.data.partition,
            general=True,
            attack=spec.simulate.attacks,
            objective=objective_of(spec),
        )
        play(job, world, rank, life, step, address, folder)
