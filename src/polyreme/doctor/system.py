"""What limits, memory, disks, clocks, cores and settings mean for a run."""

from __future__ import annotations

from collections.abc import Iterator

from ..cluster.accelerator import VARIABLES
from ..units import show_bytes, show_seconds
from .readings import UNLIMITED, Readings, Space
from .row import Row, Status

_FILES = (256, 4096)  # open files of a process: below the first runs fail, below the second may
_PROCESSES = (64, 1024)
_LOCKED_BYTES = 64 * 2**20
_SHARED_BYTES = 64 * 2**20  # of shared memory, a process
_RUN_BYTES = (256 * 2**20, 10 * 2**30)
_CACHE_BYTES = 16 * 2**20
_HARMLESS = ("_HOME", "_VERSION", "_ARCH_LIST")  # for building programs
_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
    "MKL_NUM_THREADS", "LD_PRELOAD", "XDG_CACHE_HOME", "HF_HOME",
    "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
)  # fmt: skip


def rows(readings: Readings, n_processes: int) -> Iterator[Row]:
    """Findings about the system, for a run of so many processes on this machine."""
    yield from _cores(readings, n_processes)
    yield from _memory(readings)
    yield _shared_memory(readings.shared_memory, n_processes)
    yield from _limits(readings)
    yield _disk("space for runs", readings.run_space, _RUN_BYTES[0], _RUN_BYTES[1], needed=True)
    yield _disk("space for profiles", readings.cache_space, _CACHE_BYTES, _CACHE_BYTES)
    yield from _clocks(readings)
    yield from _environment(readings)


def _cores(readings: Readings, n_processes: int) -> Iterator[Row]:
    usable = min(readings.affinity_cores, readings.quota_cores or readings.affinity_cores)
    granted = f"{usable:g} of {readings.cores}"
    quota = readings.quota_cores is not None and readings.quota_cores < readings.affinity_cores
    yield Row(
        group="processor",
        what="cores usable",
        value=granted + (f" (control group's quota {readings.quota_cores:g})" if quota else ""),
        status="note" if usable < n_processes else "ok",
        remedy=f"train on fewer processes: --devices {max(1, int(usable))}"
        if usable < n_processes
        else "",
    )
    asked = readings.environment.get("OMP_NUM_THREADS", "")
    if not asked:
        yield Row(group="processor", what="OMP_NUM_THREADS", value="unset (a run sets 1)")
        return
    n_threads = int(asked) if asked.isdigit() else 0
    crowded = n_threads < 1 or n_threads * n_processes > max(usable, n_processes)
    best = max(1, int(usable) // max(1, n_processes))
    yield Row(
        group="processor",
        what="OMP_NUM_THREADS",
        value=f"{asked} threads x {n_processes} processes on {usable:g} cores",
        status="note" if crowded else "ok",
        remedy=f"export OMP_NUM_THREADS={best}" if crowded else "",
    )


def _memory(readings: Readings) -> Iterator[Row]:
    limit = readings.memory_limit_bytes
    held = limit is not None and limit < readings.memory_bytes
    value = show_bytes(readings.memory_bytes)
    if held:
        value = f"{show_bytes(limit or 0)} (control group's limit) of {value}"
    yield Row(group="memory", what="host memory", value=value)


def _shared_memory(space: Space | None, n_processes: int) -> Row:
    need = _SHARED_BYTES * n_processes
    what, where = "/dev/shm", f"at least {show_bytes(need)}"
    if space is None:
        remedy = f"mount a tmpfs of {where} at /dev/shm"
        return Row(group="memory", what=what, value="none", status="note", remedy=remedy)
    value = f"{show_bytes(space.free_bytes)} free of {show_bytes(space.total_bytes)}"
    if space.free_bytes >= need and space.writable:
        return Row(group="memory", what=what, value=value)
    remedy = f"give {where} (of a container: --shm-size or --ipc=host), or remove old files there"
    return Row(group="memory", what=what, value=value, status="missing", remedy=remedy)


def _limits(readings: Readings) -> Iterator[Row]:
    commands = {"open files": "ulimit -n 65536", "processes": "ulimit -u 4096"}
    floors = {"open files": _FILES, "processes": _PROCESSES}
    for what, limit in readings.limits.items():
        value = "no limit" if limit == UNLIMITED else f"{limit:,}"
        status: Status = "ok"
        remedy = ""
        if what in floors and limit != UNLIMITED:
            worst, low = floors[what]
            status = "missing" if limit < worst else "note" if limit < low else "ok"
            remedy = "" if status == "ok" else commands[what]
        elif what == "file size" and limit != UNLIMITED:
            value = show_bytes(limit)
            status, remedy = "note", "ulimit -f unlimited (checkpoints may be larger)"
            if limit < _RUN_BYTES[0]:
                status = "missing"
        elif what == "locked memory" and limit != UNLIMITED:
            value = show_bytes(limit)
            if limit < _LOCKED_BYTES:
                status, remedy = "note", "ulimit -l unlimited (RDMA networks lock memory)"
        needed = what != "locked memory"
        yield Row(
            group="limits", what=what, value=value, status=status, needed=needed, remedy=remedy
        )


def _disk(what: str, space: Space | None, least: int, low: int, *, needed: bool = False) -> Row:
    if space is None:
        remedy = "name another folder with --out" if needed else "export XDG_CACHE_HOME=FOLDER"
        return Row(
            group="disk", what=what, value="none", status="missing", needed=needed, remedy=remedy
        )
    value = f"{show_bytes(space.free_bytes)} free in {space.path.absolute()}"
    move = "another folder (--out)" if needed else "another folder (XDG_CACHE_HOME)"
    status: Status = "ok"
    remedy = ""
    if not space.writable:
        status, value = "missing", f"{space.path} cannot be written"
        remedy = f"use {move}, or chmod u+w {space.path}"
    elif space.free_bytes < low:
        status = "missing" if space.free_bytes < least else "note"
        remedy = f"free {show_bytes(low)}, or use {move}"
    return Row(group="disk", what=what, value=value, status=status, needed=needed, remedy=remedy)


def _clocks(readings: Readings) -> Iterator[Row]:
    coarse = readings.clock_resolution_s > 1e-6
    yield Row(
        group="clocks",
        what="monotonic clock",
        value=f"resolution {show_seconds(readings.clock_resolution_s)}",
        status="note" if coarse else "ok",
        remedy="use another clock source of the kernel: times of steps are coarse"
        if coarse
        else "",
    )
    synchronised = readings.clock_synchronised
    if synchronised is None:
        value, status = "the kernel does not say", "note"
    elif synchronised:
        value, status = f"synchronised, within {show_seconds(readings.clock_error_s or 0)}", "ok"
    else:
        value, status = "not synchronised; offset unknown", "note"
    yield Row(
        group="clocks",
        what="wall clock",
        value=value,
        status="ok" if status == "ok" else "note",
        remedy=""
        if status == "ok"
        else "run chrony or systemd-timesyncd where several machines train together",
    )


def _environment(readings: Readings) -> Iterator[Row]:
    """Variables that change what torch, its backends or a launcher do; secrets are none of them."""
    for name, value in sorted(readings.environment.items()):
        known = name.startswith(VARIABLES) and not name.endswith(_HARMLESS)
        if not (known or name in _NAMES):
            continue
        launched = name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        yield Row(
            group="environment",
            what=name,
            value=value,
            status="note",
            remedy=f"unset {name} for the default"
            + (" (a launcher's: a run joins it as a rank)" * launched),
        )
