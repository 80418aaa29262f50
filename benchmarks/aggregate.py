"""Seconds and memory of robust aggregators beside three peers', interleaved in one run.

python benchmarks/aggregate.py [--rows 32 --entries 25000000 --device cpu] [--byzfl PYTHON]

The peers are byzfl, run by a Python that has it (without one it is left out), and two versions in
plain torch as one would write them: `plain` by whole tensors, `loop` row by row. All are given the
same rows and the same number of iterations; times are the best of `--rounds`, in each of which all
are played one after another. `memory` is the most that ours takes beyond rows and result, as a
share of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import polyreme as pr

F = 3
NEAREST = pr.aggregate.NearestNeighbourMixing()
Aggregate = Callable[[torch.Tensor], torch.Tensor]
OURS: dict[str, Aggregate] = {
    "Krum": lambda x: pr.aggregate.krum(x, F, neighbours="n-f-1"),
    "MultiKrum": lambda x: pr.aggregate.multi_krum(x, F, neighbours="n-f-1"),
    "CoordinateMedian": lambda x: pr.aggregate.coordinate_median(x, F),
    "TrimmedMean": lambda x: pr.aggregate.trimmed_mean(x, F),
    "GeometricMedian": lambda x: pr.aggregate.geometric_median(x, F, iterations=3),
    "CenteredClipping": lambda x: pr.aggregate.centered_clipping(x, F, tau=100.0, iterations=3),
    "MinimumDiameterAveraging": lambda x: pr.aggregate.minimum_diameter_averaging(x, F),
    "MoNNA": lambda x: pr.aggregate.monna(x, F),
    "MeanAroundMedian": lambda x: pr.aggregate.mean_around_median(x, F),
    "Bulyan": lambda x: pr.aggregate.bulyan(x, F),
    "Mixing, then median": lambda x: pr.aggregate.coordinate_median(x, F, before=(NEAREST,)),
}
BYZFL = {  # it has no Bulyan
    "Krum": f"Krum(f={F})",
    "MultiKrum": f"MultiKrum(f={F})",
    "CoordinateMedian": "Median()",
    "TrimmedMean": f"TrMean(f={F})",
    "GeometricMedian": "GeometricMedian(nu=1e-6, T=3)",
    "CenteredClipping": "CenteredClipping(L=3, tau=100.0)",
    "MinimumDiameterAveraging": f"MDA(f={F})",
    "MoNNA": f"MoNNA(f={F})",
    "MeanAroundMedian": f"Meamed(f={F})",
    "Mixing, then median": f"Median()(preaggregators.NNM(f={F})(x))",
}


def _squared(x: torch.Tensor) -> torch.Tensor:
    gram = x @ x.T
    squares = gram.diagonal()
    return squares[:, None] + squares[None, :] - 2 * gram


def _squared_by_row(x: torch.Tensor) -> torch.Tensor:
    found = x.new_zeros(len(x), len(x))
    for i, a in enumerate(x):
        for j in range(i):
            found[i, j] = found[j, i] = (a - x[j]).square().sum()
    return found


def _best(squared: torch.Tensor, k: int) -> torch.Tensor:
    scores = squared.sort(dim=1).values[:, 1 : len(squared) - F].sum(1)
    return scores.argsort()[:k]


def _diameter(squared: torch.Tensor) -> torch.Tensor:
    from itertools import combinations

    n, distances = len(squared), squared.cpu()
    subsets = torch.tensor(list(combinations(range(n), n - F)))
    widths = torch.stack([distances[rows][:, rows].max() for rows in subsets])
    return subsets[widths.argmin()].to(squared.device)


def _chosen(squared: torch.Tensor) -> torch.Tensor:
    left = list(range(len(squared)))
    while len(left) > 2 * F:
        inner = squared[left][:, left].sort(dim=1).values
        left.pop(int(inner[:, 1 : len(left) - F - 1].sum(1).argmin()))
    return torch.tensor([i for i in range(len(squared)) if i not in left], device=squared.device)


def _mixing(squared: torch.Tensor) -> torch.Tensor:
    near = squared.topk(len(squared) - F, dim=1, largest=False).indices
    return torch.zeros_like(squared).scatter_(1, near, 1 / (len(squared) - F))


def _mixed_by_row(x: torch.Tensor) -> torch.Tensor:
    near = _squared_by_row(x).topk(len(x) - F, dim=1, largest=False).indices
    return torch.stack([x[rows].mean(0) for rows in near])


def _weiszfeld(x: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x[0])
    for _ in range(3):
        inverse = 1 / (x - z).norm(dim=1).clamp(min=1e-6)
        z = (inverse @ x) / inverse.sum()
    return z


def _weiszfeld_by_row(x: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x[0])
    for _ in range(3):
        inverse = [1 / (row - z).norm().clamp(min=1e-6) for row in x]
        z = sum(w * row for w, row in zip(inverse, x, strict=True)) / sum(inverse)
    return z


def _clipped(x: torch.Tensor) -> torch.Tensor:
    v = torch.zeros_like(x[0])
    for _ in range(3):
        away = x - v
        v = v + (away * (100.0 / away.norm(dim=1)).clamp(max=1.0)[:, None]).mean(0)
    return v


def _clipped_by_row(x: torch.Tensor) -> torch.Tensor:
    v = torch.zeros_like(x[0])
    for _ in range(3):
        step = torch.zeros_like(v)
        for row in x:
            away = row - v
            step += away * (100.0 / away.norm()).clamp(max=1.0)
        v = v + step / len(x)
    return v


def _around(x: torch.Tensor, without: int = F) -> torch.Tensor:
    away = (x - x.median(dim=0).values).abs()
    nearest = away.topk(len(x) - without, dim=0, largest=False).indices
    return x.gather(0, nearest).mean(0)


def _around_by_sort(x: torch.Tensor, without: int = F) -> torch.Tensor:
    ordered = x.sort(dim=0).values
    middle = ordered[(len(x) - 1) // 2]
    order = (ordered - middle).abs().argsort(dim=0)[: len(x) - without]
    return ordered.gather(0, order).mean(0)


def _by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().sort(dim=1).values


PLAIN: dict[str, Aggregate] = {
    "Krum": lambda x: x[_best(_squared(x), 1)[0]].clone(),
    "MultiKrum": lambda x: x[_best(_squared(x), len(x) - F)].mean(0),
    "CoordinateMedian": lambda x: x.median(dim=0).values,
    "TrimmedMean": lambda x: x.sort(dim=0).values[F:-F].mean(0),
    "GeometricMedian": _weiszfeld,
    "CenteredClipping": _clipped,
    "MinimumDiameterAveraging": lambda x: x[_diameter(_squared(x))].mean(0),
    "MoNNA": lambda x: x[(x - x[0]).norm(dim=1).argsort()[: len(x) - F]].mean(0),
    "MeanAroundMedian": _around,
    "Bulyan": lambda x: _around(x[_chosen(_squared(x))], 2 * F),
    "Mixing, then median": lambda x: (_mixing(_squared(x)) @ x).median(dim=0).values,
}
LOOP: dict[str, Aggregate] = {
    "Krum": lambda x: x[_best(_squared_by_row(x), 1)[0]].clone(),
    "MultiKrum": lambda x: x[_best(_squared_by_row(x), len(x) - F)].mean(0),
    "CoordinateMedian": lambda x: _by_columns(x)[:, (len(x) - 1) // 2],
    "TrimmedMean": lambda x: _by_columns(x)[:, F:-F].mean(1),
    "GeometricMedian": _weiszfeld_by_row,
    "CenteredClipping": _clipped_by_row,
    "MinimumDiameterAveraging": lambda x: x[_diameter(_squared_by_row(x))].mean(0),
    "MoNNA": lambda x: x[torch.stack([(r - x[0]).norm() for r in x]).argsort()[: len(x) - F]].mean(
        0
    ),
    "MeanAroundMedian": _around_by_sort,
    "Bulyan": lambda x: _around_by_sort(x[_chosen(_squared_by_row(x))], 2 * F),
    "Mixing, then median": lambda x: _by_columns(_mixed_by_row(x))[:, (len(x) - 1) // 2],
}
THEIRS = """
import json, sys, time, torch
from byzfl.aggregators import aggregators, preaggregators
n, d, device, threads, path = json.loads(sys.argv[1])
torch.set_num_threads(threads)
x = torch.from_file(path, size=n * d, dtype=torch.float32).view(n, d).to(device)
for line in sys.stdin:
    make = "aggregators." + line.strip()
    make = eval("lambda x: " + (make if make.endswith("(x))") else make + "(x)"))
    try:
        start = time.perf_counter()
        make(x)
        if device != "cpu":
            torch.cuda.synchronize()
        print(time.perf_counter() - start, flush=True)
    except Exception as error:
        print("nan", type(error).__name__, flush=True)
