"""`polyreme simulate`: a run's workers on a virtual clock, with the folder that training writes."""

from __future__ import annotations

import time
import uuid
from functools import partial
from pathlib import Path

from .. import runlog
from .. import spec as specs
from ..errors import ConfigError, PolyremeError, Violation
from ..plan.ir import BUCKET_BYTES, Plan
from ..runtime.place import is_launched
from . import compiling, folders, hostile
from .problem import Problem


def simulate(
    spec: specs.Spec,
    folder: Path,
    *,
    resume: str | None,
    progress: bool,
) -> runlog.Summary:
    """See `api.simulate`."""
    if is_launched():
        rule, legal = "is asked of several processes", "one process, without a launcher"
        raise ConfigError([Violation(path="simulate", value=True, rule=rule, legal=legal)])
    start_s = time.time()
    hostile.announced(spec)
    with folders.claimed(folder), compiling.said(progress):
        return _run(spec, folder, resume, progress, start_s)


def _run(
    spec: specs.Spec, folder: Path, resume: str | None, progress: bool, start_s: float
) -> runlog.Summary:
    from . import ranks, starting
    from .aftermath import conclude, next_attempt, note
    from .problem import pose, simulated_of
    from .training import judged
    from .virtual import Virtual

    cluster, accelerator = simulated_of(spec, spec.simulate.workers)
    problem = pose(spec, machines=(cluster, accelerator), apart=True)
    start = starting.begin(resume, folder, uuid.uuid4().hex)
    request = ranks.Request(
        spec=spec,
        cluster=cluster,
        accelerator=accelerator,
        folder=folder,
        plans=(plan_of(problem),),
        start=start,
        resume=start.first,
        progress=progress,
        start_s=start_s,
    )
    try:
        ranks.simulated(request, problem, partial(Virtual, spec.simulate))
    except (PolyremeError, KeyboardInterrupt) as error:
        if starting.begun(folder, start.launch) is not None:
            status: runlog.Status = "interrupted"
            if isinstance(error, PolyremeError):
                status = "failed"
                note(folder, max(0, next_attempt(folder) - 1), str(error), None, ())
            conclude(spec, folder, status, (cluster, accelerator), virtual=True)
        raise
    return judged(spec, folder)


def plan_of(problem: Problem) -> Plan:
    """Every worker on one device, its batch in microbatches of the size that was asked for."""
    from ..planner.draft import Draft, Strategy
    from ..planner.space import write_plan

    parallel, n = problem.spec.parallel, problem.cluster.n_devices
    most = -(-problem.workload.global_batch // n)
    strategy = Strategy(replica=n, recompute=parallel.recompute == "all")
    draft = Draft(
        strategies={layer.name: strategy for layer in problem.graph.layers},
        microbatches=-(-most // min(most, parallel.microbatch or most)),
        global_batch=problem.workload.global_batch,
        bucket_bytes=parallel.bucket_bytes or BUCKET_BYTES,
        overlap=True,
    )
    return write_plan(draft, problem.workload)
