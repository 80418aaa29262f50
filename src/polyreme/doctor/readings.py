"""What the system says of itself, as plain values; judged elsewhere."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED = -1
_LIMITS = {  # what it bounds: its name in `resource`
    "open files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "file size": "RLIMIT_FSIZE",
    "locked memory": "RLIMIT_MEMLOCK",
}
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of Linux's adjtimex


@dataclass(frozen=True, kw_only=True)
class Space:
    """A place for files: bytes in all and free, and whether this process may write there."""

    path: Path
    total_bytes: int
    free_bytes: int
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface; its speed is 0 where the driver does not tell."""

    name: str
    up: bool
    bit_s: float


@dataclass(frozen=True, kw_only=True)
class Readings:
    """A machine as it says it is; None where it does not say.

    `limits` are soft ones by what they bound (UNLIMITED: none). `quota_cores` is what the control
    group grants, `clock_error_s` what the kernel estimates where it keeps the clock synchronised.
    """

    limits: Mapping[str, int]
    shared_memory: Space | None
    run_space: Space | None
    cache_space: Space | None
    cores: int
    affinity_cores: int
    quota_cores: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    clock_resolution_s: float
    clock_synchronised: bool | None
    clock_error_s: float | None
    interfaces: tuple[Interface, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def read(environment: Mapping[str, str], runs: Path, cache: Path) -> Readings:
    """This machine. `runs` and `cache` are where files will go; they need not be there."""
    import psutil

    synchronised, error_s = _clock()
    try:
        stats = psutil.net_if_stats()
    except OSError:
        stats = {}
    interfaces = [
        Interface(name=name, up=each.isup, bit_s=each.speed * 1e6) for name, each in stats.items()
    ]
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return Readings(
        limits=_limits(),
        shared_memory=_space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        run_space=_space(runs),
        cache_space=_space(cache),
        cores=os.cpu_count() or 1,
        affinity_cores=affinity or os.cpu_count() or 1,
        quota_cores=_quota_cores(),
        memory_bytes=int(psutil.virtual_memory().total),
        memory_limit_bytes=_memory_limit(),
        clock_resolution_s=time.get_clock_info("monotonic").resolution,
        clock_synchronised=synchronised,
        clock_error_s=error_s,
        interfaces=tuple(interfaces),
        environment=environment,
    )


def _limits() -> dict[str, int]:
    found = {}
    for what, name in _LIMITS.items():
        if hasattr(resource, name):
            soft = resource.getrlimit(getattr(resource, name))[0]
            found[what] = UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return found


def _space(path: Path) -> Space | None:
    """The file system of a path, or of the nearest folder above it that is there."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), None)
    if there is None:
        return None
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    writable = os.access(there, os.W_OK)
    return Space(path=path, total_bytes=usage.total, free_bytes=usage.free, writable=writable)


def _quota_cores() -> float | None:
    """Cores that the control group grants (version 2, or else 1)."""
    words = _text("/sys/fs/cgroup/cpu.max").split()
    if not words:
        words = [
            _text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip(),
            _text("/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip(),
        ]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):
        return None
    return quota / period if quota > 0 < period else None


def _memory_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(_text(file))
        except ValueError:
            continue
        return limit if limit < 2**60 else None
    return None


def _text(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


class _Timex(ctypes.Structure):
    """The head of Linux's struct timex, and room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error_us", ctypes.c_long),
        ("error_us", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


def _clock() -> tuple[bool | None, float | None]:
    """Whether the kernel holds the wall clock for synchronised, and its estimated error."""
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    state = _Timex()
    if adjtimex is None or adjtimex(ctypes.byref(state)) < 0:
        return None, None
    if state.status & _UNSYNCHRONISED:
        return False, None
    return True, state.max_error_us / 1e6
