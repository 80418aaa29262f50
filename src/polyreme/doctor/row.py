"""One finding about a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "note", "missing"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, what was found, and what to do about it.

    A `note` is worth knowing, or slows a run down. Where something is `missing`, `needed` says
    whether training fails for it. `remedy` is a command or a setting; empty where all is well.
    """

    group: str
    what: str
    value: str
    status: Status = "ok"
    needed: bool = False
    remedy: str = ""


def broken(rows: Iterable[Row]) -> bool:
    """Whether something that training needs is missing."""
    return any(row.status == "missing" and row.needed for row in rows)
