"""What the page shows of one run, ready for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from ..plan.describe import describe
from ..plan.ir import Plan
from ..units import apart, count, show_seconds
from . import certificates, delays, figures, partition, suspects, tables, trouble
from .attempts import attempts
from .beside import beside
from .drawing import devices_svg, order_svg, segments
from .facts import (
    Share,
    algorithm,
    capacity_bytes,
    factors,
    headline,
    meaning_of_w,
    peak_bytes,
    predicted_memory,
    predictions,
    product,
    time_shares,
    totals,
    wall_shares,
    what,
)
from .runs import Run, read_plan
from .words import percent, seconds, size

WIDE, NARROW = 1220, 330
MAX_ROWS = 200  # of one table on the page
WORTH_DRAWING = 2.5  # a capacity beyond so many times the use would squeeze the parts


class MemoryBar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar: its parts, or one colour where the causes are not known."""

    label: str
    amount: float
    shares: tuple[Share, ...] = ()
    colour: str = "ink"


def run_view(run: Run, effectiveness: float | None = None) -> dict[str, Any]:
    """Every item of the page of one run; empty or None where the run has nothing to show."""
    parts = factors(run, effectiveness)
    bars = memory_bars(run)
    skipped = [event for event in run.steps if event.skipped]
    spiked = trouble.run_spikes(run)
    return {
        "run": run,
        "what": " by ".join(filter(None, (what(run), algorithm(run)))),
        "headline": headline(run),
        "hardware": run.summary.hardware if run.summary else run.profile.get("hardware", ""),
        "written": run.written.strftime("%Y-%m-%d %H:%M") if run.written else "",
        "trouble": trouble.trouble(run),
        "spikes_title": count(len(spiked), "spike") + " of the training loss",
        "spikes": trouble.spike_rows(spiked),
        "checkpoints": trouble.checkpoint_rows(run),
        "checkpoints_line": trouble.checkpoint_line(run),
        "checkpoint_heads": trouble.CHECKPOINT_HEADS,
        "delays_line": delays.line(run),
        "delays_heads": delays.HEADS,
        "delays_rows": delays.rows(run),
        "suspects_line": suspects.line(run),
        "suspects_heads": suspects.heads(run),
        "suspects_rows": suspects.rows(run),
        "partition_line": partition.line(run),
        "w": product(parts),
        "factors": parts,
        "sentence": meaning_of_w(run, parts),
        "outcomes": tables.outcome_rows(run),
        "skipped_title": count(len(skipped), "step") + " skipped",
        "skipped": [
            (f"{event.step:,}", event.reason or "not finite", _ranks(event.blamed))
            for event in skipped[:MAX_ROWS]
        ],
        "time_shares": time_shares(run),
        "wall_shares": wall_shares(run),
        "beside": beside(run),
        "memory": predicted_memory(run),
        "memory_bars": bars,
        "memory_scale": max((bar.amount for bar in bars), default=1) or 1,
        "memory_notes": _memory_notes(run),
        "predictions": [tables.prediction_cells(found) for found in predictions(run)],
        "assumed": bool(run.plan and run.plan.assumed) or run.profile.get("assumed") is True,
        "plan": _plan_view(run, run.plan) if run.plan else None,
        "setup": _setup(run),
        "assumptions": _assumptions(run, parts),
    }


def curves(run: Run) -> dict[str, Any]:
    """The figures of the page of one run."""
    return {
        "learning": figures.learning(run) if run.steps or run.evals else None,
        "rates": figures.rates(run),
        "metrics": figures.metrics(run),
        "certificates": certificates.curves(run),
        "throughput": figures.throughput(run),
        "step_time": figures.step_time(run),
        "delays": delays.curve(run),
    }


def memory_bars(run: Run, name: str = "") -> tuple[MemoryBar, ...]:
    """Predicted by cause, measured peak, and capacity unless far above both."""
    lead = f"{name}, " if name else ""
    bars = []
    causes = predicted_memory(run)
    if causes:
        amount = sum(share.amount for share in causes)
        bars.append(MemoryBar(label=f"{lead}predicted", amount=amount, shares=causes))
    peak, capacity = peak_bytes(run), capacity_bytes(run)
    if peak:
        bars.append(MemoryBar(label=f"{lead}measured", amount=peak))
    largest = max((bar.amount for bar in bars), default=0)
    if capacity and not name and capacity <= WORTH_DRAWING * largest:
        bars.append(MemoryBar(label="capacity", amount=capacity, colour="rest"))
    return tuple(bars)


def _memory_notes(run: Run) -> list[str]:
    notes = []
    causes, peak, capacity = predicted_memory(run), peak_bytes(run), capacity_bytes(run)
    if not causes:
        notes.append("No prediction by cause: there is no plan with an estimate.")
    if peak is None:
        notes.append("The peak was not measured.")
    if capacity is None:
        notes.append("The capacity of a device is not recorded.")
    elif peak:
        notes.append(f"Measured peak: {percent(peak / capacity)} of a device's {size(capacity)}.")
    return notes


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "unknown"