"""


def _timed(aggregate: Aggregate, x: torch.Tensor) -> float:
    start = time.perf_counter()
    aggregate(x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _memory(name: str, x: torch.Tensor, path: str) -> float:
    """Bytes beyond rows and result; on the host the growth of a new process's peak."""
    if x.device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        OURS[name](x)
        return torch.cuda.max_memory_allocated(x.device) - before - x[0].nbytes
    argv = [sys.executable, __file__, "--alone", name, "--rows", str(len(x))]
    argv += ["--entries", str(x.shape[1]), "--path", path]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def _alone(name: str, n: int, d: int, path: str) -> None:
    """Prints how far the memory of this process grows beyond rows, which are read, and result."""
    x = torch.from_file(path, size=n * d, dtype=torch.float32).view(n, d)
    OURS[name](x[:, :1000].clone())
    x.sum()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is of what follows
    before = _peak()
    OURS[name](x)
    print(_peak() - before - x[0].nbytes)


def _peak() -> int:
    (line,) = (
        each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each
    )
    return 1024 * int(line.split()[1])


def main() -> None:
    """Reads the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--entries", type=int, default=25_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--byzfl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(OURS))
    parser.add_argument("--alone")
    parser.add_argument("--path")
    given = parser.parse_args()
    if given.alone:
        _alone(given.alone, given.rows, given.entries, given.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(given, str(Path(folder) / "rows"))


def _compare(given: argparse.Namespace, path: str) -> None:
    n, d = given.rows, given.entries
    x = torch.from_file(path, shared=True, size=n * d, dtype=torch.float32).view(n, d)
    x.normal_(generator=torch.Generator().manual_seed(0))
    theirs: Any = None
    if given.byzfl:
        told = json.dumps([n, d, given.device, torch.get_num_threads(), path])
        theirs = subprocess.Popen(
            [given.byzfl, "-c", THEIRS, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    rows = x.to(given.device)
    print(f"n {n}, d {d:,}, {given.device}, {torch.get_num_threads()} threads; seconds")
    print("| aggregator | ours | byzfl | plain | loop | ours / fastest | memory |")
    print("|---|---|---|---|---|---|---|")
    for name in given.only:
        best = dict.fromkeys(("ours", "byzfl", "plain", "loop"), float("inf"))
        OURS[name](rows[:, :1000].contiguous())
        for _ in range(given.rounds):
            for who, aggregates in (("ours", OURS), ("plain", PLAIN), ("loop", LOOP)):
                best[who] = min(best[who], _timed(aggregates[name], rows))
            if theirs is not None and name in BYZFL:
                theirs.stdin.write(BYZFL[name] + "\n")
                theirs.stdin.flush()
                best["byzfl"] = min(best["byzfl"], float(theirs.stdout.readline().split()[0]))
        ratio = best["ours"] / min(best[who] for who in ("byzfl", "plain", "loop"))
        share = _memory(name, rows, path) / rows.nbytes
        cells = " | ".join(f"{s:.3f}" if math.isfinite(s) else "-" for s in best.values())
        print(f"| {name} | {cells} | {ratio:.2f} | {share:.3f} |", flush=True)
    if theirs is not None:
        theirs.stdin.close()
        theirs.wait()


if __name__ == "__main__":
    main()
