"""Rows in files, more than are read at once: memory and time of two processes to a gap.

    python benchmarks/convex_large.py [--rows 10000000 --features 1000000] [--gap 1e-6] [--rounds N]
                                      [--limit SECONDS]

Rows are drawn, written to a folder as NumPy files, and trained on by pSCOPE from there. A line a
round tells the gap at its beginning, and the run's seconds at its end, reading included. Memory is
the sum over all processes of the pages that each holds, shared ones by their share (PSS), those of
mapped files included; the most of looks half a second apart.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import tomli_w
from sparse_set import sparse_set


def held_bytes(process: psutil.Process) -> int:
    """By a process and all that it began."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


class Told:
    """Prints a line for each round that a run's log has come to hold."""

    def __init__(self, log: Path) -> None:
        self.log, self.n_lines = log, 0
        self.gap = math.nan

    def look(self, most_bytes: int) -> None:
        """At lines that are new, and whole."""
        if not self.log.exists():
            return
        lines = self.log.read_text().split("\n")[:-1]
        for event in map(json.loads, lines[self.n_lines :]):
            if event["kind"] == "step":
                self.gap = event["gap"]
                print(f"round {event['step']}: gap {self.gap:.3g}, ", end="")
                print(f"objective {event['objective']:.9g}, {event['step_s']:.1f} s of ", end="")
                print(f"{event['t']:.0f} s, {most_bytes / 1e9:.1f} GB", flush=True)
            elif event["kind"] == "eval":
                self.gap = event["metrics"]["gap"]
        self.n_lines = len(lines)


def main() -> None:
    """Print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=1_000_000)
    parser.add_argument("--gap", type=float, default=1e-6)
    parser.add_argument("--rounds", type=int, default=40, help="at most")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of the run, at most")
    parser.add_argument("--folder", type=Path, help="where rows are written (unset: temporary)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        begun_s = time.monotonic()
        rows, y = sparse_set(given.rows, given.features)
        rows.save(folder / "set")
        np.save(folder / "set" / "labels.npy", y)
        n_bytes = sum(file.stat().st_size for file in (folder / "set").iterdir())
        print(f"{given.rows} x {given.features}: {n_bytes / 1e9:.1f} GB in files, ", end="")
        print(f"drawn in {time.monotonic() - begun_s:.0f} s", flush=True)
        del rows, y
        spec = {
            "model": {"kind": "linear", "l1": 1e-5, "l2": 1e-6},
            "data": {"kind": "csr", "path": str(folder / "set")},
            "train": {"steps": given.rounds, "gap": given.gap, "global_batch": 1024},
            "data_parallel": {"sync": {"kind": "pSCOPE"}},
        }
        path, out = folder / "spec.toml", folder / "run"
        path.write_text(tomli_w.dumps(spec))
        command = [sys.executable, "-m", "polyreme", "train", str(path), "--out", str(out)]
        begun_s = time.monotonic()
        process = psutil.Popen([*command, "--devices", "2"], stdout=subprocess.DEVNULL)
        most, told, ended = 0, Told(out / "log.jsonl"), ""
        while process.poll() is None:
            most = max(most, held_bytes(process))
            told.look(most)
            if time.monotonic() - begun_s > given.limit and not ended:
                ended = ", ended at its limit"
                process.terminate()
            time.sleep(0.5)
        told.look(most)
        if process.returncode and not ended:
            raise SystemExit(process.returncode)
        took_s = time.monotonic() - begun_s
        print(f"gap {told.gap:.2g} in {took_s:.0f} s with reading{ended}; ", end="")
        print(f"at most {most / 1e9:.1f} GB held by all processes")


if __name__ == "__main__":
    main()
