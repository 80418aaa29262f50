"""Rounds and passes of pSCOPE to a gap of 1e-6, by data set, penalty and workers.

    python benchmarks/convex_passes.py --data DIR [--set a9a] [--passes 4] [--eta 0.1]
    python benchmarks/convex_passes.py --set generated --passes 0 --passes 1 --passes 2 ...

`DIR` holds ``libsvm/NAME.train.libsvm.gz``; `generated` rows are drawn, 50 numbers each, as many
as features. A round counts one pass for its gradient beside those of its local steps; the search
before the first is left out. Played on the virtual clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sparse_set import sparse_set

from polyreme import api


def played(path: Path, model: dict[str, float], n: int, sync: dict[str, Any], most: int) -> str:
    """Cells of a row: rounds, passes, the first and last step size and passes of a round."""
    kind = "csr" if path.is_dir() else "svmlight"
    spec = {
        "model": {"kind": "linear", **model},
        "data": {"kind": kind, "path": str(path), "heldout": 0.0},
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


@contextmanager
def at(name: str, data: Path | None, n: int) -> Iterator[Path]:
    """A set's file, or a folder of n rows that are drawn."""
    if name != "generated":
        if data is None:
            raise SystemExit(f"{name}: where is it? give --data")
        yield data / "libsvm" / f"{name}.train.libsvm.gz"
        return
    with tempfile.TemporaryDirectory() as folder:
        rows, y = sparse_set(n, n)
        rows.save(Path(folder))
        np.save(Path(folder) / "labels.npy", y)
        del rows, y
        yield Path(folder)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--set", action="append", help="a9a, w8a and rcv1_small unless given")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the generated set")
    parser.add_argument("--workers", type=int, action="append", help="1, 4 and 8 unless given")
    parser.add_argument("--l1", type=float, default=1e-4)
    parser.add_argument("--l2", type=float, default=1e-4)
    parser.add_argument("--passes", type=float, action="append", help="of a round; 0: searched for")
    parser.add_argument("--eta", type=float, help="step size")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    given = parser.parse_args()
    eta = {} if given.eta is None else {"eta": given.eta}
    penalties = {
        f"l1 = {given.l1:g}": {"l1": given.l1},
        f"l2 = {given.l2:g}": {"l2": given.l2},
        "both": {"l1": given.l1, "l2": given.l2},
    }
    print("| set | penalty | workers | M | rounds | passes ", end="")
    print("| first, last eta | first, last of a round |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.set or ("a9a", "w8a", "rcv1_small"):
        with at(name, given.data, given.rows) as path:
            for label, model in penalties.items():
                for n in given.workers or (1, 4, 8):
                    for passes in given.passes or (0,):
                        sync = {**eta, **({"passes": passes} if passes else {})}
                        row = played(path, model, n, sync, given.rounds)
                        known = f"{passes:g}" if passes else "searched"
                        print(f"| {name} | {label} | {n} | {known} | {row} |", flush=True)


if __name__ == "__main__":
    main()
