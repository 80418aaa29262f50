"""One self-contained page for a plan: what it is predicted to take, and why it won."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from .. import runlog
from ..plan.describe import describe
from ..plan.explain import HEADER, not_run, rows_of, unused
from ..plan.ir import LayerCost, Plan
from ..plan.step import Step
from ..plan.store import Row
from ..plan.trace import KINDS
from ..units import apart, count, show_bytes, show_seconds
from .facts import Share
from .front import front
from .page import Sections, fill
from .plan_memory import memory_bars
from .plan_words import glossary
from .tables import Row as Fact
from .timeline import Timeline, timeline
from .words import number, percent, runs_of, seconds, size

SECTIONS: Sections = (
    ("overview", "The plan"),
    ("memory", "Memory"),
    ("timeline", "A step"),
    ("layers", "Layers"),
    ("front", "Time and memory"),
    ("others", "The others"),
)
WIDE = 1220
FEW = 8  # rows of a list that stands open
MOVED_BEFORE = "data exchange, exposed"
LAYER_HEADS = (
    "layers",
    "count",
    "strategy",
    "forward",
    "backward",
    "recompute",
    "tensor parts exchange",
    MOVED_BEFORE,
    "update",
    "all of them",
    "stored",
    "saved, a microbatch",
)


def render_plan(plan: Plan, step: Step, top: Sequence[Row], out: Path) -> Path:
    """Write the page of a plan, its step and the best of its search, and return its path.

    Raises RunError where the disk is full.
    """
    drawn = timeline(step, WIDE) if len(plan.stages) > 1 else None
    won, narrow = front(plan, 620, 330), front(plan, 320, 300)
    heads, layers = _layers(step.estimate.layers)
    page = fill(
        "plan.html",
        [],
        title=f"{describe(plan)}: polyreme plan",
        sections=SECTIONS if plan.search is not None else SECTIONS[:-2],
        simulated=False,
        line=describe(plan),
        words=glossary(plan),
        facts=_facts(plan, step),
        assumed=plan.assumed,
        not_run=not_run(plan),
        unused=unused(plan),
        searched=plan.search is not None,
        batch=_batch(plan),
        memory=memory_bars(step),
        passes=drawn,
        drawing=Markup(drawn.svg) if drawn else "",
        kinds=[(kind, KINDS[kind]) for kind in drawn.kinds] if drawn else [],
        step_said=_step_said(step, drawn) if drawn else "",
        shares=_shares(step),
        layer_heads=heads,
        layers=layers,
        front=won,
        front_svg=Markup(won.svg) if won else "",
        front_narrow=Markup(narrow.svg) if narrow else "",
        front_said=_front_said(plan),
        side_heads=["", *(f"{place}" for place in range(1, len(top) + 1))],
        side=_side_by_side(plan, top),
        lost=_lost(plan),
        few=FEW,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    return runlog.write_whole(out, page.encode())


def _batch(plan: Plan) -> str:
    tokens = f" of {count(plan.seq_len, 'token')}" if plan.seq_len > 1 else ""
    return f"{count(plan.global_batch, 'sample')}{tokens} in {plan.precision}"


def _facts(plan: Plan, step: Step) -> list[Fact]:
    estimate, search = step.estimate, plan.search
    samples_s = plan.global_batch / estimate.step_s
    if plan.seq_len > 1:
        rate = Fact(
            label="tokens a second",
            value=number(samples_s * plan.seq_len, 4),
            note=f"{number(samples_s)} samples",
        )
    else:
        rate = Fact(label="samples a second", value=number(samples_s, 4))
    types = dict.fromkeys(each.device_type for each in estimate.capacity)
    peak, have = sum(estimate.peak_bytes.values()), estimate.peak_capacity_bytes or 0
    need, has = apart((peak, have), show_bytes)
    exposed = percent(estimate.exposed_comm_s / estimate.step_s)
    facts = [
        Fact(
            label="predicted step time",
            value=seconds(estimate.step_s),
            note=f"{exposed} of it exposed communication",
        ),
        rate,
        Fact(
            label="devices used",
            value=f"{len(step.rows.devices):,}",
            note=", ".join(types) + (f"; {each[0]}" if (each := unused(plan)) else ""),
        ),
        Fact(
            label="memory of the fullest device",
            value=need,
            note=f"of {has}, {percent(peak / have) if have else 'all'}",
        ),
    ]
    if search is not None:
        proof = "proved least" if search.proved else "not proved least"
        least, bound = apart((search.objective_s, search.bound_s), show_seconds)
        facts.append(
            Fact(
                label="objective",
                value=proof,
                note=f"{least} by the order's closed form; none is below {bound}",
            )
        )
        facts.append(
            Fact(
                label="candidates",
                value=f"{search.candidates:,}",
                note=f"in {seconds(search.search_s)}, solver {search.solver}"
                + ("; time ran out before all were compared" if search.out_of_time else ""),
            )
        )
    return facts


def _step_said(step: Step, drawn: Timeline) -> str:
    """What a step of several stages is made of, in numbers."""
    estimate, bubble = step.estimate, step.bubble
    mean = percent(sum(bubble) / len(bubble))
    most = max(range(len(bubble)), key=lambda rank: bubble[rank])
    said = [f"The passes take {seconds(step.played.makespan_s)}."]
    if percent(bubble[most]) == mean:
        said.append(f"Each rank waits for {mean} of that (the bubble).")
    else:
        said.append(
            f"Ranks wait for {mean} of that in the mean (the bubble), rank {most} for most, "
            f"{percent(bubble[most])}."
        )
    of_parts = any(each.parts_s for each in estimate.layers)
    moved = any(each.moved_s for each in estimate.layers)
    hosted = any(each.hosted_s for each in estimate.layers)
    whose = ["those of tensor parts"] * of_parts + ["those between unlike layers"] * moved
    whose += ["those with hosts' memory"] * hosted
    inside = f" ({' and '.join(whose)} stand inside the passes)" if whose else ""
    said.append(
        f"Exchanges that nothing hides add {seconds(step.exchange_s)}{inside} and the update "
        f"{seconds(estimate.update_s)}, both drawn at the end: {seconds(estimate.step_s)} together."
    )
    if estimate.stages is not None and estimate.stages.send:
        send = seconds(estimate.stages.send)
        said.append(f"A tensor takes {send} from rank to rank, for which the next one waits.")
    if len(drawn.parts) > 1:
        share = sum(part.end_s - part.start_s for part in drawn.parts) / estimate.step_s
        said.append(
            f"Drawn are the first, a middle and the last part, {percent(share)} of the step; "
            "polyreme explain PLAN --trace FILE writes all of it."
        )
    return " ".join(said)


def _shares(step: Step) -> list[Share]:
    """Of one stage: passes by layers' figures, what of exchanges is exposed, the update."""
    estimate, layers = step.estimate, step.estimate.layers
    forward_s = sum(len(each.layers) * each.forward_s for each in layers)
    again_s = sum(len(each.layers) * each.recompute_s for each in layers)
    parts = {
        "forward": forward_s,
        "recomputed forward": again_s,
        "backward": max(0.0, estimate.compute_s - estimate.update_s - forward_s - again_s),
        "exposed communication": estimate.exposed_comm_s,
        "update": estimate.update_s,
    }
    return [
        Share(name=name, amount=amount, share=amount / estimate.step_s)
        for name, amount in parts.items()
        if amount
    ]


