"""Rows of numbers for terminals, JSON and the page; and the summary a run ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..units import count
from . import partition, suspects
from .against import Against, w_of
from .attempts import again_s, kept_skipped, restarts
from .beside import beside
from .facts import (
    Prediction,
    algorithm,
    beside_baseline,
    capacity_bytes,
    factors,
    headline,
    meaning_of_w,
    peak_bytes,
    predictions,
    product,
    summed,
    time_shares,
    totals,
    what,
)
from .figures import BASELINES
from .runs import Run
from .trouble import place, restart_line, run_spikes, skipped_line, worse_line
from .words import UNKNOWN, factor, number, percent, seconds, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A labelled value, with what stands beside it."""

    label: str
    value: str
    note: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Heads, rows of cells, and which columns hold numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


_NOTES = {"gradient": "the largest entry, of w - prox(w - g)"}


def outcome_rows(run: Run) -> tuple[Row, ...]:
    """Loss, metrics, speed and size of a run, in words."""
    total = totals(run)
    virtual = "virtual " if run.simulated else ""
    rows = [Row(label="final training loss", value=number(total.final_loss))]
    for name, value in total.metrics.items():
        if name in BASELINES or (name == "gap" and "objective" in total.metrics):
            continue
        if name == "objective":
            rows.append(_certified(value, total.metrics.get("gap")))
            continue
        note = beside_baseline(run) if name == "heldout_loss" else _NOTES.get(name, "")
        shown = percent(value) if name.endswith("accuracy") else number(value)
        rows.append(
            Row(label=name.replace("heldout", "held-out").replace("_", " "), value=shown, note=note)
        )
    if (worst := partition.worst(run)) is not None:
        shown, note = number(worst.constant), partition.note(run)
        rows.append(Row(label="partition constant", value=shown, note=note))
    per_s = f"{number(total.throughput)} /s" if total.throughput else UNKNOWN
    tokens = total.tokens / total.samples if total.samples and total.tokens else 0
    rows.append(
        Row(
            label="throughput, samples",
            value=per_s,
            note=f"{number(total.throughput * tokens)} tokens/s"
            if total.throughput and tokens
            else "",
        )
    )
    mfu = percent(total.mfu) if total.mfu is not None else UNKNOWN
    rows += [
        Row(
            label="MFU",
            value=mfu,
            note=_why_no_mfu(run),
        ),
        Row(label="median step", value=seconds(total.step_s_median)),
        Row(label="peak memory", value=size(total.peak_bytes), note=_of_capacity(run)),
        Row(
            label="sent by one process",
            value=size(total.wire_bytes),
            note=f"{size(total.wire_bytes / total.steps)} a step" if total.steps else "",
        ),
        Row(label=f"{virtual}time", value=seconds(total.seconds), note=count(total.steps, "step")),
    ]
    return tuple(rows)


def _certified(objective: float | None, gap: float | None) -> Row:
    """A linear model's objective, with as many digits as its gap makes known."""
    shown = UNKNOWN if objective is None else f"{objective:.10g}"
    note = "no bound known" if gap is None else f"at most {max(0.0, gap):.1e} above its optimum"
    return Row(label="objective", value=shown, note=note)


def prediction_cells(found: Prediction) -> tuple[str, str, str, str]:
    """Name, predicted, measured and the error of one prediction."""
    show = seconds if found.unit == "s" else size
    return (found.name, show(found.predicted), show(found.measured), found.error_text)


