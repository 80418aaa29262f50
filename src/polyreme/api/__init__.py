"""One function a command: each takes a spec and writes or returns what the next step reads.

A spec is a path, tables as `tomllib` gives them, or a `Spec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import spec as specs
from ..errors import ConfigError, Violation
from .advising import advise as advise
from .advising import show_advice as show_advice
from .doctor import doctor as doctor
from .doctor import is_broken as is_broken
from .doctor import show_doctor as show_doctor
from .exporting import export as export
from .exporting import known_tool as known_tool
from .fixing import fixed as fixed
from .listing import listing as listing
from .show import show_explanation as show_explanation
from .show import show_exported as show_exported
from .show import show_listing as show_listing
from .show import show_plans as show_plans
from .show import show_profile as show_profile
from .show import show_run as show_run
from .show import show_verification as show_verification

if TYPE_CHECKING:
    from ..graph.layer import LayerGraph
    from ..plan.ir import Plan
    from ..profile.record import Profile
    from ..runlog import Summary
    from ..runtime.weights import Moved
    from ..sample import SampleSpec
    from .exchange import Cast
    from .explaining import Explanation
    from .verifying import Dtype, Verification

PathLike = str | Path
SpecLike = PathLike | Mapping[str, Any] | specs.Spec


def read(
    spec: SpecLike,
    overrides: Sequence[str] = (),
    *,
    devices: int | None = None,
    trusted: Sequence[str] = (),
) -> specs.Spec:
    """A checked spec. Raises ConfigError with every violation."""
    source = _source(spec)
    if isinstance(source, Mapping):
        found = specs.parse(source, overrides, trusted=trusted)
    else:
        found = specs.load(source, overrides, trusted=trusted)
    violations = specs.check(found, devices, trusted=trusted) if devices is not None else []
    if violations:
        raise ConfigError(violations)
    return found


def _source(spec: SpecLike) -> Path | Mapping[str, Any]:
    """The tables of a spec, or its path. Raises ConfigError for anything else."""
    if isinstance(spec, str | Path):
        return Path(spec)
    if isinstance(spec, specs.Spec):
        return specs.tables(spec)
    if isinstance(spec, Mapping):
        return spec
    rule, legal = "is no specification", '"spec.toml", a dict of its tables, or a Spec'
    kind = type(spec).__name__
    raise ConfigError([Violation(path="spec", value=kind, rule=rule, legal=legal)])


def graph(model: Any, sample: SampleSpec, **parts: Any) -> LayerGraph:
    """A module or a transformers configuration as a graph of layers: `graph.from_module`.

    Raises:
        ConfigError: `sample` is no SampleSpec, or the module cannot be cut.
    """
    from ..graph.module import from_module
    from ..sample import SampleSpec

    if not isinstance(sample, SampleSpec):
        rule = "is no description of a sample"
        legal = (
            'pr.SampleSpec(fields={"features": pr.TensorSpec((64,), "float32"), '
            '"labels": pr.TensorSpec((), "int64")}, n_classes=10)'
        )
        kind = type(sample).__name__
        raise ConfigError([Violation(path="sample", value=kind, rule=rule, legal=legal)])

    return from_module(model, sample, **parts)


def profile(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    out: PathLike | None = None,
    assume: bool = False,
    cluster: str | None = None,
    devices: int | None = None,
) -> Profile:
    """Measure the costs of a model's layers and links here, or assume them from known figures.

    Raises:
        ConfigError: the spec is wrong, or the cluster is elsewhere and `assume` is not set.
    """
    from ..profile import store
    from .folders import writable
    from .problem import pose
    from .steps import assumed_profile, measured_profile

    if out is not None:
        writable(Path(out))
    problem = pose(
        read(spec, overrides, devices=devices, trusted=("data",)),
        cluster=cluster,
        devices=devices,
    )
    found = assumed_profile(problem) if assume else measured_profile(problem, fresh=True)
    if out is not None:
        store.save(found, Path(out))
    return found


def plan(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    profile: PathLike | Profile | None = None,
    assume: bool = False,
    cluster: str | None = None,
    devices: int | None = None,
    top: int = 5,
    solver: str = "exact",
    given: PathLike | None = None,
    out: PathLike | None = None,
    progress: bool = False,
) -> tuple[Plan, ...]:
    """The best plans, best first; the first holds the record of the search.

    Costs come from `profile`, from the cluster's figures (`assume`), or else are measured here.
    `solver` is one of ``polyreme list solvers``. A plan file, `given`, is priced; nothing is
    searched. Galvatron's profiles and plans are named ``galvatron:PATH``. `progress`: on stderr.

    Raises:
        ConfigError: the spec is wrong, the profile was made for something else, or there is no such
            solver.
        Infeasible: no plan fits.
    """
    from ..plan import store as plans
    from ..planner.solve import known
    from .folders import writable
    from .problem import pose
    from .steps import (
        best_plans,
        costs_of,
        number_is_asked,
        priced,
        something_offered,
    )

    known.find(solver, "--solver")
    if out is not None:
        writable(Path(out))
    posed = read(spec, overrides, devices=devices, trusted=("data",))
    problem = pose(posed, cluster=cluster, devices=devices)
    if given is None:
        something_offered(problem, problem.spec.parallel)
    costs = costs_of(problem, profile, assume=assume)
    found: tuple[Plan, ...]
    if given is not None:
        found = (priced(problem, costs, given),)
    else:
        asked = number_is_asked(problem.spec, devices, problem.accelerator)
        found = best_plans(
            problem, costs, all_devices=asked, top=top, solver=solver, progress=progress
        )
    if out is not None:
        plans.save(found[0], Path(out), found)
    return found


def plan_json(plans: Sequence[Plan]) -> dict[str, Any]:
    """The best plan as it stands in a file, with `top`: all of them with their estimates."""
    import msgspec

    from ..plan.store import encode

    whole = [msgspec.json.decode(encode(each)) for each in plans]
    top = [{"plan": each, "estimate": each.get("estimate")} for each in whole]
    return {**whole[0], "top": top}


def explain(
    plan: Path | str, *, out: Path | str | None = None, trace: Path | str | None = None
) -> Explanation:
    """Why the plan of a file won: in words, as a page (`out`), as a Chrome trace (`trace`).

    Raises:
        ConfigError: the file is no plan, was never priced, or lacks what is asked for.
        RunError: the disk is full.
    """
    from .explaining import explain as run

    return run(
        plan,
        out=None if out is None else Path(out),
        trace=None if trace is None else Path(trace),
    )


def train(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    out: PathLike | None = None,
    devices: int | None = None,
    plan: PathLike | Plan | None = None,
    resume: str | None = None,
    progress: bool = False,
    attack: bool = False,
) -> Summary | None:
    """Profile if no valid profile is kept, plan if none is given, train, and make the report.

    Under torchrun or Slurm this process joins as one rank, and only rank 0 gets the summary. With
    `attack` the workers that `simulate.attack` names are hostile here too.

    Raises:
        ConfigError: the spec is wrong, or a plan or checkpoint was made for something else.
        Infeasible: no plan fits.
        RunError: the run failed; the folder holds what it left.
    """
    from .training import train as run

    found = read(spec, overrides, devices=devices)
    return run(
        found,
        run_folder(spec, out),
        devices=devices,
        plan=plan,
        resume=resume,
        progress=progress,
        attack=attack,
    )


def simulate(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    out: PathLike | None = None,
    resume: str | None = None,
    progress: bool = False,
) -> Summary:
    """Train all workers of the algorithm in this process, on a virtual clock.

    What they compute is what processes compute; seconds are those of `[simulate]`. `workers`
    takes the place of `simulate.workers`. The folder is that of a run; a run in processes may go
    on from its checkpoints, and the other way round.

    Raises:
        ConfigError: the spec is wrong, or the checkpoint is of something else.
        RunError: the run failed; the folder holds what it left.
    """
    from .simulating import simulate as run

    more = () if workers is None else (f"simulate.workers={workers}",)
    found = read(spec, (*overrides, *more))
    return run(found, run_folder(spec, out), resume=resume, progress=progress)


def run_folder(spec: SpecLike, out: PathLike | None) -> Path:
    """Where a run of this spec is written: `out`, or ``runs/`` and the spec's name."""
    if out is not None:
        return Path(out)
    return Path("runs") / (Path(spec).stem if isinstance(spec, str | Path) else "run")


