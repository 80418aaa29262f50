"""Time against memory: candidates that none betters in one and equals in the other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..plan.ir import Plan, Point
from .drawing import escaped
from .scale import around, size_marks, time_marks
from .words import percent, seconds, size

LEFT, RIGHT, TOP, BOTTOM = 74, 24, 22, 46
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
            step_s=estimate.step_s, peak_bytes=sum(estimate.peak_bytes.values()), plan="(chosen)"
        )
        points = sorted([*points, won], key=lambda point: (point.step_s, point.peak_bytes))
        chosen = points.index(won)
    rows = [
        (
            f"{number}",
            point.plan,
            seconds(point.step_s),
            _slower(point.step_s / estimate.step_s - 1),
            size(point.peak_bytes),
            "chosen" if number - 1 == chosen else "fits" if point.fits else "does not fit",
        )
        for number, point in enumerate(points, start=1)
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
    body = []
    unit, found = time_marks(times, 9)
    for value, text in found:
        x = times(value)
        body.append(f'<path class="grid-line" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        body.append(f'<text class="mid dim" x="{x:.1f}" y="{height - BOTTOM + 17}">{text}</text>')
    middle = (LEFT + width - RIGHT) / 2
    body.append(
        f'<text class="mid dim" x="{middle:.0f}" y="{height - 8}">predicted step time, {unit}'
        f"{', logarithmic' if times.log else ''}</text>"
    )
    unit, found = size_marks(sizes, 6)
    for value, text in found:
        y = sizes(value)
        body.append(f'<path class="grid-line" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        body.append(f'<text class="dim end" x="{LEFT - 7}" y="{y + 4:.1f}">{text}</text>')
    body.append(
        f'<text class="mid dim" transform="translate(14,{(TOP + height - BOTTOM) / 2:.0f}) '
        f'rotate(-90)">memory of a device, {unit}{", logarithmic" if sizes.log else ""}</text>'
    )
    if near and capacity is not None:
        y = sizes(capacity)
        body.append(
            f'<path class="capacity" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>'
            f'<text class="end" x="{width - RIGHT}" y="{y - 5:.1f}">a device has '
            f"{size(capacity)}</text>"
        )
    spots = [(times(point.step_s), sizes(point.peak_bytes)) for point in points]
    path = f"M{spots[0][0]:.1f} {spots[0][1]:.1f}" + "".join(
        f"H{x:.1f}V{y:.1f}" for x, y in spots[1:]
    )
    body.append(f'<path class="front-line" d="{path}"/>')
    named: list[tuple[float, float]] = []
    order = sorted(range(len(points)), key=lambda at: at != chosen)
    for at in order:
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
            body.append(f'<text x="{x + 10:.1f}" y="{y - 7:.1f}">{text}</text>')
    label = f"{len(points)} candidates by predicted step time and memory"
    return (
        f'<svg class="plan front" role="img" aria-label="{label}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{"".join(body)}</svg>'
    )
