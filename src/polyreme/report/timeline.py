"""The step of a pipeline on the clock: a row a rank, a box a pass, and what lies idle between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ..plan.play import Span
from ..plan.step import Step
from ..plan.trace import KINDS
from .drawing import escaped
from .scale import Scale, time_marks
from .words import percent, seconds

LABEL_W, IDLE_W, GAP, AXIS_H = 84, 56, 62, 26
MOST_BOXES = 1_500  # with a name and a tip each; more are drawn as one outline a kind
LEGIBLE_W = 5.0  # pixels of a pass in the mean, below which only parts of the step are drawn
PART_W = 22.0  # of a pass in such a part
DIGIT_W = 6.6
ROW_HEIGHTS = ((8, 26), (16, 20), (40, 14), (80, 10), (160, 6))  # for so many ranks; else 4


class Part(msgspec.Struct, frozen=True):
    """A stretch of the step that is drawn, in seconds since it began."""

    start_s: float
    end_s: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The drawing, the kinds of passes in it, and which parts of the step it shows."""

    svg: str
    kinds: tuple[str, ...]
    parts: tuple[Part, ...]


def timeline(step: Step, width: int) -> Timeline:
    """The step as wide as asked for: all of it, or its first, a middle and its last part."""
    room = width - LABEL_W - IDLE_W
    parts = _parts(step, room)
    drawn_s = sum(part.end_s - part.start_s for part in parts)
    px_s = (room - GAP * (len(parts) - 1)) / drawn_s
    row_h = next((h for most, h in ROW_HEIGHTS if len(step.rows.pipes) <= most), 4)
    n_boxes = sum(len(_within(own, part)) for own in step.played.spans for part in parts)
    body, x = [_rows(step, row_h, width)], float(LABEL_W)
    for index, part in enumerate(parts):
        end = x + (part.end_s - part.start_s) * px_s
        scale = Scale(low=part.start_s, high=part.end_s, start=x, end=end)
        body.append(_part(step, part, scale, row_h, named=n_boxes <= MOST_BOXES))
        if index < len(parts) - 1:
            left_out_s = parts[index + 1].start_s - part.end_s
            body.append(_left_out(end + GAP / 2, left_out_s, len(step.rows.pipes) * row_h))
        x = end + GAP
    height = len(step.rows.pipes) * row_h + AXIS_H
    used = {span.action.kind for own in step.played.spans for span in own}
    label = f"passes of {len(step.rows.pipes)} pipeline ranks over {seconds(step.estimate.step_s)}"
    return Timeline(
        svg=f'<svg class="plan gantt" role="img" aria-label="{escaped(label)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{_HATCH}{"".join(body)}</svg>',
        kinds=tuple(kind for kind in KINDS if kind in used),
        parts=parts,
    )


_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="idle-ground" width="6" height="6"/>'
    '<rect class="idle-line" width="1.6" height="6"/></pattern></defs>'
)


def _parts(step: Step, room: float) -> tuple[Part, ...]:
    """All of the step where its passes are wide enough; else three equal parts of them.

    A part is long enough for the first backward pass of every rank to be in the first; the last
    has what follows the passes too.
    """
    span_s = step.played.makespan_s
    end_s = max(step.estimate.step_s, span_s)
    mean_s = span_s / max(len(own) for own in step.played.spans)
    whole = (Part(0.0, end_s),)
    if room / end_s * mean_s >= LEGIBLE_W:
        return whole
    filled_s = max(
        (next((span.end_s for span in own if span.action.kind != "F"), 0.0))
        for own in step.played.spans
    )
    each_s = max(room / 3 / PART_W * mean_s, 1.1 * filled_s)
    if 3 * each_s > 0.9 * span_s:
        return whole
    middle_s = (span_s - each_s) / 2
    return (
        Part(0.0, each_s),
        Part(middle_s, middle_s + each_s),
        Part(span_s - each_s, end_s),
    )


def _within(spans: Sequence[Span], part: Part) -> list[Span]:
    """Passes that take time in a part."""
    return [
        span
        for span in spans
        if span.end_s > span.start_s and span.end_s > part.start_s and span.start_s < part.end_s
    ]