def _layers(layers: Sequence[LayerCost]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of the table; what only some plans have has a column where any does."""
    at = LAYER_HEADS.index(MOVED_BEFORE)
    more = {
        head: field
        for field, head in (("moved_s", "moves between layouts"), ("hosted_s", "to and from host"))
        if any(getattr(each, field) for each in layers)
    }
    heads = (*LAYER_HEADS[:at], *more, *LAYER_HEADS[at:])
    return heads, [_layer_row(each, tuple(more.values())) for each in layers]


def _layer_row(each: LayerCost, more: tuple[str, ...]) -> tuple[str, ...]:
    n = len(each.layers)
    times = (
        each.forward_s,
        each.backward_s,
        each.recompute_s,
        each.parts_s,
        *(getattr(each, field) for field in more),
        each.data_s,
        each.update_s,
    )
    return (
        runs_of(each.layers),
        f"{n:,}",
        each.how,
        *map(seconds, times),
        seconds(n * sum(times)),
        size(each.stored_bytes),
        size(each.saved_bytes),
    )


def _front_said(plan: Plan) -> str:
    search = plan.search
    if search is None:
        return ""
    sketched = search.candidates - search.played
    said = f"Of {count(search.played, 'candidate')} whose step was played"
    if sketched:
        said += f" and {sketched:,} that were judged by their order's closed form"
    return said + ", these remain."


def _side_by_side(plan: Plan, top: Sequence[Row]) -> list[tuple[str, ...]]:
    """A row a figure, a column a plan; figures that no plan has are left out."""
    rows = zip(HEADER, *rows_of(plan, top), strict=True)
    return [row for row in rows if any(row[1:])]


def _lost(plan: Plan) -> list[tuple[str, list[tuple[str, str]]]]:
    """(reason, [(plan, the rest of the reason)]) of all that lost, those of most first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for each in plan.search.rejected if plan.search else ():
        why, rest = _reason(each.reason)
        groups.setdefault(why, []).append((each.plan, rest))
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _reason(text: str) -> tuple[str, str]:
    """What many have in common, and what is one's own.

    >>> _reason("slower: 2.95 s against 2.92 s (+1 %)")
    ('slower', '2.95 s against 2.92 s (+1 %)')
    >>> _reason("as fast (2.92 s), but less simple")
    ('as fast, but less simple', '2.92 s')
    """
    if found := re.fullmatch(r"([^:(]+): (.+)", text):
        return found[1], found[2]
    if found := re.fullmatch(r"([^(]+) \(([^)]*)\)(.*)", text):
        return found[1] + found[3], found[2]
    return text, ""
