"""From a model, devices and costs to the best plans, each with what it costs and why."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal

import msgspec
import numpy as np

from ..cluster.types import Cluster
from ..errors import ConfigError, Infeasible
from ..graph.layer import LayerGraph
from ..plan.check_played import version_violations
from ..plan.ir import Plan, Point, Rejected, Search, Workload, hash_inputs
from ..plan.options import Parallel
from ..plan.order import ANY, families
from ..profile.fit import Fit
from ..profile.record import Profile
from ..units import apart, show_bytes, show_seconds
from .account import estimate, front
from .cost.data import StepTime
from .cost.exchange import usual
from .cost.pipeline import is_long
from .draft import Draft, describe_draft, read_draft
from .hybrid import spaces
from .prices import Prices
from .refusals import unsliced
from .room import Fitting, Room
from .solve import known
from .solve.exact import TOLERANCE
from .solve.grid import grid
from .space import SHARDED_LEVELS, Space, write_plan
from .sweep import Sweep
from .unlike import unlike_spaces
from .ways_out import Problem, leanest, ways_out

DEADLINE_S = 60.0
FEW = 400  # drafts of which each is played
TUNED_WITHIN = 0.15  # of the best time; tuning gains less
LEVELS = ("none", *SHARDED_LEVELS)
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
    drafts = [*_all_alike(offered), *(draft for _, draft in (*by_hand.found, *swept.found))]
    candidates = _judged(drafts, prices, top)
    if parallel.order == ANY:
        candidates = _judged([*drafts, *_in_other_orders(candidates)], prices, top)
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
        and swept.bound_s >= objective_s * (1 - TOLERANCE)
        and _is_closed(best.draft),
        out_of_time=not (swept.whole and by_hand.whole),
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


def _in_other_orders(candidates: Sequence[Candidate]) -> Iterator[Draft]:
    """Those that fit and are near the best, in orders whose stages lie as theirs do."""
    near = [each for each in candidates if each.room.fits]
    for candidate in near:
        draft = candidate.draft
        if candidate.time.step_s > (1 + TUNED_WITHIN) * near[0].time.step_s or not draft.stages:
            continue
        for family in families():
            names = {order.name for order in family}
            for order in family if draft.order in names else ():
                if order.name != draft.order and not order.refused(draft.pp, draft.microbatches):
                    yield msgspec.structs.replace(draft, order=order.name)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that was looked at: its time, and how it fits the device that is tightest."""

    draft: Draft
    time: StepTime
    room: Room
    played: bool


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


def _judged(drafts: Iterable[Draft], prices: Prices, top: int) -> list[Candidate]:
    """Each once, with the time of its played step: those that fit by time, then the others.

    How they exchange is tuned where it may decide. Long steps are ranked by their orders' closed
    forms, and then played until the first `top` are.
    """
    known: dict[str, Draft] = {}
    for draft in drafts:
        known.setdefault(f"{draft.pp} {draft.stages} {describe_draft(draft)}", draft)
    found = [
        Candidate(
            draft=draft,
            time=(costs.cost.sketched if is_long(draft) else costs.cost)(usual(draft)),
            room=costs.fitting(draft),
            played=not is_long(draft),
        )
        for draft in known.values()
        for costs in (prices.pricing(draft),)
    ]
    found.sort(key=_rank)
    least_s = found[0].time.step_s if found else 0.0
    for at, each in enumerate(found):
        near = each.room.fits and each.time.step_s <= (1 + TUNED_WITHIN) * least_s
        if near and not is_long(each.draft):
            found[at] = _played(each, prices)
    found.sort(key=_rank)
    while sketched := [at for at, each in enumerate(found[:top]) if _is_sketched(each)]:
        found[sketched[0]] = _played(found[sketched[0]], prices)
        found.sort(key=_rank)
    return found


def _is_sketched(candidate: Candidate) -> bool:
    """Whether it fits and was only judged by its order's closed form."""
    return candidate.room.fits and not candidate.played


def _played(candidate: Candidate, prices: Prices) -> Candidate:
    """With the time of its order on the clock, and its exchanges tuned."""
    time_s = prices.pricing(candidate.draft).cost(candidate.draft)
    return msgspec.structs.replace(candidate, time=time_s, played=True)


def _rank(candidate: Candidate) -> tuple[bool, float, tuple[int, ...]]:
    """Those that fit by time (equal to 12 digits is equal), others by what lacks; the plainer."""
    draft = candidate.draft
    ways = set(draft.strategies.values())
    plainness = (
        draft.strategy.tp,
        draft.pp,
        len(ways),
        sum(each.offload for each in ways),
        sum(each.recompute for each in draft.strategies.values()),
        draft.strategy.shard,
        draft.strategy.replica,
        max(LEVELS.index(each.level) for each in ways),
        draft.microbatches,
    )
    if candidate.room.fits:
        return False, float(f"{candidate.time.step_s:.12g}"), plainness
    return True, candidate.room.over_bytes, plainness


def _nearest_miss(
    offered: Sequence[Space], known: Sequence[Candidate], prices: Prices
) -> Candidate:
    """What does not fit by the least: known, or of each space the leanest."""
    if known:
        return known[0]
    return _judged((draft for space in offered for draft in leanest(space)), prices, 1)[0]


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
