"""Seconds from a rank's death until all train again, and from its stopping until it is named.

    python benchmarks/restart.py [--processes 2] [--repeats 3] [--timeout-s 3]

Each rank in turn of a run of the quickstart's model (checkpoints every few steps) gets SIGKILL, in
a second run SIGSTOP. Waits for the fault event in the log, which must name that rank, and for the
first step of the next attempt. Prints also what the record of collectives costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from polyreme.runtime.record import Record

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.toml"
BETWEEN_S = 5.0  # of training before each blow


@dataclass(frozen=True, kw_only=True)
class Found:
    """Seconds since a rank was hit: until the log named it, until the next attempt's first step."""

    named_s: float
    went_on_s: float


class Trained:
    """A run in a process of its own, and its log."""

    def __init__(self, folder: Path, processes: int, repeats: int, timeout_s: float) -> None:
        self._log = folder / "log.jsonl"
        command = [sys.executable, "-m", "polyreme", "train", str(SPEC), "--out", str(folder)]
        for setting in (
            "train.steps=100000",
            "train.checkpoint_every=5",
            "train.restart_wait_s=0.0",
            f"train.restarts={repeats}",
            f"train.timeout_s={timeout_s}",
            f"cluster.cpu_processes={processes}",
        ):
            command += ["--set", setting]
        self.job = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ranks(self) -> list[int]:
        """Process ids, in the order of ranks."""
        (zygote,) = psutil.Process(self.job.pid).children()
        return sorted(child.pid for child in zygote.children())

    def event(self, kind: str, attempt: int) -> dict[str, Any]:
        """Wait for the first event of a kind that an attempt logged."""
        while True:
            for event in self._events():
                if (event["kind"], event["attempt"]) == (kind, attempt):
                    return event
            assert self.job.poll() is None, f"the run ended before a {kind} of attempt {attempt}"
            time.sleep(0.02)

    def _events(self) -> list[dict[str, Any]]:
        """Whole events of a log that is being written."""
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_bytes().split(b"\n")[:-1]]


def hit(number: signal.Signals, processes: int, repeats: int, timeout_s: float) -> list[Found]:
    """Hit the ranks of a run by a signal, one after the other."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        run = Trained(Path(folder) / "run", processes, repeats, timeout_s)
        try:
            for attempt in range(repeats):
                run.event("step", attempt)
                time.sleep(BETWEEN_S)
                rank = attempt % processes
                os.kill(run.ranks()[rank], number)
                since_s = time.monotonic()
                fault = run.event("fault", attempt)
                named_s = time.monotonic() - since_s
                assert fault["rank"] == rank, fault["what"]
                run.event("step", attempt + 1)
                found.append(Found(named_s=named_s, went_on_s=time.monotonic() - since_s))
        finally:
            run.job.terminate()
            run.job.wait()
    return found


def record_s(repeats: int = 100_000) -> float:
    """Seconds that noting one collective takes."""
    record, tensor = Record(), torch.zeros(8, 8)
    start_s = time.perf_counter()
    for _ in range(repeats):
        with record.inside("all_reduce sum", tensor, 2):
            pass
    return (time.perf_counter() - start_s) / repeats


def show(what: str, found: list[Found], seconds: Callable[[Found], float]) -> None:
    """Print a row."""
    each_s = [seconds(one) for one in found]
    print(f"{what:34} {len(each_s):3} {statistics.median(each_s):9.1f} {max(each_s):8.1f}")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=3.0)
    options = parser.parse_args()
    print(f"noting a collective takes {1e6 * record_s():.1f} us; timeout_s {options.timeout_s:g}")
    print(f"{'from ... to ...':34} {'n':>3} {'median s':>9} {'most s':>8}")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        found = hit(number, options.processes, options.repeats, options.timeout_s)
        show(f"{number.name} to the rank's name", found, lambda one: one.named_s)
        show(f"{number.name} to the next attempt's step", found, lambda one: one.went_on_s)


if __name__ == "__main__":
    main()