def summary_json(run: Run) -> dict[str, Any]:
    """What ``polyreme report RUN --json`` says of a run: plain numbers, null where unknown."""
    total = totals(run)
    parts = factors(run)
    return {
        "run": str(run.folder),
        "status": run.status,
        "trained": what(run),
        "algorithm": algorithm(run),
        **msgspec.to_builtins(total),
        "w": product(parts),
        "factors": {part.name: {"value": part.value, "basis": part.basis} for part in parts},
        "time": {share.name: share.share for share in time_shares(run)},
        "hidden_s": summed(run, "hidden_s"),
        "predictions": [
            {
                "name": found.name,
                "predicted": found.predicted,
                "measured": found.measured,
                "error": found.error,
            }
            for found in predictions(run)
        ],
        "restarts": [msgspec.to_builtins(each) for each in restarts(run)],
        "again_s": again_s(run),
        "skipped": kept_skipped(run),
        "spikes": [msgspec.to_builtins(each) for each in run_spikes(run)],
        "suspects": {str(worker): share for worker, share in suspects.shares(run).items()},
        "hostile": {str(worker): attack for worker, attack in suspects.hostile(run).items()},
        "partition": msgspec.to_builtins(run.summary.partition) if run.summary else None,
        "faults": [msgspec.to_builtins(event) for event in run.faults],
        "missing": list(run.missing),
    }


def against_json(found: Against) -> dict[str, Any]:
    """The decomposition of a speed-up as plain numbers."""
    return {**msgspec.to_builtins(found), "w": found.w, "rest": found.rest}


def comparison(runs: Sequence[Run], found: Sequence[Against | None] = ()) -> Table:
    """One row a run: outcome, speed, W with its factors; an asterisk marks what was assumed."""
    names = list(dict.fromkeys(name for run in runs for name in totals(run).metrics))
    names = [name for name in names if name not in BASELINES]
    algorithms = [algorithm(run) for run in runs]
    has_algorithms = any(algorithms)
    heads = (
        "run",
        *(("algorithm",) if has_algorithms else ()),
        "status",
        "final loss",
        *(name.replace("_", " ") for name in names),
        "time",
        "samples/s",
        "MFU",
        "W",
        "utilisation",
        "effectiveness",
        "goodput",
        "bytes sent",
        "peak memory",
        "devices",
    )
    rows = []
    for index, run in enumerate(runs):
        versus = found[index] if index < len(found) else None
        total = totals(run)
        parts = factors(run, versus.effectiveness if versus else None)
        rows.append(
            (
                run.name,
                *((algorithms[index] or "plain",) if has_algorithms else ()),
                run.status,
                number(total.final_loss, 4),
                *(number(total.metrics.get(name), 4) for name in names),
                seconds(total.seconds),
                number(total.throughput),
                percent(total.mfu),
                factor(w_of(run, versus)),
                *(factor(part.value) + ("*" if part.assumed else "") for part in parts),
                size(total.wire_bytes),
                size(total.peak_bytes),
                UNKNOWN if total.devices is None else f"{total.devices:,}",
            )
        )
    first = heads.index("final loss")
    return Table(heads=heads, rows=tuple(rows), numeric=tuple(range(first, len(heads))))


def decomposition(found: Sequence[Against]) -> Table:
    """Real speed-up = hardware x utilisation x effectiveness x goodput x rest, a row a run."""
    heads = (
        "run",
        "steps to target",
        "samples to target",
        "time to target",
        "real speed-up",
        "= hardware",
        "x utilisation",
        "x effectiveness",
        "x goodput",
        "x unexplained",
        "W",
    )
    rows = tuple(
        (
            each.run,
            f"{each.reach.step:,}" if each.reach else "never",
            f"{each.reach.samples:,}" if each.reach else "never",
            seconds(each.reach.seconds) if each.reach else "never",
            *(
                factor(value)
                for value in (
                    each.real,
                    each.hardware,
                    each.utilisation,
                    each.effectiveness,
                    each.goodput,
                    each.rest,
                    each.w,
                )
            ),
        )
        for each in found
    )
    return Table(heads=heads, rows=rows, numeric=tuple(range(1, len(heads))))


