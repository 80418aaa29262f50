"""One self-contained page for a run, or for several: opens from a file, asks for no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from .. import __version__, runlog
from ..errors import ConfigError, Violation
from ..plan.describe import describe
from ..plan.ir import MEMORY_CAUSES
from . import certificates, figures, tables
from .against import Against, Target, against, check_target, parse_target
from .facts import predicted_memory, time_shares, what
from .plot import Figure
from .runs import Run, read_run
from .view import curves, memory_bars, run_view
from .words import factor, percent, seconds, size

Sections = tuple[tuple[str, str], ...]
SINGLE_SECTIONS: Sections = (
    ("overview", "Overview"),
    ("learning", "Learning"),
    ("speed", "Speed"),
    ("memory", "Memory"),
    ("prediction", "Predicted"),
    ("plan", "Plan"),
    ("setup", "Setup"),
)
COMPARED_SECTIONS: Sections = (
    ("table", "Side by side"),
    ("learning", "Learning"),
    ("speed", "Speed"),
    ("memory", "Memory"),
    ("setup", "Setup"),
)
COLOURS = {
    "steps": "steps",
    "steps done again or skipped": "skipped",
    "until training went on": "caution",
    "start-up, evaluation, checkpoints": "rest",
    "forward": "pass-F",
    "recomputed forward": "pass-W",
    "backward": "pass-B",
    "exposed communication": "communication",
    "update": "optimizer",
} | {name: name for name in (*MEMORY_CAUSES, "compute", "communication", "waiting")}


def render(
    runs: Sequence[Path],
    out: Path,
    *,
    reference: Path | None = None,
    target: str | None = None,
) -> Path:
    """Write the page of one run, or the comparison of several, and return its path.

    `reference` is a run to compare with; `target` (``heldout_loss=1.9``) what both must reach,
    by default the first run's ``report.target``. With both, effectiveness is measured.

    Raises:
        ConfigError: a folder is no run, or the target is none.
        RunError: the disk is full.
    """
    loaded = [read_run(path) for path in runs]
    if not loaded:
        rule, legal = "names no run", "one run folder or more"
        raise ConfigError([Violation(path="run", value="", rule=rule, legal=legal)])
    base = read_run(reference) if reference is not None else None
    others = [
        run for run in loaded if base is None or run.folder.resolve() != base.folder.resolve()
    ]
    compared = [base, *others] if base is not None else loaded
    goal = None if target is None and base is None else _target(loaded, target)
    if goal is not None:
        check_target(goal, compared)
    found = [against(run, base, goal) for run in others] if base is not None else []
    context = _reference_view(found, base, goal)
    if len(loaded) == 1:
        page = _single(loaded[0], found[0] if found else None, context)
    else:
        page = _several(compared, ([None, *found] if base is not None else []), context)
    out.parent.mkdir(parents=True, exist_ok=True)
    return runlog.write_whole(out, page.encode())


def _target(runs: Sequence[Run], target: str | None) -> Target | None:
    if target is None:
        table = runs[0].spec.get("report")
        found = table.get("target") if isinstance(table, Mapping) else None
        target = found if isinstance(found, str) else None
    return None if target is None else parse_target(target)


def _single(run: Run, versus: Against | None, comparison: dict[str, Any] | None) -> str:
    drawn = curves(run)
    view = run_view(run, versus.effectiveness if versus else None) | drawn
    all_figures = [
        *(drawn[name] for name in ("learning", "metrics", "throughput", "step_time", "delays")),
        *drawn["rates"],
        *drawn["certificates"],
    ]
    sections = SINGLE_SECTIONS
    if comparison:
        sections = (sections[0], ("reference", "Reference"), *sections[1:])
    before = sections.index(("memory", "Memory"))
    more = [("delays", "Delays")] if view["delays_line"] else []
    more += [("suspects", "Suspects")] if view["suspects_line"] else []
    more += [("checkpoints", "Checkpoints")] if view["checkpoints"] else []
    sections = (*sections[:before], *more, *sections[before:])
    if view["trouble"]:
        sections = (("trouble", "What went wrong"), *sections)
    return fill(
        "run.html",
        [figure for figure in all_figures if figure is not None],
        title=f"{run.name}: polyreme report",
        sections=sections,
        simulated=run.simulated,
        run=run,
        view=view,
        comparison=comparison,
    )


def _several(
    runs: Sequence[Run], found: Sequence[Against | None], comparison: dict[str, Any] | None
) -> str:
    table = tables.comparison(runs, found)
    overlaid, gaps = figures.overlaid(runs), certificates.overlaid(runs)
    bars = [bar for run in runs for bar in memory_bars(run, run.name)]
    views = [
        {
            "run": run,
            "faults": [
                {"what": event.what, "where": tables.fault_place(run, index)}
                for index, event in enumerate(run.faults)
            ],
            "time_shares": time_shares(run),
        }
        for run in runs
    ]
    sections = COMPARED_SECTIONS
    if comparison:
        sections = (sections[0], ("reference", "Reference"), *sections[1:])
    causes = dict.fromkeys(share.name for run in runs for share in predicted_memory(run))
    return fill(
        "comparison.html",
        [figure for figure in (overlaid, gaps) if figure],
        title="comparison: polyreme report",
        sections=sections,
        simulated=all(run.simulated for run in runs),
        views=views,
        heads=table.heads,
        rows=table.rows,
        numeric=table.numeric,
        comparison=comparison,
        overlaid=overlaid,
        gaps=gaps,
        memory_bars=bars,
        memory_scale=max((bar.amount for bar in bars), default=1) or 1,
        memory_names=list(causes),
        setup=[
            (
                run.name,
                what(run),
                describe(run.plan) if run.plan else "none",
                run.summary.hardware if run.summary else "unknown",
                str(run.folder),
            )
            for run in runs
        ],
    )


def _reference_view(
    found: Sequence[Against], base: Run | None, goal: Target | None
) -> dict[str, Any] | None:
    if base is None or not found:
        return None
    table = tables.decomposition([against(base, base, goal), *found])
    told = []
    for each in found:
        if each.real is None or each.reach is None:
            told.append(f"{each.run} cannot be compared with {base.name}.")
            continue
        share = percent(1 / each.effectiveness) if each.effectiveness else "an unknown share"
        told.append(
            f"{each.run} came to {goal} {factor(each.real)} times as fast as {base.name}, with "
            f"{share} of its samples."
        )
    return {
        "heads": table.heads,
        "rows": table.rows,
        "numeric": table.numeric,
        "sentence": " ".join(told),
        "why": list(dict.fromkeys(line for each in found for line in each.why)),
    }


def fill(template: str, drawn: Sequence[Figure], **context: Any) -> str:
    """A template of this room as one page, with its style, and plotly where it draws figures."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    room = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(room),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        factor=factor,
        percent=percent,
        seconds=seconds,
        size=size,
        colour=lambda name: COLOURS.get(name, "other"),
    )
    inputs = {figure.name: figure for figure in drawn}
    figures_json = msgspec.json.encode(inputs).decode().replace("<", "\\u003c")
    return environment.get_template(template).render(
        css=Markup((room / "page.css").read_text(encoding="utf-8")),
        js=Markup((room / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()) if drawn else "",
        figures=inputs,
        figures_json=Markup(figures_json),
        version=__version__,
        **context,
    )
