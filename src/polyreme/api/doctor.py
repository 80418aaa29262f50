"""`polyreme doctor`: what this machine offers, printed or as rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..doctor import Row

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("missing", "red")}


def doctor(environment: Mapping[str, str] | None = None) -> tuple[Row, ...]:
    """What this machine offers, what is missing, and how to get it; takes up to ten seconds."""
    from ..doctor import examine
    from ..profile.store import cache_folder

    given = os.environ if environment is None else environment
    return tuple(examine(given, runs=Path("runs"), cache=cache_folder(given)))


def is_broken(rows: Sequence[Row]) -> bool:
    """Whether something that training needs is missing."""
    from ..doctor import broken

    return broken(rows)


def show_doctor(rows: Sequence[Row], console: Console) -> None:
    """A line a finding, with the remedy below where there is one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("", "what", "value"):
        table.add_column(head, overflow="fold")
    group = None
    for row in rows:
        if row.group != group:
            table.add_row("", Text(row.group, style="bold"), "")
            group = row.group
        mark, colour = _MARKS[row.status]
        value = Text(row.value)
        if row.remedy:
            value.append(f"\n-> {row.remedy}", style=colour)
        table.add_row(Text(mark, style=colour), row.what, value)
    console.print(table)
    counts = {status: sum(row.status == status for row in rows) for status in _MARKS}
    ends = (
        "something that training needs is missing" if is_broken(rows) else "this machine can train"
    )
    shown = f"{counts['ok']} ok, {counts['note']} notes, {counts['missing']} missing"
    console.print(f"{shown}: {ends}")