def _rows(step: Step, row_h: int, width: int) -> str:
    """Ranks by name at the left, idle shares at the right; of some where rows are low."""
    every = -(-13 // row_h)
    found = []
    for rank, share in enumerate(step.bubble):
        if rank % every:
            continue
        stages = step.rows.stages_of(rank)
        tip = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        y = (rank + 0.5) * row_h + 4
        found.append(
            f'<text x="0" y="{y:.1f}">rank {rank}<title>{tip}</title></text>'
            f'<text class="dim end" x="{width - 2}" y="{y:.1f}">{percent(share)}</text>'
        )
    y = len(step.bubble) * row_h + 16
    return "".join(found) + f'<text class="dim end" x="{width - 2}" y="{y}">idle</text>'


def _part(step: Step, part: Part, scale: Scale, row_h: int, *, named: bool) -> str:
    """The passes of all ranks in a part, over hatched ground; then what follows the passes."""
    span_s, estimate = step.played.makespan_s, step.estimate
    height = len(step.rows.pipes) * row_h
    body = []
    outlines: dict[str, list[str]] = defaultdict(list)
    gap = 3 if row_h >= 14 else 1
    for rank, own in enumerate(step.played.spans):
        y, box_h = rank * row_h, row_h - gap
        idle_w = scale(min(part.end_s, span_s)) - scale.start
        body.append(
            f'<rect class="idle" fill="url(#idle)" x="{scale.start:.2f}" y="{y}" '
            f'width="{idle_w:.2f}" height="{box_h}"/>'
        )
        for span in _within(own, part):
            left = scale(max(span.start_s, part.start_s))
            box_w = scale(min(span.end_s, part.end_s)) - left
            if named:
                body.append(_box(span, left, y, box_w, box_h))
            else:
                outlines[span.action.kind].append(
                    f"M{left:.2f} {y}h{box_w:.2f}v{box_h}h{-box_w:.2f}z"
                )
    body += [f'<path class="pass {kind}" d="{"".join(d)}"/>' for kind, d in outlines.items()]
    after_s = span_s
    for name, length_s in (("exchange", step.exchange_s), ("update", estimate.update_s)):
        start_s, end_s = max(after_s, part.start_s), min(after_s + length_s, part.end_s)
        after_s += length_s
        if end_s > start_s:
            left = scale(start_s)
            body.append(
                f'<rect class="{name}" x="{left:.2f}" y="0" width="{scale(end_s) - left:.2f}" '
                f'height="{height - gap}"><title>{name}: {seconds(length_s)}</title></rect>'
            )
    return "".join(body) + _axis(scale, height, estimate.step_s)


def _box(span: Span, x: float, y: float, width: float, height: float) -> str:
    action = span.action
    text = f"{action.microbatch}" + (f".{action.token_slice}" if action.token_slice else "")
    tip = (
        f"{KINDS[action.kind]} of microbatch {action.microbatch}, stage {action.stage}: "
        f"{seconds(span.start_s)} to {seconds(span.end_s)}"
    )
    inside = ""
    if height >= 11 and width >= DIGIT_W * len(text) + 2:
        inside = (
            f'<text class="on {action.kind}" x="{x + width / 2:.1f}" '
            f'y="{y + height / 2 + 4:.1f}">{text}</text>'
        )
    line = min(1.0, width / 4)  # between neighbours
    return (
        f'<g><rect class="pass {action.kind}" x="{x:.2f}" y="{y}" width="{width - line:.2f}" '
        f'height="{height}"/>{inside}<title>{escaped(tip)}</title></g>'
    )


def _left_out(x: float, left_out_s: float, height: float) -> str:
    return (
        f'<text class="mid dim" x="{x:.1f}" y="{height / 2:.1f}">…</text>'
        f'<text class="mid dim" x="{x:.1f}" y="{height / 2 + 15:.1f}">{seconds(left_out_s)}</text>'
    )


def _axis(scale: Scale, y: float, step_s: float) -> str:
    """Round times below a part, in the unit that suits the whole step."""
    most = max(2, int((scale.end - scale.start) / 60))
    unit, found = time_marks(scale, most, step_s)
    lines: Iterable[str] = (
        f'<path class="tick" d="M{scale(value):.1f} {y:.1f}v5"/>'
        f'<text class="mid dim" x="{scale(value):.1f}" y="{y + 17:.1f}">{text} {unit}</text>'
        for value, text in found
    )
    return f'<path class="tick" d="M{scale.start:.1f} {y:.1f}H{scale.end:.1f}"/>' + "".join(lines)
