"""All findings about this machine, in the order in which they are told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from . import software, system
from .readings import read
from .row import Row


def examine(environment: Mapping[str, str], *, runs: Path, cache: Path) -> Iterator[Row]:
    """Findings one by one, as they come; the trial of two processes takes seconds.

    `runs` and `cache` are where runs and profiles will be written.
    """
    yield from software.rows()
    readings = read(environment, runs, cache)
    n_processes = 1
    broken = _torch()
    if broken is None:
        from ..cluster import accelerator
        from . import devices, links

        lead = accelerator.detect()
        n_processes = lead.count()
        yield from _guarded("devices", devices.rows)
        yield from links.interfaces(readings.interfaces)
        several = lead if n_processes >= links.N_PROCESSES else accelerator.HostAccelerator()
        yield links.two_processes(several)
    else:
        yield broken
    yield from system.rows(readings, n_processes)


def _torch() -> Row | None:
    """Whether torch can be imported; libraries of its own may be missing."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        value = f"cannot be imported: {' '.join(str(error).split())[:300]}"
        remedy = "pip install --force-reinstall torch"
        return Row(
            group="devices",
            what="torch",
            value=value,
            status="missing",
            needed=True,
            remedy=remedy,
        )
    return None


def _guarded(group: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """What could not be asked of a driver is a finding too."""
    try:
        yield from rows()
    except (OSError, RuntimeError) as error:
        value = " ".join(str(error).split())[:300]
        remedy = "install a driver and a torch that go together"
        yield Row(
            group=group, what="driver", value=value, status="missing", needed=True, remedy=remedy
        )
