"""Everything wrong with a spec, with its fit to data and machine, and with a plan, at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import spec as specs
from ..algo.compose import DataParallel
from ..algo.train import Train
from ..errors import ConfigError, Violation
from ..spec import Partial, Unread
from ..spec.partial import checked

if TYPE_CHECKING:
    from ..cluster.accelerator import Accelerator
    from ..cluster.types import Cluster
    from ..plan.ir import Plan
    from .problem import Problem

_T = TypeVar("_T")
_DEGREES = ("replica", "shard", "tp", "cp", "pp")


class _Found:
    """Violations as they are found, each once."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, violations: Sequence[Violation]) -> None:
        known = {(each.path, each.rule) for each in self.violations}
        self.violations += [each for each in violations if (each.path, each.rule) not in known]

    def of(self, step: Callable[[], _T]) -> _T | None:
        """What the step gives; nothing where it finds faults, or cannot be judged for others."""
        try:
            return step()
        except Unread:
            return None
        except ConfigError as error:
            self.add(error.violations)
            return None


def violations(
    source: Path | Mapping[str, Any],
    overrides: Sequence[str],
    plan: Path | None,
    devices: int | None,
    workers: int | None = None,
    cluster: str | None = None,
) -> tuple[Violation, ...]:
    """Every violation; what cannot be judged because of another one is left out.

    With `workers` the spec is judged for that many simulated ones, with `cluster` for machines
    that are elsewhere. The model is built (which takes
    seconds) once nothing else is wrong; with a plan in any case.
    """
    found = _Found()
    if workers is not None:
        overrides = (*overrides, f"simulate.workers={workers}")
    spec = found.of(lambda: _read(source, overrides, found))
    named = plan or (None if spec is None else found.of(lambda: spec.parallel.plan))
    given = None if named is None else found.of(lambda: _plan(Path(named)))
    machines = None
    if spec is not None and (not found.violations or named or found.of(lambda: _counts(spec))):
        machines = found.of(lambda: _machines(spec, devices, workers, cluster))
    there = machines[0] if machines else None
    if spec is not None and (there is not None or devices is not None):
        n_devices = there.n_devices if there is not None else devices
        found.add(specs.impossible(spec, n_devices))
        if found.violations and workers is None and machines is not None and not named:
            _ask_model(spec, machines, found)
    if spec is not None and workers is not None:
        found.add(_split(spec, workers))
    elif spec is not None:
        from .steps import refuse_unlike

        found.of(lambda: refuse_unlike(spec))
    problem = None
    if spec is not None and machines is not None and (not found.violations or given is not None):
        problem = found.of(lambda: _problem(spec, machines, found.violations))
    if problem is not None:
        assert spec is not None
        n_params = problem.graph.param_count
        found.of(lambda: _right(spec.data_parallel.sync).fits(n_params))
        found.of(
            lambda: _ordered(problem, given, workers or found.of(lambda: _n_workers(spec, there)))
        )
    if given is not None:
        found.add(_of_plan(given, problem, there))
    elif problem is not None and not found.violations and workers is None:
        from .problem import with_workers
        from .steps import something_offered

        assert spec is not None
        parallel = with_workers(spec, problem.cluster.n_devices).parallel
        found.of(lambda: something_offered(problem, parallel))
    return tuple(found.violations)


def _ask_model(
    spec: specs.Spec, machines: tuple[Cluster, Accelerator | None], found: _Found
) -> None:
    """Have the model judge fixes too where all that is wrong so far are fixes."""
    from .problem import about_fixes, with_model

    wrong = tuple(found.violations)
    problem = None
    if about_fixes(wrong):
        problem = found.of(lambda: _problem(spec, machines, wrong))
    if problem is not None:
        graph, n_devices = problem.graph, problem.cluster.n_devices
        found.violations = found.of(lambda: with_model(spec, graph, n_devices, wrong)) or [*wrong]


def _read(source: Path | Mapping[str, Any], overrides: Sequence[str], found: _Found) -> specs.Spec:
    document = source if isinstance(source, Mapping) else specs.toml(source)
    spec, wrong = specs.examine(document, overrides)
    found.add(wrong)
    return spec


def _plan(path: Path) -> Plan:
    from ..plan import store

    return store.load(path)


def _counts(spec: specs.Spec) -> bool:
    """Whether a rule asks how many devices there are."""
    asked = [getattr(spec.parallel, axis) for axis in _DEGREES]
    asked += [spec.train.min_devices, spec.cluster.devices]
    if any(number is not None for number in asked):
        return True
    topology = DataParallel().topology
    return spec.data_parallel.topology != topology or not spec.data_parallel.is_plain


def _n_workers(spec: specs.Spec, cluster: Cluster | None) -> int | None:
    """How many workers an algorithm has; none where the plan decides it."""
    if cluster is None or spec.data_parallel.is_plain:
        return None
    return spec.parallel.replica or max(1, cluster.n_devices // spec.parallel.inside)


def _machines(
    spec: specs.Spec, devices: int | None, workers: int | None, cluster: str | None
) -> tuple[Cluster, Accelerator | None]:
    from .problem import machines_of, simulated_of

    return machines_of(spec, cluster, devices) if workers is None else simulated_of(spec, workers)


def _split(spec: specs.Spec, workers: int) -> list[Violation]:
    from .problem import split

    return checked(partial(split, spec, workers), "parallel")


def _problem(
    spec: specs.Spec,
    machines: tuple[Cluster, Accelerator | None],
    wrong: Sequence[Violation],
) -> Problem | None:
    """The problem, if all that it is made of is right."""
    from .problem import posed

    if any(_section(each) in ("model", "data") or each.path == "train.seq_len" for each in wrong):
        return None
    train = spec.train
    whole = specs.Spec(
        model=_right(spec.model),
        data=_right(spec.data),
        train=Train(
            steps=1,
            global_batch=train.global_batch,
            seq_len=train.seq_len,
            seed=train.seed,
            precision=train.precision,
            tail=train.tail,
        ),
        data_parallel=DataParallel(rule=_right(spec.data_parallel.rule)),
    )
    return posed(whole, *machines)


def _right(table: _T) -> _T:
    if type(table) is Partial:
        raise Unread
    return table


def _section(violation: Violation) -> str:
    return violation.path.partition(".")[0]


def _ordered(problem: Problem, plan: Plan | None, workers: int | None) -> None:
    """Batch, data and the workers of a plan, or else of an algorithm, must go together."""
    from ..plan.grid import even_degrees
    from .steps import arranged

    spec = problem.spec
    degrees = None
    if plan is not None and plan.layer_plans:
        degrees = even_degrees(next(iter(plan.layer_plans.values())).split)
    if spec.data.partition is not None and degrees is None and workers is None:
        return  # dealt by the number of replicas, which the plan decides
    source = spec.data.open(spec.train.seq_len, spec.train.seed)
    n_workers = 1
    if spec.data.partition is not None:
        n_workers = degrees.replica if degrees is not None else workers or 1
    arranged(spec, source, n_workers=n_workers)


def _of_plan(plan: Plan, problem: Problem | None, cluster: Cluster | None) -> list[Violation]:
    from ..plan.check import check, check_alone

    if problem is None:
        return check_alone(plan, cluster)
    return check(plan, problem.graph, problem.cluster, problem.workload)
