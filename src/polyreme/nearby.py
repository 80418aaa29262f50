"""Paths that are there and look like one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from .errors import like

_MOST = 500  # entries of a folder that are looked at


def nearby(path: str, fits: Callable[[Path], bool]) -> list[str]:
    """At most three paths beside `path`, or in the folder one is in, that fit; likest first."""
    wanted = Path(path).expanduser()
    found: dict[str, str] = {}
    for folder in dict.fromkeys((wanted.parent, Path())):
        for entry in _entries(folder):
            if fits(entry):
                found.setdefault(entry.name, str(entry))
    close = like(wanted.name, list(found))
    names = list(dict.fromkeys((*close, *sorted(found))))
    return [found[name] for name in names[:3]]


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from islice(folder.iterdir(), _MOST)
    except (OSError, ValueError):
        return
