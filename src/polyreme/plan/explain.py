"""Why this plan: the best ones with time and memory by cause, and why every other lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..units import apart, show_bytes, show_seconds
from .describe import describe
from .grid import grid_of
from .ir import MEMORY_CAUSES, Estimate, Plan, Search, axes
from .step import play_plan
from .store import Row

HEADER = (
    "plan",
    "step",
    "compute",
    "exposed comm",
    "all comm",
    "peak memory",
    *MEMORY_CAUSES,
    "why not first",
)
_NO_NUMBERS = ("",) * (len(HEADER) - 2)


def rows(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """A row a plan, under `HEADER`; plans best first, the first with the record of the search."""
    return rows_of(plans[0], _ranked(plans)) if plans else []


def _ranked(plans: Sequence[Plan]) -> list[Row]:
    return [Row(plan=describe(plan), estimate=plan.estimate) for plan in plans]


def rows_of(best: Plan, ranked: Sequence[Row]) -> list[tuple[str, ...]]:
    """The same of the best plans as they stand in a file; steps in digits that tell them apart."""
    reasons = ["", *(lost.reason for lost in best.search.rejected)] if best.search else []
    step_of = iter(apart([each.estimate.step_s for each in ranked if each.estimate], show_seconds))
    return [
        (
            row.plan,
            *(_numbers(row.estimate, next(step_of)) if row.estimate else _NO_NUMBERS),
            reasons[index] if index < len(reasons) else "",
        )
        for index, row in enumerate(ranked)
    ]


def lost(plans: Sequence[Plan]) -> list[tuple[str, str]]:
    """(plan, reason) of each candidate that is not among the plans shown, nearest first."""
    return _lost(plans[0], len(plans)) if plans else []


def _lost(best: Plan, n_shown: int) -> list[tuple[str, str]]:
    rejected = best.search.rejected if best.search else ()
    return [(entry.plan, entry.reason) for entry in rejected[n_shown - 1 :]]


def summary(plans: Sequence[Plan]) -> str:
    """What was searched and how sure the result is, in one line."""
    return summary_of(plans[0])


def summary_of(plan: Plan) -> str:
    """The same of the plan that holds the record of the search."""
    search = plan.search
    if search is None:
        assumed = ["costs are assumed"] if plan.assumed else []
        return "; ".join(["priced, not searched", *assumed, *not_run(plan), *unused(plan)])
    many = "candidate" if search.candidates == 1 else "candidates"
    parts = [
        f"{search.candidates} {many} in {show_seconds(search.search_s)} ({search.solver})",
        certainty(search),
    ]
    if plan.assumed:
        parts.append("costs are assumed, not measured")
    return "; ".join([*parts, *not_run(plan), *unused(plan)])


def certainty(search: Search) -> str:
    """How far below the objective another plan's could be, as far as the search knows.

    >>> times = {"objective_s": 2.0, "bound_s": 1.9, "search_s": 0.1}
    >>> certainty(Search(solver="exact", **times, proved=False, candidates=1))
    'objective not proved least, at most 5.3 % above it'
    """
    if search.proved:
        return "objective proved least"
    if search.out_of_time:
        return "time ran out before all were compared, another may be faster"
    above = search.objective_s / search.bound_s - 1 if search.bound_s > 0 else 0.0
    if not 1e-4 < above < math.inf:
        return "objective not proved least"
    return f"objective not proved least, at most {float(f'{100 * above:.2g}'):.10g} % above it"


def not_run(plan: Plan) -> tuple[str, ...]:
    """A line if the runtime refuses the plan."""
    grid, found = grid_of(plan), []
    if grid is None:
        found.append("layers are laid out unlike each other")
    if any("cp" in axes(each.split) for each in plan.layer_plans.values()):
        found.append("devices share the tokens of samples")
    if any("ep" in axes(each.split) for each in plan.layer_plans.values()):
        found.append("experts are dealt out")
    offloaded = {what for each in plan.layer_plans.values() for what in each.offload}
    if "parameters" in offloaded:
        found.append("parameters, gradients and optimizer states lie in hosts' memory")
    elif offloaded:
        found.append("optimizer states lie in hosts' memory")
    return (f"{', '.join(found)}: planned, not executable yet",) if found else ()


def unused(plan: Plan) -> tuple[str, ...]:
    """A line if devices of the cluster stay unused."""
    found: Sequence[int] = plan.search.unused_devices if plan.search is not None else ()
    if plan.search is None and plan.estimate is not None:
        n_used = len(plan.estimate.memory)
        found = range(n_used, n_used + plan.estimate.n_unused)
    if not found:
        return ()
    first, last = found[0], found[-1]
    named = f"{first}" if first == last else f"{first} to {last}"
    n_unused = len(found)
    stay = "device stays" if n_unused == 1 else "devices stay"
    return (f"{n_unused} {stay} unused ({named})",)


def text(plans: Sequence[Plan], *, most_lost: int | None = None) -> str:
    """All of it for a terminal: one block a plan, then the losers (the nearest `most_lost`)."""
    return text_of(plans[0], _ranked(plans), most_lost=most_lost)


def text_of(best: Plan, ranked: Sequence[Row], *, most_lost: int | None = None) -> str:
    """The same of the best plans as they stand in a file."""
    lines = [summary_of(best)]
    for number, (row, each) in enumerate(zip(rows_of(best, ranked), ranked, strict=True), start=1):
        entry = dict(zip(HEADER, row, strict=True))
        causes = ", ".join(f"{cause} {entry[cause]}" for cause in MEMORY_CAUSES if entry[cause])
        waits = _waiting(best) if number == 1 else ""
        exposed = f"exposed communication {entry['exposed comm']} of {entry['all comm']}"
        lines += [
            f"{number}. {entry['plan']}",
            f"   step {entry['step']}: compute {entry['compute']}{waits}, {exposed}",
            f"   memory {_of_capacity(each.estimate)}: {causes}",
        ]
        if (missing := _missing_bytes(each.estimate)) > 0:
            lines.append(f"   does not fit: {show_bytes(missing)} are missing")
        if entry["why not first"]:
            lines.append(f"   {entry['why not first']}")
    others = _lost(best, len(ranked))
    shown = others[:most_lost]
    lines += [f"-  {plan}: {reason}" for plan, reason in shown]
    if len(others) > len(shown):
        lines.append(f"-  and {len(others) - len(shown)} more")
    return "\n".join(lines)


def _waiting(plan: Plan) -> str:
    """Of the passes of a pipeline, the share in which its ranks play nothing, in the mean."""
    estimate = plan.estimate
    if len(plan.stages) < 2 or estimate is None or estimate.stages is None or not estimate.layers:
        return ""
    bubble = play_plan(plan).bubble
    return f" (of which ranks wait {100 * sum(bubble) / len(bubble):.2g} %)"


def _missing_bytes(estimate: Estimate | None) -> float:
    """What the device that lacks most lacks; below 0: has left."""
    if estimate is None or not estimate.capacity:
        return 0.0
    pairs = zip(estimate.memory, estimate.capacities, strict=True)
    return max(sum(need.values()) - have.n_bytes for need, have in pairs)


def _of_capacity(estimate: Estimate | None) -> str:
    """What the fullest device needs, of what it has."""
    if estimate is None:
        return ""
    need, have = sum(estimate.peak_bytes.values()), estimate.peak_capacity_bytes
    return " of ".join(apart([need, *([] if have is None else [have])], show_bytes))


def _numbers(estimate: Estimate, step: str) -> tuple[str, ...]:
    peak = estimate.peak_bytes
    return (
        step,
        show_seconds(estimate.compute_s),
        show_seconds(estimate.exposed_comm_s),
        show_seconds(estimate.comm_s),
        show_bytes(sum(peak.values())),
        *(show_bytes(peak[cause]) if peak.get(cause) else "" for cause in MEMORY_CAUSES),
    )
