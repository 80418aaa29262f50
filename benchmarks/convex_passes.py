"""Rounds and passes of pSCOPE to a gap of 1e-6, by data set, penalty and workers.

    python benchmarks/convex_passes.py --data DIR [--set a9a] [--passes 4] [--eta 0.1]

`DIR` holds ``libsvm/NAME.train.libsvm.gz``. A round counts one pass for its gradient beside those
of its local steps; the search before the first is left out. Played on the virtual clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from polyreme import api

PENALTIES = {
    "l1 = 1e-4": {"l1": 1e-4},
    "l2 = 1e-4": {"l2": 1e-4},
    "both": {"l1": 1e-4, "l2": 1e-4},
}


def played(path: Path, model: dict[str, float], n: int, sync: dict[str, Any], most: int) -> str:
    """Cells of a row: rounds, passes, the first and last step size and passes of a round."""
    spec = {
        "model": {"kind": "linear", **model},
        "data": {"kind": "svmlight", "path": str(path), "heldout": 0.0},
        "train": {"steps": most, "gap": 1e-6, "global_batch": 64 * n},
        "data_parallel": {"sync": {"kind": "pSCOPE", **sync}},
        "simulate": {"workers": n},
    }
    with tempfile.TemporaryDirectory() as folder:
        api.simulate(spec, out=Path(folder) / "run")
        lines = (Path(folder) / "run" / "log.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["kind"] == "step"]
    arrived = steps[-1]["gap"] <= 1e-6
    moves = steps[:-1] if arrived else steps
    passes = sum(1 + each["passes"] for each in moves)
    first, last = moves[0], moves[-1]
    rounds = f"{len(moves)}" if arrived else f"> {len(moves)}"
    return (
        f"{rounds} | {passes:g} | {first['lr']:.3g}, {last['lr']:.3g} | "
        f"{first['passes']:g}, {last['passes']:g}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--set", action="append", help="a9a, w8a and rcv1_small unless given")
    parser.add_argument("--workers", type=int, action="append", help="1, 4 and 8 unless given")
    parser.add_argument("--passes", type=float, help="of a round")
    parser.add_argument("--eta", type=float, help="step size")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    given = parser.parse_args()
    sync = {name: v for name in ("passes", "eta") if (v := getattr(given, name)) is not None}
    print(
        "| set | penalty | workers | rounds | passes | first, last eta | first, last of a round |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in given.set or ("a9a", "w8a", "rcv1_small"):
        path = given.data / "libsvm" / f"{name}.train.libsvm.gz"
        for label, model in PENALTIES.items():
            for n in given.workers or (1, 4, 8):
                row = played(path, model, n, sync, given.rounds)
                print(f"| {name} | {label} | {n} | {row} |", flush=True)


if __name__ == "__main__":
    main()
