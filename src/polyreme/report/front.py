"""Time against memory: candidates that none betters in one and equals in the other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..plan.describe import describe
from ..plan.ir import Plan, Point
from ..units import apart, show_bytes, show_seconds
from .drawing import escaped
from .scale import Scale, around, size_marks, time_marks
from .words import percent, seconds, size

LEFT, RIGHT, TOP, BOTTOM = 74, 24, 22, 46
MARK_W = 64  # of a time below the drawing
NEAR = 15.0  # pixels at which a number would lie on another


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the table (number, plan, time, how much slower, memory, whether it fits); a drawing.

    `chosen` is the row of the plan that won. The drawing is left out where there is one point.
    """

    rows: tuple[tuple[str, ...], ...]
    chosen: int
    svg: str


def front(plan: Plan, width: int, height: int) -> Front | None:
    """The front of a plan's search; None where none was recorded."""
    search, estimate = plan.search, plan.estimate
    if search is None or not search.front or estimate is None:
        return None
    points = list(search.front)
    chosen = _chosen(points, estimate.step_s)
    if chosen is None:
        won = Point(
            step_s=estimate.step_s,
            peak_bytes=sum(estimate.peak_bytes.values()),
            plan=describe(plan),
        )
        points = sorted([*points, won], key=lambda point: (point.step_s, point.peak_bytes))
        chosen = points.index(won)
    steps = apart([point.step_s for point in points], show_seconds)
    sizes = apart([point.peak_bytes for point in points], show_bytes)
    rows = [
        (
            f"{number}",
            point.plan,
            step,
            _slower(point.step_s / estimate.step_s - 1),
            need,
            "chosen" if number - 1 == chosen else "fits" if point.fits else "does not fit",
        )
        for number, (point, step, need) in enumerate(
            zip(points, steps, sizes, strict=True), start=1
        )
    ]
    capacity = estimate.peak_capacity_bytes
    svg = _svg(points, chosen, capacity, width, height) if len(points) > 1 else ""
    return Front(rows=tuple(rows), chosen=chosen, svg=svg)


def _chosen(points: Sequence[Point], step_s: float) -> int | None:
    """The point that won; None where another is as fast in less memory."""
    same = [at for at, point in enumerate(points) if point.step_s == step_s and point.fits]
    return same[0] if same else None


def _slower(share: float) -> str:
    if share == 0:
        return ""
    return f"+{percent(share)}" if share > 0 else f"-{percent(-share)}"


def _svg(
    points: Sequence[Point], chosen: int, capacity: int | None, width: int, height: int
) -> str:
    """Time to the right and memory upward; the line goes along what can be had."""
    times = around([point.step_s for point in points], LEFT, width - RIGHT)
    tops = [float(point.peak_bytes) for point in points]
    near = capacity is not None and min(tops) / 2 < capacity < 2 * max(tops)
    sizes = around([*tops, float(capacity or 0)] if near else tops, height - BOTTOM, TOP)
    spots = [(times(point.step_s), sizes(point.peak_bytes)) for point in points]
    path = f"M{spots[0][0]:.1f} {spots[0][1]:.1f}" + "".join(
        f"H{x:.1f}V{y:.1f}" for x, y in spots[1:]
    )
    body = [_across(times, width, height), _upward(sizes, width)]
    line_y = None
    if near and capacity is not None:
        line_y = sizes(capacity)
        body.append(
            f'<path class="capacity" d="M{LEFT} {line_y:.1f}H{width - RIGHT}"/>'
            f'<text class="end" x="{width - RIGHT}" y="{line_y - 5:.1f}">a device has '
            f"{size(capacity)}</text>"
        )
    body += [f'<path class="front-line" d="{path}"/>', _spots(points, spots, chosen, line_y)]
    label = f"{len(points)} candidates by predicted step time and memory"
    return (
        f'<svg class="plan front" role="img" aria-label="{label}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{"".join(body)}</svg>'
    )


def _across(times: Scale, width: int, height: int) -> str:
    unit, found = time_marks(times, width // MARK_W)
    low = height - BOTTOM
    lines = [
        f'<path class="grid-line" d="M{times(value):.1f} {TOP}V{low}"/>'
        f'<text class="mid dim" x="{times(value):.1f}" y="{low + 17}">{text}</text>'
        for value, text in found
    ]
    middle, how = (times.start + times.end) / 2, ", logarithmic" if times.log else ""
    name = f"predicted step time, {unit}{how}"
    return f'{"".join(lines)}<text class="mid dim" x="{middle:.0f}" y="{height - 8}">{name}</text>'


def _upward(sizes: Scale, width: int) -> str:
    unit, found = size_marks(sizes, 6)
    lines = [
        f'<path class="grid-line" d="M{LEFT} {sizes(value):.1f}H{width - RIGHT}"/>'
        f'<text class="dim end" x="{LEFT - 7}" y="{sizes(value) + 4:.1f}">{text}</text>'
        for value, text in found
    ]
    middle, how = (sizes.start + sizes.end) / 2, ", logarithmic" if sizes.log else ""
    turned = f'transform="translate(14,{middle:.0f}) rotate(-90)"'
    name = f"memory of a device, {unit}{how}"
    return f'{"".join(lines)}<text class="mid dim" {turned}>{name}</text>'


def _spots(
    points: Sequence[Point],
    spots: Sequence[tuple[float, float]],
    chosen: int,
    line_y: float | None,
) -> str:
    """The chosen first; numbers where they lie on no other, and not on the line."""
    body: list[str] = []
    named: list[tuple[float, float]] = []
    for at in sorted(range(len(points)), key=lambda at: at != chosen):
        (x, y), point = spots[at], points[at]
        style = "chosen" if at == chosen else "fits" if point.fits else "over"
        tip = f"{point.plan}: {seconds(point.step_s)}, {size(point.peak_bytes)}"
        body.append(
            f'<circle class="spot {style}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{7 if at == chosen else 4.5}"><title>{escaped(tip)}</title></circle>'
        )
        if all(abs(x - a) > NEAR or abs(y - b) > NEAR for a, b in named):
            named.append((x, y))
            text = f"{at + 1} chosen" if at == chosen else f"{at + 1}"
            on_line = line_y is not None and abs(y - 11 - line_y) < NEAR
            text_y = y + 18 if on_line else y - 7
            body.append(f'<text x="{x + 10:.1f}" y="{text_y:.1f}">{text}</text>')
    return "".join(body)
