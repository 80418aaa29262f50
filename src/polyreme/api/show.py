"""What commands print for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..plan.export.kind import Exported
    from ..plan.ir import Plan
    from ..profile.record import Profile
    from .explaining import Explanation
    from .verifying import Verification

MOST_LOST = 12


def show_run(folder: Path, console: Console) -> None:
    """What a run came to."""
    from ..report.runs import read_run
    from ..report.tables import show_run as show

    show(read_run(folder), console)
    console.print(f"report: {folder / 'report.html'}")


def show_plans(plans: Sequence[Plan], console: Console) -> None:
    """The best plans with their times and memory by cause, and why the nearest others lost."""
    from ..plan.explain import text

    console.print(text(plans, most_lost=MOST_LOST), soft_wrap=True)


def show_explanation(found: Explanation, console: Console) -> None:
    """Why a plan won, and what was written."""
    console.print(found.text, soft_wrap=True)
    for path in filter(None, (found.page, found.trace)):
        console.print(f"wrote {path}", soft_wrap=True)


def show_exported(found: Exported, out: Path | None, console: Console) -> None:
    """What was written where; without a file the text itself, and what to know on stderr."""
    if out is not None:
        console.print(f"wrote {out}", soft_wrap=True)
    else:
        console.out(found.text, end="", highlight=False)
    for note in found.notes:
        sys.stderr.write(f"polyreme: {found.tool}: {note}\n")


def show_profile(profile: Profile, console: Console) -> None:
    """Layer kinds with their times at the largest measured microbatch, and the collectives."""
    from rich.table import Table

    from ..units import show_bytes, show_flops, show_seconds

    assumed = " (assumed)" if profile.assumed else ""
    compiled = " (compiled)" if profile.compiled else ""
    title = f"layers on {profile.hardware}{assumed}{compiled}"
    table = Table(title=title, title_justify="left")
    for head in ("layer kind", "samples", "forward", "backward", "saved a sample"):
        table.add_column(head)
    for kind, times in profile.layers.items():
        table.add_row(
            kind,
            str(times.microbatch[-1]),
            show_seconds(times.forward_s[-1]),
            show_seconds(times.backward_s[-1]),
            show_bytes(times.saved_bytes_per_sample),
        )
        for n, part in times.parts.items():
            table.add_row(
                f"  one of {n} parts",
                str(part.microbatch[-1]),
                show_seconds(part.forward_s[-1]),
                show_seconds(part.backward_s[-1]),
                "",
            )
    console.print(table)
    for op, entries in profile.collectives.items():
        for entry in entries:
            console.print(
                f"{op} over {entry.n_devices}: {show_bytes(entry.size_bytes[-1])} in "
                f"{show_seconds(entry.seconds[-1])}"
            )
    console.print(f"best matrix product: {show_flops(profile.matmul_flops)}/s a device")


def show_listing(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """A column a key; where it is not a terminal, a line each with tabs between."""
    from rich.table import Table

    if not console.is_terminal:
        for row in rows:
            print("\t".join(row.values()), file=console.file)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in rows[0]:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def show_verification(found: Verification, console: Console) -> None:
    """The largest errors beside what they may be."""
    from rich.table import Table

    steps_ = "1 step" if found.steps == 1 else f"{found.steps} steps"
    title = f"{found.plan}: {steps_} beside one process, {found.dtype}, uncompiled, no dropout"
    table = Table(title=title, title_justify="left")
    for head in ("what", "largest error", "allowed"):
        table.add_column(head)
    table.add_row("loss", f"{found.max_loss_error:.1e}", f"{found.loss_tolerance:g}")
    table.add_row("gradient", f"{found.max_grad_error:.1e}", f"{found.tolerance:g}")
    what = "parameter" if found.dtype == "float64" else "update"
    table.add_row(what, f"{found.max_parameter_error:.1e}", f"{found.tolerance:g}")
    console.print(table)
    console.print("passed" if found.passed else f"failed: {found.difference}", soft_wrap=True)
