"""What the ranks of test_restart run: training in which a rank fails at a given step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyreme.cluster.accelerator import HostAccelerator


@dataclass(frozen=True)
class Fault:
    """What `rank` does at the beginning of a step of this attempt."""

    rank: int
    step: int
    how: str


@dataclass(frozen=True, kw_only=True)
class Shrinking(HostAccelerator):
    """As many devices as a file says."""

    file: Path

    def count(self) -> int:
        return int(self.file.read_text())


def trains(request: Any, faults: Mapping[int, Fault]) -> Any:
    """`ranks.work`, with the fault of its attempt."""
    from polyreme.api import ranks
    from polyreme.runtime import driver

    fault = faults.get(request.attempt)
    if fault is not None and fault.rank == int(os.environ["RANK"]):
        if fault.how == "early":
            os._exit(0)
        step, done = driver.Driver.step, [0]

        def failing(self: Any, *args: Any, **said: Any) -> Any:
            done[0] += 1
            if done[0] == fault.step:
                _fail(fault.how)
            return step(self, *args, **said)

        driver.Driver.step = failing
    return ranks.work(replace(request, progress=False))


def _fail(how: str) -> None:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(1000)
    if how == "backend":
        from torch.distributed import DistBackendError

        raise DistBackendError("the card fell off")
    raise ValueError("the cause")
