"""From a model, devices and costs to the best plans, each with what it costs and why."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from decimal import Decimal

import msgspec
import numpy as np

from ..cluster.types import Cluster
from ..errors import ConfigError, Infeasible
from ..graph.layer import LayerGraph
from ..plan.check_played import version_violations
from ..plan.ir import Plan, Point, Rejected, Search, Workload, hash_inputs
from ..plan.options import Parallel
from ..plan.order import ANY
from ..profile.fit import Fit
from ..profile.record import Profile
from ..units import apart, show_bytes, show_seconds
from .account import estimate, front
from .draft import Draft, describe_draft, read_draft
from .hybrid import spaces
from .judge import Candidate, Judge
from .prices import Prices
from .refusals import unsliced
from .room import Fitting
from .solve import known
from .solve.exact import TOLERANCE
from .solve.grid import grid
from .space import Space, write_plan
from .sweep import Sweep
from .unlike import unlike_spaces
from .ways_out import Problem, leanest, ways_out

DEADLINE_S = 60.0
FEW = 400  # drafts of which each is played
CLOSED = frozenset({"gpipe", "1f1b"})  # orders whose closed form is the objective


def search(
    graph: LayerGraph,
    cluster: Cluster,
    profile: Profile,
    workload: Workload,
    parallel: Parallel,
    *,
    top: int = 5,
    all_devices: bool = False,
    solver: str = "exact",
    tell: Callable[[str], None] | None = None,
) -> tuple[Plan, ...]:
    """The best plans, best first; the first holds the record of the search.

    With `all_devices` none stays unused, unless the batch or a fixed degree leaves no other way.
    `solver` (`solve.known`) finds stages and strategies; plans by hand are candidates with any.
    `tell` hears how far it is.

    Raises:
        ConfigError: a fixed part is impossible here, or there is no such solver.
        Infeasible: no plan fits the memory; says what is missing and what would help.
    """
    start_s = time.monotonic()
    solve = known.find(solver)
    if refused := [*unsliced(graph, parallel)]:
        raise ConfigError(refused)
    fit = Fit(profile)
    kinds = {layer.kind for layer in graph.layers}
    seconds = {kind: fit.forward_s(kind, 1) + fit.backward_s(kind, 1) for kind in kinds}
    prices = Prices(graph, cluster, profile, workload)
    offered = [
        *spaces(graph, cluster, workload, parallel, all_devices=all_devices, seconds=seconds)
    ]
    sweep = Sweep((space, prices.of(space.parallel.tp or 1)) for space in offered)
    swept = sweep(solve, end_s=start_s + DEADLINE_S, tell=tell)
    if parallel.layouts == "unlike":
        alone = _of_one_rank(graph, cluster, workload, parallel) if parallel.pp else ()
        more = Sweep((space, prices.unlike) for space in unlike_spaces(offered, alone))
        least_s = min([value for value, _ in swept.found], default=np.inf)
        swept += more(solve, end_s=start_s + 2 * DEADLINE_S, below=least_s, tell=tell)
    by_hand = sweep(grid, end_s=start_s + DEADLINE_S)
    drafts = [*(draft for _, draft in (*swept.found, *by_hand.found)), *_all_alike(offered)]
    end_s = max(start_s + DEADLINE_S, time.monotonic() + DEADLINE_S / 4)
    judge = Judge(prices, top, end_s, tell)
    candidates = judge(drafts)
    if parallel.order == ANY:
        candidates = judge.in_other_orders(candidates)
    if not candidates or not candidates[0].room.fits:
        problem = Problem(graph=graph, cluster=cluster, workload=workload, parallel=parallel)
        raise _infeasible(_nearest_miss(offered, candidates, prices), problem, prices)
    best = candidates[0]
    kept = [
        msgspec.structs.replace(
            candidate, draft=prices.pricing(candidate.draft).cost.ordered(candidate.draft)
        )
        for candidate in candidates[:top]
        if candidate.room.fits
    ]
    inputs_hash = hash_inputs(graph, cluster, workload)
    plans = [
        msgspec.structs.replace(
            write_plan(candidate.draft, workload),
            estimate=estimate(candidate.draft, candidate.time, prices),
            inputs_hash=inputs_hash,
            assumed=profile.assumed or candidate.draft.offloads,
        )
        for candidate in kept
    ]
    if refused := [*version_violations(plans[0], graph)]:
        raise ConfigError(refused)
    objective_s = min([value for value, _ in swept.found], default=best.time.step_s)
    record = Search(
        solver=solver,
        objective_s=objective_s,
        bound_s=min(swept.bound_s, objective_s),
        proved=swept.whole
        and judge.whole
        and swept.bound_s >= objective_s * (1 - TOLERANCE)
        and _is_closed(best.draft),
        out_of_time=not (swept.whole and by_hand.whole and judge.whole),
        search_s=time.monotonic() - start_s,
        candidates=len(candidates),
        rejected=_rejected(candidates, prices),
        unused_devices=tuple(range(best.draft.n_devices, cluster.n_devices)),
        played=sum(candidate.played for candidate in candidates),
        front=front(_point(candidate, prices) for candidate in candidates),
    )
    return (msgspec.structs.replace(plans[0], search=record), *plans[1:])


def _of_one_rank(
    graph: LayerGraph, cluster: Cluster, workload: Workload, parallel: Parallel
) -> tuple[Space, ...]:
    """Spaces of one pipeline rank, where others are fixed: layouts of more devices; or none."""
    fixed = msgspec.structs.replace(parallel, pp=1, stages=None, order=None)
    try:
        return tuple(spaces(graph, cluster, workload, fixed))
    except ConfigError:
        return ()


def price(
    graph: LayerGraph, cluster: Cluster, profile: Profile, workload: Workload, plan: Plan
) -> Plan:
    """A given plan with its estimate, whether it fits or not, and no record of a search.

    Raises:
        ConfigError: the plan has parts that cannot be priced yet.
    """
    draft = read_draft(plan)
    prices = Prices(graph, cluster, profile, workload)
    return msgspec.structs.replace(
        plan,
        search=None,
        estimate=estimate(draft, prices.pricing(draft).cost(draft), prices),
        inputs_hash=hash_inputs(graph, cluster, workload),
        assumed=profile.assumed or draft.offloads,
    )


def _all_alike(offered: Sequence[Space]) -> list[Draft]:
    """Every draft in which all layers run alike, where they are few."""
    drafts = (draft for space in offered for draft in space.drafts())
    found = list(itertools.islice(drafts, FEW + 1))
    return found if len(found) <= FEW else []


def _nearest_miss(
    offered: Sequence[Space], known: Sequence[Candidate], prices: Prices
) -> Candidate:
    """What does not fit by the least: known, or of each space the leanest."""
    if known:
        return known[0]
    judge = Judge(prices, 1)
    return judge(draft for space in offered for draft in leanest(space))[0]


def _is_closed(draft: Draft) -> bool:
    """Whether the objective is the closed form of its order."""
    return not draft.order or draft.order in CLOSED


def _fitting(prices: Prices, draft: Draft) -> Fitting:
    return prices.pricing(draft).fitting


def _point(candidate: Candidate, prices: Prices) -> Point:
    """Its place among the others."""
    return Point(
        step_s=candidate.time.step_s,
        peak_bytes=sum(candidate.room.need_bytes.values()),
        plan=_line(candidate.draft, prices),
        fits=candidate.room.fits,
    )


def _rejected(candidates: Sequence[Candidate], prices: Prices) -> tuple[Rejected, ...]:
    """All but the best, each with why it lost."""
    best_s = candidates[0].time.step_s
    return tuple(
        Rejected(plan=_line(candidate.draft, prices), reason=_reason(candidate, best_s))
        for candidate in candidates[1:]
    )


def _line(draft: Draft, prices: Prices) -> str:
    """The draft in one line, with the slices of tokens that it is priced with."""
    return describe_draft(prices.pricing(draft).cost.sliced(draft))


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
    more = f"{_digits(100 * (step_s / best_s - 1))} %"
    this, best = apart((step_s, best_s), show_seconds)
    return f"slower: by {more}" if this == best else f"slower: {this} against {best} (+{more})"


def _digits(value: float) -> str:
    """Two of them, without an exponent."""
    return f"{Decimal(f'{value:.2g}'):f}"


def _infeasible(best: Candidate, problem: Problem, prices: Prices) -> Infeasible:
    """What the candidate that misses least is missing, and what would help."""
    room, draft = best.room, best.draft
    fitting = _fitting(prices, draft)
    tightest = max(
        draft.strategies, key=lambda name: fitting.memory.layer_bytes(name, draft, fitting.profile)
    )
    kind = fitting.cluster.type_of(room.device).name
    return Infeasible(
        plan=_line(draft, prices),
        layer=tightest,
        layer_bytes=fitting.memory.layer_bytes(tightest, draft, fitting.profile),
        device=f"device {room.device} ({kind})",
        have_bytes=room.have_bytes,
        need_bytes=room.need_bytes,
        ways_out=ways_out(problem, prices),
    )
