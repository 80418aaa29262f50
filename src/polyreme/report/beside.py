"""What communication ran behind computation, and what a run let run there."""

from __future__ import annotations

from ..plan.ir import Plan
from .facts import algorithm, summed
from .runs import Run
from .words import percent, seconds


def beside(run: Run) -> str:
    """How long communication was hidden, and by what; empty where nothing is communicated."""
    blocked_s, hidden_s = summed(run, "comm_s"), summed(run, "hidden_s")
    n_steps = sum(run.covered)
    if not n_steps or not blocked_s + hidden_s > 0 or run.simulated:
        return ""
    share = hidden_s / (blocked_s + hidden_s)
    text = (
        f"Behind computation: {percent(share)} of communication, {seconds(hidden_s / n_steps)} of "
        f"{seconds((blocked_s + hidden_s) / n_steps)} a step on average."
    )
    found = "" if run.plan is None or algorithm(run) else switches(run.plan)
    return f"{text} {found}" if found else text


def switches(plan: Plan) -> str:
    """What of a plan's exchanges may run behind computation."""
    levels = {layer_plan.level for layer_plan in plan.layer_plans.values()}
    on = {True: "on", False: "off"}
    parts = [f"overlap of reductions {on[plan.overlap]}"]
    if levels - {"none"}:
        parts.append(f"prefetch of parameters {on[plan.prefetch]}")
    parts.append(f"decoupled gathers {on[plan.decouple]}")
    if plan.decouple:
        parts.append(f"priority {on[plan.priority]}")
    return f"{', '.join(parts)}.".capitalize()
