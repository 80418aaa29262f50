"""Memory of this host and of this process, as the system says."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def host_bytes() -> int:
    """Of the machine, or as many as its control group allows."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(file).read_text()))
        except (OSError, ValueError):
            continue
    return total


def status_bytes(key: str) -> int:
    """A line of Linux's process status, in bytes; 0 where there is none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def usage_bytes() -> int:
    """Most that this process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