def check(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    plan: Path | None = None,
    devices: int | None = None,
    workers: int | None = None,
    cluster: str | None = None,
) -> None:
    """Raise ConfigError with everything that is wrong with a spec, or with a plan for it.

    With `workers` it is judged as `simulate` with so many would run it, not as `train`; with
    `cluster` for machines that are elsewhere.
    """
    from .checking import violations

    found = violations(_source(spec), overrides, plan, devices, workers, cluster)
    if found:
        raise ConfigError(found)


def verify(
    spec: SpecLike,
    *,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    plan: PathLike | Plan | None = None,
    steps: int = 3,
    dtype: Dtype = "float64",
    progress: bool = False,
) -> Verification | None:
    """Run the first steps of a plan beside a plain loop in one process, without dropout.

    Without `plan` it is the spec's, by the kept profile or else by assumed costs. The losses and
    gradients of all steps are compared on every rank, then the parameters after them (in float32
    the update of each step). With `progress` what is done is said on stderr.
    Under torchrun or Slurm this process joins as one rank, and only rank 0 gets the result.

    Raises:
        ConfigError: the spec is wrong, or the plan was made for something else.
        Infeasible: no plan fits.
        RunError: a step was not finite, or a process failed.
    """
    from .verifying import verify as run

    found = read(spec, overrides, devices=devices)
    return run(found, devices=devices, plan=plan, n_steps=steps, dtype=dtype, progress=progress)


def weights(
    direction: Literal["import", "export"],
    spec: SpecLike,
    *,
    source: Path | str,
    to: Path | str,
    dtype: Cast | None = None,
    overrides: Sequence[str] = (),
) -> Moved:
    """Make a checkpoint of Hugging Face's safetensors ("import"), or those of one ("export").

    An import makes a run folder that `train` resumes from. `dtype` is what an export casts
    floating-point parameters to.

    Raises:
        ConfigError: what is read is damaged or another model's, or `to` is taken.
        RunError: it cannot be written.
    """
    from .exchange import move_weights

    found = read(spec, overrides, trusted=("data",))
    return move_weights(direction, found, source=Path(source), to=Path(to), dtype=dtype)


def report(
    runs: Sequence[Path | str] | Path | str,
    *,
    out: PathLike | None = None,
    reference: Path | None = None,
    target: str | None = None,
) -> Path:
    """The page of one run, or the comparison of several. Raises ConfigError if one is no run."""
    from ..report.page import render

    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    page = Path(out) if out else (folders[0] if len(folders) == 1 else Path()) / "report.html"
    return render(folders, page, reference=reference, target=target)


def run_json(run: Path | str) -> dict[str, Any]:
    """What a run came to, as plain numbers; null where unknown."""
    from ..report.runs import read_run
    from ..report.tables import summary_json

    return summary_json(read_run(Path(run)))