def show_run(run: Run, console: Console) -> None:
    """Print what a run came to, in 80 columns or more."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts = factors(run)
    colours = {"done": "green", "failed": "red"}
    colour = colours.get(run.status, "yellow")
    lines: list[RenderableType] = []
    lines += [
        Text.assemble(("✗ ", "red"), _fault_text(run, index)) for index in range(len(run.faults))
    ]
    said = (skipped_line(run), worse_line(run), restart_line(run), suspects.line(run))
    lines += [Text(line, style="yellow") for line in said if line]
    lines += [_rich_factors(run), Text(meaning_of_w(run, parts), style="dim"), Text()]
    lines.append(_rich_rows(outcome_rows(run)))
    shares = time_shares(run)
    if shares:
        lines += [Text(), _rich_bar(shares, console.width - 4)]
    if hidden := beside(run):
        lines.append(Text(hidden, style="dim"))
    if predictions(run):
        lines += [Text(), _rich_predictions(run)]
    lines += [Text(f"! {line}", style="yellow") for line in run.missing]
    title = Text.assemble(
        (run.name, "bold"), "  ", (run.status, colour), "  ", (headline(run), "dim")
    )
    console.print(Panel(Group(*lines), title=title, title_align="left", border_style="dim"))


def show_table(table: Table, console: Console) -> None:
    """Print a table; one too wide for the terminal is printed a column a run."""
    from rich import box
    from rich.table import Table as RichTable

    widths = [
        max(len(cell) for cell in column) for column in zip(table.heads, *table.rows, strict=True)
    ]
    if sum(widths) + 2 * len(widths) <= console.width:
        printed = RichTable(box=box.SIMPLE_HEAD)
        for index, head in enumerate(table.heads):
            printed.add_column(head, justify="right" if index in table.numeric else "left")
        for row in table.rows:
            printed.add_row(*row)
    else:
        printed = RichTable(box=box.SIMPLE_HEAD)
        printed.add_column(table.heads[0], style="dim")
        for row in table.rows:
            printed.add_column(row[0], justify="right", overflow="fold")
        for index, head in enumerate(table.heads[1:], start=1):
            printed.add_row(head, *(row[index] for row in table.rows))
    console.print(printed)


def _rich_factors(run: Run) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    parts = factors(run)
    w = product(parts)
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(justify="right", style="bold")
    grid.add_row("W", factor(w), style="cyan")
    for index, part in enumerate(parts if w is not None else ()):
        basis = Text(part.basis, style="yellow" if part.assumed else "dim")
        grid.add_row("x" if index else "=", factor(part.value), part.name, basis)
    return grid


def _rich_rows(rows: Sequence[Row]) -> RenderableType:
    from rich.table import Table as RichTable

    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column(style="dim")
    for row in rows:
        grid.add_row(row.label, row.value, row.note)
    return grid


def _rich_bar(shares: Sequence[Any], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    colours = {"compute": "blue", "communication": "yellow", "waiting": "bright_black"}
    signs = {"compute": "█", "communication": "▓", "waiting": "░"}
    bar, legend = Text(no_wrap=True), Text("step time  ", style="dim")
    for share in shares:
        bar.append(signs[share.name] * round(share.share * width), style=colours[share.name])
        legend.append(signs[share.name] + " ", style=colours[share.name])
        legend.append(f"{share.name} {percent(share.share)}   ")
    bar.truncate(width)
    return Group(legend, bar)


def _rich_predictions(run: Run) -> RenderableType:
    from rich.table import Table as RichTable

    grid = RichTable.grid(padding=(0, 2))
    for style, justify in (("dim", "left"), ("", "right"), ("bold", "right"), ("dim", "left")):
        grid.add_column(style=style, justify=justify)  # type: ignore[arg-type]
    grid.add_row("", "predicted", "measured", "")
    for found in predictions(run):
        grid.add_row(*prediction_cells(found))
    return grid


def _fault_text(run: Run, index: int) -> str:
    return f"{run.faults[index].what} {fault_place(run, index)}"


def fault_place(run: Run, index: int) -> str:
    """Where and when a fault came: rank, operation, time."""
    event = run.faults[index]
    where = place(event)
    when = f"after {seconds(event.t)}, attempt {event.attempt}"
    return f"({where}; {when})" if where else f"({when})"


def _why_no_mfu(run: Run) -> str:
    if run.summary is None:
        return "no summary"
    return "" if run.summary.mfu is not None else "peak of the device not known"


def _of_capacity(run: Run) -> str:
    peak, capacity = peak_bytes(run), capacity_bytes(run)
    return f"{percent(peak / capacity)} of {size(capacity)}" if peak and capacity else ""
