"""The steps before training: a profile measured, kept, assumed or given; a plan given."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..cluster.detect import hardware
from ..errors import ConfigError, Violation
from ..plan import store as plans
from ..plan.ir import Plan, degree, hash_inputs, stale_inputs
from ..profile import galvatron, store
from ..profile.facts import facts_of
from ..profile.record import Profile
from ..spec import Spec
from .problem import Problem, not_here

if TYPE_CHECKING:
    from ..cluster.accelerator import Accelerator
    from ..cluster.types import Cluster
    from ..data.order import Ordering
    from ..data.source import Source
    from ..plan.options import Parallel


_SAID_EVERY_S = 3.0


def assumed_profile(problem: Problem) -> Profile:
    """Costs from the cluster's figures. Raises ConfigError naming a figure that is unknown."""
    from ..profile.assume import assume

    return assume(problem.graph, problem.cluster, problem.workload.precision)


def kept_profile(problem: Problem) -> Profile | None:
    """The profile kept from an earlier run on this machine, if it is still valid."""
    wanted = store.inputs_hash(problem.graph, problem.cluster, problem.workload.precision)
    folder = store.cache_folder(os.environ)
    batch = problem.workload.global_batch
    return store.cached(
        folder,
        wanted,
        batch,
        hardware(problem.cluster),
        store.versions(),
        compiled=problem.spec.train.compile,
    )


def keep_profile(profile: Profile) -> None:
    """Keep a profile for later runs; a folder that cannot be written keeps none."""
    folder = store.cache_folder(os.environ)
    path = store.cache_path(
        folder, profile.inputs_hash, profile.global_batch, compiled=profile.compiled
    )
    if os.access(_existing(path), os.W_OK):
        store.save(profile, path)


def measured_profile(problem: Problem, *, fresh: bool = False) -> Profile:
    """The kept profile, or one measured now on all devices of the problem."""
    from ..runtime.launch import Launcher
    from .ranks import measured

    if problem.accelerator is None:
        raise not_here(problem)
    kept = None if fresh else kept_profile(problem)
    if kept is not None:
        return kept
    args = (problem.spec, problem.cluster, problem.accelerator)
    with Launcher() as launcher:
        results = launcher.run(measured, args, n_processes=problem.cluster.n_devices)
    found: Profile = results[0]
    keep_profile(found)
    return found


def refuse_unlike(spec: Spec) -> None:
    """Raise ConfigError where plans are asked for that can be found and priced, and not run."""
    if spec.parallel.layouts == "unlike":
        rule, legal = "is planned, but not executable yet", '"alike" (or `polyreme plan`)'
        path, value = "parallel.layouts", spec.parallel.layouts
        raise ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])


def something_offered(problem: Problem, parallel: Parallel) -> None:
    """Raise ConfigError where fixes leave no plan to choose, whatever it costs."""
    from ..planner.hybrid import spaces
    from ..planner.refusals import unsliced

    if refused := [*unsliced(problem.graph, parallel)]:
        raise ConfigError(refused)
    next(spaces(problem.graph, problem.cluster, problem.workload, parallel))


def best_plans(
    problem: Problem,
    profile: Profile,
    *,
    all_devices: bool,
    top: int = 5,
    solver: str = "exact",
    progress: bool = False,
) -> tuple[Plan, ...]:
    """The best plans, best first; with `progress` long searches say on stderr how far they are.

    Raises:
        Infeasible: none fits.
    """
    from ..planner.search import search

    return search(
        problem.graph,
        problem.cluster,
        profile,
        problem.workload,
        problem.spec.parallel,
        top=top,
        all_devices=all_devices,
        solver=solver,
        tell=_Teller() if progress else None,
    )


