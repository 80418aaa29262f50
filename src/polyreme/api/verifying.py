"""`polyreme verify`: the plan of a spec beside a plain loop in one process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from .. import spec as specs
from ..algo.compose import DataParallel
from ..cluster.accelerator import Accelerator
from ..cluster.types import Cluster
from ..errors import ConfigError, PolyremeError, Violation
from ..plan import store as plans
from ..plan.describe import describe
from ..plan.ir import Plan
from ..runtime.launch import PRELOAD, Launcher
from ..runtime.place import is_launched, read_place
from . import steps
from .problem import Problem, here, pose

if TYPE_CHECKING:
    from ..reference.loop import Reference
    from ..runtime.job import Job
    from ..runtime.mesh import World
    from ..runtime.verify import Tolerance, Verdict

Dtype = Literal["float64", "float32"]
_PRELOAD = ("polyreme.api.verifying", "polyreme.runtime.verify")
_PRECISIONS: dict[Dtype, Literal["fp64", "fp32"]] = {"float64": "fp64", "float32": "fp32"}
_LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a plan computes what one process computes, and the largest errors seen.

    Both run without dropout and compilation, in `dtype` throughout.
    `max_grad_error` and `max_parameter_error` are norms of differences of one tensor, over the
    larger of its norm and a thousandth of the norm over all (in float32 the latter are of
    updates); `tolerance` bounds them,
    `loss_tolerance` the relative error of the loss. `first_parameter` is the first that differs
    (None: none does, or the loss alone), `difference` says in words what, where and by how much.
    """

    passed: bool
    dtype: Dtype
    steps: int
    max_loss_error: float
    max_grad_error: float
    max_parameter_error: float
    first_parameter: str | None
    difference: str | None
    tolerance: float
    loss_tolerance: float
    plan: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What ranks are told. Without a plan (under a launcher from outside) they choose it.

    With `progress` the first says what it does.
    """

    spec: specs.Spec
    cluster: Cluster
    accelerator: Accelerator
    plan: Plan | None
    dtype: Dtype
    n_steps: int
    progress: bool = False


def verify(
    spec: specs.Spec,
    *,
    devices: int | None,
    plan: str | Path | Plan | None,
    n_steps: int,
    dtype: Dtype,
    progress: bool,
) -> Verification | None:
    """See `api.verify`."""
    named = plan or spec.parallel.plan
    given = plans.load(Path(named)) if isinstance(named, str | Path) else named
    steps.refuse_unlike(spec)
    cluster, accelerator = here(spec, None if is_launched() else devices)
    trial = Trial(
        spec=spec,
        cluster=cluster,
        accelerator=accelerator,
        plan=given,
        dtype=dtype,
        n_steps=n_steps,
        progress=progress,
    )
    if is_launched():
        if given is not None:
            steps.fills(given, cluster)
        found = work(trial)
        return found if read_place().rank == 0 else None
    from .ranks import n_devices

    with Launcher(preload=(*PRELOAD, *_PRELOAD, *spec.imports)) as launcher:
        problem = pose(spec, machines=(cluster, accelerator))
        all_devices = steps.number_is_asked(spec, devices, accelerator)
        chosen = _plan(problem, given, all_devices=all_devices)
        results: list[Verification] = launcher.run(
            work,
            (dataclasses.replace(trial, plan=chosen),),
            n_processes=n_devices(chosen),
            grace_s=0.0,  # there is nothing to save
            timeout_s=spec.train.timeout_s,
        )
    return results[0]


def work(trial: Trial) -> Verification:
    """What each rank does."""
    import torch

    from ..runtime import mesh

    accelerator, timeout_s = trial.accelerator, trial.spec.train.timeout_s
    if accelerator.on_host:
        torch.set_num_threads(1)
    world = mesh.open(accelerator, timeout_s, watch=True)
    try:
        problem = pose(trial.spec, machines=(trial.cluster, accelerator))
        chosen = _on_first(world, lambda: _plan(problem, trial.plan, all_devices=True))
        with accelerator.full_float32():
            return beside_reference(problem, chosen, world, trial)
    finally:
        mesh.close(world)


def beside_reference(problem: Problem, plan: Plan, world: World, trial: Trial) -> Verification:
    """Verify a plan on all ranks together; the same on all."""
    from ..runtime.verify import Tolerance
    from ..runtime.verify import verify as beside

    def say(what: str) -> None:
        if trial.progress and world.is_first:
            sys.stderr.write(f"polyreme: {what}\n")

    if not trial.spec.data_parallel.is_plain:
        say("the split of a replica is verified; its algorithm ([data_parallel]) is left out")

    dtype, n_steps = trial.dtype, trial.n_steps
    say(f"verifying {describe(plan)} in {dtype}: making the reference")
    job = _job(problem, plan, dtype)
    tolerance = Tolerance(
        loss=_LOSS_TOLERANCE[dtype], tensor=_TOLERANCE[dtype], apart=dtype == "float64"
    )
    oracle = _on_first_alone(world, lambda: _reference(problem, job, world))
    say("running the plan beside it")
    verdict = beside(job, world, oracle, n_steps=n_steps, tolerance=tolerance)
    return _verification(verdict, tolerance, dtype, plan)


def _on_first(world: World, choose: Callable[[], Plan]) -> Plan:
    """What rank 0 chooses, on all ranks; what it raises is raised on all."""
    found: Plan | PolyremeError | None = None
    if world.is_first:
        try:
            found = choose()
        except PolyremeError as error:
            found = error
    found = world.gather(found)[0]
    if isinstance(found, PolyremeError):
        raise found
    assert found is not None, "rank 0 gave something"
    return found


def _on_first_alone(world: World, make: Callable[[], Reference]) -> Reference | None:
    with world.record.doing("making the reference"):
        return make() if world.is_first else None


def _plan(problem: Problem, given: Plan | None, *, all_devices: bool) -> Plan:
    """The given plan, checked, or the best one by kept or else assumed costs.

    Raises ConfigError for one that is not to compute what one process computes.
    """
    if given is not None:
        chosen = steps.given_plan(problem, given)
    else:
        costs = steps.kept_profile(problem) or steps.assumed_profile(problem)
        chosen = steps.best_plans(problem, costs, all_devices=all_devices)[0]
    if any(action.weight_version for own in chosen.order for action in own):
        rule = "updates within a step, on weights of other versions than one process would read"
        legal = "an order that is synchronous (see `polyreme list orders`)"
        name = chosen.order_name
        raise ConfigError([Violation(path="parallel.order", value=name, rule=rule, legal=legal)])
    return chosen


def _job(problem: Problem, plan: Plan, dtype: Dtype) -> Job:
    """The run of the plan without dropout, in this dtype; buckets hold the same parameters.

    What is held to the reference is the split: training is plain, by the spec's rule.
    """
    from ..graph.dropout import without_dropout
    from ..runtime.job import Job

    width = {"fp64": 8, "fp32": 4, "bf16": 4}  # bytes of a master parameter
    precision = _PRECISIONS[dtype]
    spec = problem.spec
    return Job(
        graph=without_dropout(problem.graph),
        plan=msgspec.structs.replace(
            plan,
            precision=precision,
            bucket_bytes=max(1, plan.bucket_bytes * width[precision] // width[plan.precision]),
        ),
        source=spec.data.open(spec.train.seq_len, spec.train.seed),
        train=spec.train,
        algorithm=DataParallel(rule=spec.data_parallel.rule),
        partition=spec.data.partition,
    )


def _reference(problem: Problem, job: Job, world: World) -> Reference:
    import torch

    from ..reference.loop import Cut, Reference
    from ..reference.model import plain
    from ..runtime.making import grid_for

    spec, layout = problem.spec, grid_for(job.plan)
    return Reference(
        plain(spec.model, problem.graph, job.source.sample, spec.train.seed, world.device),
        source=job.source,
        order=steps.arranged(spec, job.source, n_workers=layout.replica),
        cut=Cut(replica=layout.replica, shard=layout.shard, microbatches=job.plan.microbatches),
        train=spec.train,
        rule=spec.data_parallel.rule,
        labels=problem.graph.labels,
        fields=tuple(problem.graph.inputs),
        dtype={"fp64": torch.float64, "fp32": torch.float32}[job.plan.precision],
        device=world.device,
    )


def _verification(verdict: Verdict, tolerance: Tolerance, dtype: Dtype, plan: Plan) -> Verification:
    first = verdict.first
    return Verification(
        passed=first is None,
        dtype=dtype,
        steps=verdict.steps,
        max_loss_error=verdict.max_loss_error,
        max_grad_error=verdict.max_grad_error,
        max_parameter_error=verdict.max_parameter_error,
        first_parameter=None if first is None else first.name,
        difference=None if first is None else first.words,
        tolerance=tolerance.tensor,
        loss_tolerance=tolerance.loss,
        plan=describe(plan),
    )
