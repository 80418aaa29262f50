"""Seconds from the death of a rank until all train again, and what the record of collectives costs.

    python benchmarks/restart.py [--processes 2] [--repeats 3]

Kills one rank of a run of the quickstart's model (checkpoints every few steps) with SIGKILL and
waits for the first step of the next attempt.
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
from pathlib import Path
from typing import Any

import psutil
import torch

from polyreme.runtime.record import Record

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def events(log: Path) -> list[dict[str, Any]]:
    """Whole events of a log that is being written."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


def attempts(log: Path) -> set[int]:
    """Attempts that have done a step."""
    return {event["attempt"] for event in events(log) if event["kind"] == "step"}


def wait_for(attempt: int, log: Path, job: subprocess.Popen[bytes]) -> float:
    """When the first step of an attempt was logged (``time.monotonic``)."""
    while attempt not in attempts(log):
        assert job.poll() is None, f"the run ended before attempt {attempt} did a step"
        time.sleep(0.02)
    return time.monotonic()


def restart_s(processes: int, repeats: int) -> list[float]:
    """Seconds from each kill to the first step afterwards."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "polyreme", "train", str(SPEC), "--out", str(run)]
        for setting in ("checkpoint_every=5", "restart_wait_s=0.0", f"restarts={repeats}"):
            command += ["--set", f"train.{setting}"]
        command += ["--set", f"cluster.cpu_processes={processes}"]
        job = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for attempt in range(repeats):
            wait_for(attempt, run / "log.jsonl", job)
            time.sleep(5.0)
            (zygote,) = psutil.Process(job.pid).children()
            os.kill(zygote.children()[-1].pid, signal.SIGKILL)
            killed_s = time.monotonic()
            found.append(wait_for(attempt + 1, run / "log.jsonl", job) - killed_s)
        job.terminate()
        job.wait()
    return found


def record_s(repeats: int = 100_000) -> float:
    """Seconds that noting one collective takes."""
    record, tensor = Record(), torch.zeros(8, 8)
    start_s = time.perf_counter()
    for _ in range(repeats):
        with record.inside("all_reduce sum", tensor, 2):
            pass
    return (time.perf_counter() - start_s) / repeats


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"noting a collective    {1e6 * record_s():.1f} us")
    found = restart_s(options.processes, options.repeats)
    print(
        f"kill to first step     median {statistics.median(found):.1f} s, most {max(found):.1f} s"
    )


if __name__ == "__main__":
    main()
