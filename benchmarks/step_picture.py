"""Draws one step of a 2 x 2 x 2 run: two stages, two shards, two tensor parts, on a clock.

The actions are those of the plan, played with a backward pass of twice a forward pass.

    python benchmarks/step_picture.py [--svg docs/images/step.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from polyreme.plan.ir import Action
from polyreme.plan.order import find
from polyreme.plan.play import Costs, Span, play

N_STAGES, N_SHARDS, N_PARTS, N_MICROBATCHES = 2, 2, 2, 4
UNIT, LANE, LEFT, TOP, HEIGHT = 40.0, 26.0, 250.0, 64.0, 18.0
COLOURS = {"F": "#4c78a8", "B": "#f58518"}
GREY, GREEN, PURPLE = "#8c8c8c", "#54a24b", "#b279a2"


def picture() -> str:
    """The drawing as SVG."""
    order = find("1f1b").actions(N_STAGES, N_MICROBATCHES, Costs.equal(N_STAGES))
    played = play(order, N_STAGES, Costs.equal(N_STAGES))
    end = played.makespan_s
    shapes = [_text(LEFT, 20, "time (forward pass = 1, backward pass = 2)", size=12)]
    for second in range(int(end) + 1):
        x = _x(second)
        shapes.append(_line(x, TOP - 14, x, _y(N_STAGES - 1, 1, 1) + HEIGHT, "#e4e4e4"))
        shapes.append(_text(x, TOP - 18, str(second), size=10, anchor="middle"))
    for stage in range(N_STAGES):
        for shard in range(N_SHARDS):
            for part in range(N_PARTS):
                y = _y(stage, shard, part)
                rank = (stage * N_SHARDS + shard) * N_PARTS + part
                label = f"rank {rank}: stage {stage}, shard {shard}, part {part}"
                shapes.append(_text(12, y + 13, label, size=12))
                shapes += [_box(span, y) for span in played.spans[stage]]
                shapes.append(_mark(_x(end) + 8, y, 72, GREEN, "shards"))
                shapes.append(_mark(_x(end) + 84, y, 58, GREY, "agree"))
                shapes.append(_mark(_x(end) + 146, y, 58, PURPLE, "update"))
            shapes.append(_pair(_y(stage, shard, 0), _y(stage, shard, 1)))
    for shard in range(N_SHARDS):
        shapes += [_arrow(a, b, shard) for a, b in _sends(played.spans)]
    shapes += _legend(_y(N_STAGES - 1, 1, 1) + 44)
    width, height = _x(end) + 220, _y(N_STAGES - 1, 1, 1) + 160
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
    )
    return head + "\n".join(shapes) + "\n</svg>\n"


def _sends(spans: tuple[tuple[Span, ...], ...]) -> list[tuple[tuple[int, Span], tuple[int, Span]]]:
    """(stage, span) of each pass that hands something on, and of the one that takes it."""
    found = {_key(span.action): (stage, span) for stage, own in enumerate(spans) for span in own}
    pairs = []
    for (stage, kind, microbatch), giver in found.items():
        taker = found.get((stage + (1 if kind == "F" else -1), kind, microbatch))
        if taker is not None:
            pairs.append((giver, taker))
    return pairs


def _key(action: Action) -> tuple[int, str, int]:
    return action.stage, action.kind, action.microbatch


def _x(seconds: float) -> float:
    return LEFT + seconds * UNIT


def _y(stage: int, shard: int, part: int) -> float:
    return TOP + stage * 148 + shard * 66 + part * LANE


def _box(span: Span, y: float) -> str:
    x, width = _x(span.start_s), (span.end_s - span.start_s) * UNIT - 2
    name = f"{span.action.kind}{span.action.microbatch}"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="3" '
        f'fill="{COLOURS[span.action.kind]}"/>'
        + _text(x + width / 2, y + 13, name, size=11, anchor="middle", fill="white")
    )


def _mark(x: float, y: float, width: float, fill: str, name: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{HEIGHT}" rx="3" fill="{fill}"/>'
        + _text(x + width / 2, y + 13, name, size=11, anchor="middle", fill="white")
    )


def _pair(first: float, second: float) -> str:
    x = LEFT - 10
    return (
        f'<path d="M{x + 5} {first + 4} h-5 V{second + HEIGHT - 4} h5" fill="none" '
        f'stroke="{GREY}" stroke-width="1.5"/>'
    )


def _arrow(giver: tuple[int, Span], taker: tuple[int, Span], shard: int) -> str:
    down = giver[1].action.kind == "F"
    from_y = _y(giver[0], shard, 1 if down else 0) + (HEIGHT if down else 0)
    to_y = _y(taker[0], shard, 0 if down else 1) + (0 if down else HEIGHT)
    return (
        f'<line x1="{_x(giver[1].end_s) - 4:.1f}" y1="{from_y:.1f}" '
        f'x2="{_x(taker[1].start_s) + 4:.1f}" y2="{to_y:.1f}" stroke="#333" stroke-width="1" '
        'marker-end="url(#tip)"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'


def _text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", fill: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{fill}">{words}</text>'
    )


def _legend(y: float) -> list[str]:
    lines = (
        "F, B: forward and backward pass of a microbatch. Arrows: hidden to the next stage,",
        "its gradient back; each tensor part sends what it holds.",
        "Brackets: the two parts of a tensor meet in every region of a layer, both ways.",
        "shards: what is left of the reduce-scatter of gradients over the two shards of a stage.",
        "agree: one small sum over all ranks (loss, norm, flags).",
        "update: each shard its own part of the parameters.",
    )
    return [_text(12, y + 18 * at, line, size=12) for at, line in enumerate(lines)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, default=Path("docs/images/step.svg"))
    path: Path = parser.parse_args().svg
    path.write_text(picture())
    print(f"wrote {path}")
