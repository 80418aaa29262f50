"""Numbers and names as a reader of a report sees them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..units import show_bytes, show_seconds

UNKNOWN = "unknown"


def number(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, never in scientific notation below 1e7.

    >>> number(0.12345), number(12345.6), number(None)
    ('0.123', '12,346', 'unknown')
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "infinite"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.{digits - 1}e}"
    whole = 0 if size == 0 else math.floor(math.log10(size)) + 1
    return f"{value:,.{max(0, digits - max(whole, 0))}f}" if size >= 1 else f"{value:.{digits}g}"


def factor(value: float | None) -> str:
    """A dimensionless factor with two decimals (three significant digits when small)."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{value:.2f}" if abs(value) >= 0.1 else number(value, 2)


def percent(share: float | None) -> str:
    """A share between 0 and 1 in per cent; small ones with two digits that are not 0."""
    if share is None or math.isnan(share):
        return UNKNOWN
    value = 100 * share
    if value >= 9.95 or value == 0:
        return f"{value:.0f} %"
    if abs(value) < 0.1:
        digits = 1 - math.floor(math.log10(abs(value)))
        return f"{value:.{digits}f} %"
    return f"{value:.1f} %"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it, or `unknown`."""
    return UNKNOWN if value is None or not math.isfinite(value) else show_seconds(value)


def size(n_bytes: float | None) -> str:
    """Bytes in the unit that suits them, or `unknown`."""
    return UNKNOWN if n_bytes is None or not math.isfinite(n_bytes) else show_bytes(n_bytes)


def clipped(text: str, width: int) -> str:
    """The text cut to a number of characters, with a sign that it was."""
    return text if len(text) <= width else text[: max(1, width - 1)].rstrip() + "…"


def runs_of(names: Sequence[str]) -> str:
    """Layer names with consecutive numbers drawn together.

    >>> runs_of(("embed", "block.0", "block.1", "block.2", "head"))
    'embed, block.0-2, head'
    """
    groups: list[tuple[str, int, int] | str] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None:
            groups.append(name)
            continue
        stem, index = match[1], int(match[2])
        last = groups[-1] if groups else None
        if isinstance(last, tuple) and last[0] == stem and last[2] + 1 == index:
            groups[-1] = (stem, last[1], index)
        else:
            groups.append((stem, index, index))
    return ", ".join(
        group
        if isinstance(group, str)
        else f"{group[0]}{group[1]}" + (f"-{group[2]}" if group[2] > group[1] else "")
        for group in groups
    )