class _Teller:
    """Says what it hears on stderr, at most every few seconds."""

    def __init__(self) -> None:
        self._start_s = self._said_s = time.monotonic()

    def __call__(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAID_EVERY_S:
            self._said_s = now_s
            sys.stderr.write(f"polyreme: searching for {now_s - self._start_s:.0f} s: {what}\n")


def priced(problem: Problem, profile: Profile, given: str | Path) -> Plan:
    """A plan that the user names, ours or Galvatron's, with what it costs.

    Raises:
        ConfigError: it cannot be read, is for another model or batch, or has parts that are wrong,
            or cannot be priced.
    """
    from ..plan.check import check
    from ..planner.galvatron import PREFIX, read_galvatron_draft
    from ..planner.given import price_draft
    from ..planner.search import price

    parts = problem.graph, problem.cluster, profile, problem.workload
    if str(given).startswith(PREFIX):
        return price_draft(*parts, read_galvatron_draft(str(given), problem.graph))
    found = plans.load(Path(given))
    inputs = hash_inputs(problem.graph, problem.cluster, problem.workload)
    if "graph" not in stale_inputs(found.inputs_hash, inputs) or not found.inputs_hash:
        found = msgspec.structs.replace(found, inputs_hash=inputs)  # priced on other machines
    bare = msgspec.structs.replace(found, estimate=None, search=None)
    violations = check(bare, problem.graph, problem.cluster, problem.workload, unlike=True)
    if violations:
        raise ConfigError(violations)
    return price(*parts, found)


def costs_of(problem: Problem, profile: str | Path | Profile | None, *, assume: bool) -> Profile:
    """Costs from where the user says, or measured now. Raises ConfigError for two at once."""
    if profile is None:
        return assumed_profile(problem) if assume else measured_profile(problem)
    if assume:
        rule, legal = "stands beside --profile, which has all costs", "one of the two"
        raise ConfigError([Violation(path="--assume", value=None, rule=rule, legal=legal)])
    return given_profile(problem, profile)


def number_is_asked(spec: Spec, devices: int | None, accelerator: Accelerator | None) -> bool:
    """Whether the user said how many devices of this machine there shall be: then all are used."""
    if accelerator is None:
        return False
    of_host = spec.cluster.cpu_processes if accelerator.on_host else None
    return any(number is not None for number in (devices, spec.cluster.devices, of_host))


def arranged(spec: Spec, source: Source, *, n_workers: int) -> Ordering:
    """The order in which samples are read. Raises ConfigError where batch and data do not fit."""
    from ..data.order import arrange

    return arrange(
        source,
        spec.data.partition,
        n_workers=n_workers,
        global_batch=spec.train.global_batch,
        seed=spec.train.seed,
        tail=spec.train.tail,
    )


def given_profile(problem: Problem, profile: str | Path | Profile) -> Profile:
    """A profile that the user names. Raises ConfigError saying what it was made for instead."""
    if str(profile).startswith(galvatron.PREFIX):
        precision = problem.workload.precision
        return galvatron.read_galvatron(str(profile), problem.graph, problem.cluster, precision)
    found = profile if isinstance(profile, Profile) else store.load(Path(profile))
    wanted = store.inputs_hash(problem.graph, problem.cluster, problem.workload.precision)
    batch = problem.workload.global_batch
    facts = facts_of(problem.graph, problem.cluster)
    there = hardware(problem.cluster)
    reasons = store.valid(
        found,
        wanted,
        batch,
        there,
        found.versions,
        facts,
        compiled=problem.spec.train.compile,
    )
    graph, n_devices = problem.graph, problem.cluster.n_devices
    lacking = store.missing(found, [layer.kind for layer in graph.layers], n_devices)
    lacking += store.missing_parts(found, graph, n_devices, problem.spec.parallel.tp)
    reasons = reasons or [f"lacks {name}" for name in lacking]
    if reasons:
        value = "a profile" if isinstance(profile, Profile) else str(profile)
        legal = (
            "a profile of this model, cluster, precision and batch, of layers compiled or not "
            "(measure again: polyreme profile), or assumed costs (--assume)"
        )
        raise ConfigError(
            [
                Violation(path="--profile", value=value, rule=reason, legal=legal)
                for reason in reasons
            ]
        )
    return found


def given_plan(problem: Problem, plan: str | Path | Plan) -> Plan:
    """A plan that the user names, checked. Raises ConfigError with every violation."""
    from ..plan.check import check as check_plan

    found = plan if isinstance(plan, Plan) else plans.load(Path(plan))
    violations = check_plan(found, problem.graph, problem.cluster, problem.workload)
    if violations:
        raise ConfigError(violations)
    return found


def fills(plan: Plan, cluster: Cluster) -> None:
    """Raise ConfigError if a plan leaves processes of a launcher without work."""
    from .ranks import n_devices

    used = n_devices(plan)
    if used < cluster.n_devices:
        n = cluster.n_devices
        rule = f"uses fewer devices than the launcher started processes: {n}"
        legal = f"a plan for {n} devices, or {used} processes"
        raise ConfigError([Violation(path="plan", value=used, rule=rule, legal=legal)])


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(folder for folder in path.parents if folder.exists())


def n_replicas(plan: Plan) -> int:
    """Workers of a plan."""
    return max(degree(layer.split, "replica") for layer in plan.layer_plans.values())
