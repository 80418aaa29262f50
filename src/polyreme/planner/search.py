"""From a model, devices and costs to the best plans, each with what it costs and why."""

from __future__ import annotations

import time

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError, Infeasible
from ..graph.layer import LayerGraph
from ..plan.check_played import version_violations
from ..plan.ir import Estimate, Plan, Rejected, Search, Workload, hash_inputs
from ..plan.options import Parallel
from ..profile.fit import Fit
from ..profile.record import Profile
from ..units import show_bytes, show_seconds
from .cost.data import DataCost, StepTime
from .cost.memory import Memory
from .cost.pipeline import StepCost
from .draft import Draft, describe_draft, read_draft
from .refusals import unsliced
from .room import Fitting
from .solve import Candidate, Solution
from .solve.grid import grid
from .space import offer, write_plan
from .ways_out import Problem, ways_out

DEADLINE_S = 60.0


def search(
    graph: LayerGraph,
    cluster: Cluster,
    profile: Profile,
    workload: Workload,
    parallel: Parallel,
    *,
    top: int = 5,
    all_devices: bool = False,
) -> tuple[Plan, ...]:
    """The best plans, best first; the first holds the record of the search.

    With `all_devices` none stays unused, unless the batch or a fixed degree leaves no other way.

    Raises:
        ConfigError: a fixed part is impossible here.
        Infeasible: no plan fits the memory; says what is missing and what would help.
    """
    start_s = time.monotonic()
    if refused := [*unsliced(graph, parallel)]:
        raise ConfigError(refused)
    fit = Fit(profile)
    kinds = {layer.kind for layer in graph.layers}
    seconds = {kind: fit.forward_s(kind, 1) + fit.backward_s(kind, 1) for kind in kinds}
    space = offer(graph, cluster, workload, parallel, all_devices=all_devices, seconds=seconds)
    memory = Memory(graph, workload, parallel.tp or 1)
    fitting = Fitting(memory, profile, cluster)
    cost = StepCost(DataCost(memory, profile, cluster))
    solution = grid(graph, space, cost, fitting, DEADLINE_S)
    best = solution.candidates[0]
    if not best.room.fits:
        problem = Problem(graph=graph, cluster=cluster, workload=workload, parallel=parallel)
        raise _infeasible(best, problem, fitting)
    kept = [
        msgspec.structs.replace(candidate, draft=cost.ordered(candidate.draft))
        for candidate in solution.candidates[:top]
        if candidate.room.fits
    ]
    inputs_hash = hash_inputs(graph, cluster, workload)
    plans = [
        msgspec.structs.replace(
            write_plan(candidate.draft, workload),
            estimate=_estimate(candidate.draft, candidate.time, fitting),
            inputs_hash=inputs_hash,
            assumed=profile.assumed,
        )
        for candidate in kept
    ]
    if refused := [*version_violations(plans[0], graph)]:
        raise ConfigError(refused)
    record = Search(
        solver="grid",
        objective_s=solution.objective_s,
        bound_s=solution.bound_s,
        proved=solution.proved,
        search_s=time.monotonic() - start_s,
        candidates=len(solution.candidates),
        rejected=_rejected(solution),
        unused_devices=tuple(range(best.draft.n_devices, cluster.n_devices)),
    )
    return (msgspec.structs.replace(plans[0], search=record), *plans[1:])


def price(
    graph: LayerGraph, cluster: Cluster, profile: Profile, workload: Workload, plan: Plan
) -> Plan:
    """A given plan with its estimate, whether it fits or not.

    Raises:
        ConfigError: the plan has parts that cannot be priced yet.
    """
    draft = read_draft(plan)
    memory = Memory(graph, workload, draft.strategy.tp)
    fitting = Fitting(memory, profile, cluster)
    time_s = StepCost(DataCost(memory, profile, cluster))(draft)
    return msgspec.structs.replace(
        plan,
        estimate=_estimate(draft, time_s, fitting),
        inputs_hash=hash_inputs(graph, cluster, workload),
        assumed=profile.assumed,
    )


def _estimate(draft: Draft, time: StepTime, fitting: Fitting) -> Estimate:
    return Estimate(
        step_s=time.step_s,
        compute_s=time.compute_s,
        comm_s=time.comm_s,
        exposed_comm_s=time.exposed_comm_s,
        memory=fitting.by_device(draft),
    )


def _rejected(solution: Solution) -> tuple[Rejected, ...]:
    """All candidates but the best, each with why it lost."""
    best_s = solution.candidates[0].time.step_s
    return tuple(
        Rejected(plan=describe_draft(candidate.draft), reason=_reason(candidate, best_s))
        for candidate in solution.candidates[1:]
    )


def _reason(candidate: Candidate, best_s: float) -> str:
    room, step_s = candidate.room, candidate.time.step_s
    if not room.fits:
        cause = room.largest_cause
        return (
            f"does not fit: {show_bytes(room.over_bytes)} over on device {room.device} "
            f"({cause} {show_bytes(room.need_bytes[cause])})"
        )
    if f"{step_s:.12g}" == f"{best_s:.12g}":
        return f"as fast ({show_seconds(step_s)}), but less simple"
    share = step_s / best_s - 1
    return (
        f"slower: {show_seconds(step_s)} against {show_seconds(best_s)} (+{_digits(100 * share)} %)"
    )


def _digits(value: float) -> str:
    """Two of them, without an exponent."""
    return f"{float(f'{value:.2g}'):.10g}"


def _infeasible(best: Candidate, problem: Problem, fitting: Fitting) -> Infeasible:
    """What the candidate that misses least is missing, and what would help."""
    room = best.room
    draft = best.draft
    tightest = max(
        draft.strategies, key=lambda name: fitting.memory.layer_bytes(name, draft, fitting.profile)
    )
    kind = fitting.cluster.type_of(room.device).name
    return Infeasible(
        layer=tightest,
        device=f"device {room.device} ({kind})",
        have_bytes=room.have_bytes,
        need_bytes=room.need_bytes,
        ways_out=ways_out(problem, fitting),
    )