def _plan_view(run: Run, plan: Plan) -> dict[str, Any]:
    capacity = capacity_bytes(run)
    parts = segments(plan)
    several = len(plan.stages) > 1
    kinds = {action.kind for actions in set(plan.order) for action in actions}
    rejected = plan.search.rejected if plan.search else ()
    return {
        "line": describe(plan),
        "batch": (
            f"Global batch {plan.global_batch:,}"
            + (f", {plan.seq_len:,} tokens a sample" if plan.seq_len > 1 else "")
            + f", {count(plan.microbatches, 'microbatch', 'microbatches')} a data rank, "
            f"{plan.precision}; {_exchange(run, plan)}"
        ),
        "wide": Markup(devices_svg(plan, WIDE, capacity)),
        "narrow": Markup(devices_svg(plan, NARROW, capacity)),
        "order_wide": Markup(order_svg(plan, WIDE)),
        "order_narrow": Markup(order_svg(plan, NARROW)),
        "capacity": capacity,
        "splits_backward": bool(kinds & {"I", "W"}),
        "layer_heads": [*(["stage"] if several else []), "layers", "split", "level", "activations"],
        "layers": [
            (
                *((str(part.stage),) if several else ()),
                part.names,
                part.how,
                f"{part.layer_plan.level}: {part.level_text}",
                part.extras,
            )
            for part in parts[:MAX_ROWS]
        ],
        "search": _search_text(plan),
        "best": _best(run),
        "rejected_title": f"{count(len(rejected), 'rejected plan')} and why",
        "rejected": [(each.plan, each.reason) for each in rejected[:MAX_ROWS]],
    }


def _exchange(run: Run, plan: Plan) -> str:
    if named := algorithm(run):
        return f"replicas exchange by {named}."
    when = "during the backward pass" if plan.overlap else "after it"
    if not plan.decouple:
        return f"gradients in buckets of {size(plan.bucket_bytes)}, reduced {when}."
    first = "what it needs first" if plan.priority else "what was scattered first"
    return (
        f"gradients in buckets of {size(plan.bucket_bytes)}, scattered {when} and gathered during "
        f"the next forward pass, {first} first (at once where the rule needs whole gradients)."
    )


def _search_text(plan: Plan) -> str:
    search = plan.search
    if search is None:
        return "The plan was given, not searched for."
    proof = (
        "its objective is proved least"
        if search.proved
        else f"its objective is not proved least, none is below {seconds(search.bound_s)}"
    )
    if search.out_of_time:
        proof = "time ran out before all were compared, another may be faster"
    text = (
        f"Found by {search.solver} among {count(search.candidates, 'candidate')} in "
        f"{seconds(search.search_s)}; {proof}."
    )
    if search.unused_devices:
        text += f" Unused: {count(len(search.unused_devices), 'device')}."
    return text


def _best(run: Run) -> list[tuple[str, str, str]]:
    """Plan, step time and memory of the best plans; `top` where the file has it."""
    found = []
    top = run.plan_json.get("top")
    for entry in top[:5] if isinstance(top, Sequence) and not isinstance(top, str) else ():
        if not isinstance(entry, Mapping):
            continue
        inner = entry.get("plan")
        if isinstance(inner, Mapping):
            read = read_plan(inner, [])
            line = describe(read) if read else "a plan that cannot be read"
        else:
            line = str(inner)
        estimate = entry.get("estimate") or (
            inner.get("estimate") if isinstance(inner, Mapping) else None
        )
        found.append((line, *_estimate(estimate)))
    steps = apart([step_s for _, step_s, _ in found if step_s is not None], show_seconds)
    step_of = iter(steps)
    return [
        (line, seconds(None) if step_s is None else next(step_of), memory)
        for line, step_s, memory in found
    ]


def _estimate(estimate: object) -> tuple[float | None, str]:
    """Seconds of a step, and the memory of the fullest device in words."""
    if not isinstance(estimate, Mapping):
        return None, size(None)
    memory = [sum(causes.values()) for causes in estimate.get("memory", ())]
    return estimate.get("step_s"), size(max(memory, default=None))


def _setup(run: Run) -> list[tuple[str, str]]:
    total, summary, profile = totals(run), run.summary, run.profile
    rows = [("folder", str(run.folder))]
    if summary:
        rows.append(("hardware", summary.hardware))
    rows.append(("devices", "unknown" if total.devices is None else f"{total.devices:,}"))
    if total.workers is not None:
        rows.append(("workers (replicas)", f"{total.workers:,}"))
    if attempts(run) > 1:
        rows.append(("attempts", str(attempts(run))))
    if summary:
        rows += [(name, str(version)) for name, version in summary.versions.items()]
    if profile:
        how = "assumed" if profile.get("assumed") else "measured"
        rows.append(("profile", f"{how}, {profile.get('date', 'no date')}"))
        rows.append(("profiled on", str(profile.get("hardware", "unknown"))))
    if run.plan and run.plan.inputs_hash:
        rows.append(("plan made for", run.plan.inputs_hash))
    return rows


def _assumptions(run: Run, parts: Sequence[Any]) -> list[str]:
    lines = [f"{part.name} = {part.value:g}: no run measured it" for part in parts if part.assumed]
    if run.profile.get("assumed") is True:
        lines.append("the profile: costs of layers or links are from figures, not measurements")
    if run.plan and run.plan.assumed:
        lines.append("the plan's predicted step time: made from assumed costs")
    return lines
