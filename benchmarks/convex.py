"""Linear models over several workers: rounds and bytes, beside the methods of others.

    python benchmarks/convex.py rounds --data DIR [--set a9a]
    python benchmarks/convex.py partitions --data DIR

`DIR` holds ``libsvm/NAME.train.libsvm.gz``. Everything is played on the virtual clock; a round is
what a worker sends once for: a whole sum, a gradient, or a push. The optimum is that of the solver
on one core, to a duality gap of 1e-12.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from polyreme import linear
from polyreme.convex.goodness import goodness
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.data.deal import sorted_by
from polyreme.data.svmlight_text import read

GOAL = 1e-6  # of the optimum
MOST, NEVER = 2_000, 10_000  # rounds that are played; one that has not arrived counts as many
WORKERS = 8
FEW_WORKERS = 4  # among whom partitions are looked at
Spec = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """Its [data_parallel], samples of a round, rounds between looks, and rates to try."""

    name: str
    parallel: Spec
    batch: int
    every: int = 1
    rates: tuple[float, ...] = ()
    rounds: int = 300


def methods(n: int, curvature: float) -> list[Method]:
    """Ours and others', for n samples of a largest curvature."""
    rates = {k: 2.0**k / curvature for k in range(-8, 5)}
    few, each = [tuple(rates[k] for k in range(*span)) for span in ((-8, 1), (-4, 5))]
    rule = {"kind": "ProximalSGD"}
    ours = [Method(name="pSCOPE", parallel={"sync": {"kind": "pSCOPE"}}, batch=n)]
    for kind in ("CoCoA", "DANE", "DSVRG", "ADMM", "OWLQN", "BlockCoordinate"):
        every = 10 if kind in ("BlockCoordinate", "CoCoA", "OWLQN") else 1
        sync = {"sync": {"kind": kind}}
        ours.append(Method(name=kind, parallel=sync, batch=n, every=every, rounds=MOST))
    given = {
        "mini-batch SGD": ({}, 64 * WORKERS, few),
        "gradient descent": ({}, n, each),
        "SSP": ({"sync": {"kind": "SSP", "staleness": 3}}, n, each),
        "ASP": ({"sync": {"kind": "ASGD"}}, n, each),
    }
    return ours + [
        Method(name=name, parallel={"rule": rule, **more}, batch=batch, every=20, rates=tried)
        for name, (more, batch, tried) in given.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Objectives by round, and bytes that a worker has sent by then.

    `anchor` is the first at which the run measured its partition, if it did.
    """

    points: tuple[tuple[int, float, float], ...]
    anchor: dict[str, float] | None = None

    def reached(self, goal: float) -> tuple[int, float] | None:
        """The first round at which the objective was that low, and bytes."""
        return next(((r, sent) for r, low, sent in self.points if low <= goal), None)

    @property
    def lowest(self) -> float:
        """Of all."""
        return min((low for _, low, _ in self.points if math.isfinite(low)), default=math.inf)


def play(method: Method, problem: Spec, rate: float | None, rounds: int, folder: Path) -> Way:
    """One run on the virtual clock, to the goal's gap or its last round."""
    name = f"{method.name}-{rate}-{rounds}".replace(" ", "-")
    parallel = dict(method.parallel)
    if rate is not None:
        parallel["rule"] = {**parallel["rule"], "lr": rate}
    spec = {
        "model": problem["model"],
        "data": problem["data"],
        "train": {
            "steps": rounds,
            "gap": problem["gap"],
            "global_batch": method.batch,
            "eval_every": method.every,
            "tail": "wrap",
            "max_skipped": 5,
        },
        "data_parallel": parallel,
        "simulate": {"workers": problem["workers"]},
    }
    path, out = folder / f"{name}.toml", folder / name
    path.write_text(tomli_w.dumps(spec))
    command = [sys.executable, "-m", "polyreme", "simulate", str(path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "not finite" not in done.stderr:
        raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
    sent, points, anchor = 0.0, [], None
    for line in (out / "log.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            sent += event["wire_bytes"]
        elif event["kind"] == "eval" and "objective" in event["metrics"]:
            points.append((event["step"], event["metrics"]["objective"], sent))
        elif event["kind"] == "partition":
            anchor = event["anchors"][0]
    return Way(points=tuple(points), anchor=anchor)


def best_of(method: Method, problem: Spec, folder: Path) -> tuple[float | None, Way]:
    """The rate that is lowest after some rounds, and the whole way at it."""
    if not method.rates:
        return None, play(method, problem, None, method.rounds, folder)
    tried = {
        rate: play(method, problem, rate, method.rounds, folder).lowest for rate in method.rates
    }
    rate = min(tried, key=lambda each: tried[each])
    return rate, play(method, problem, rate, MOST, folder)


def rounds(given: argparse.Namespace) -> None:
    """Rounds and bytes of each method to a relative 1e-6, on 8 workers."""
    path = given.data / "libsvm" / f"{given.set}.train.libsvm.gz"
    ((rows, targets),) = read([path], None)
    y = np.where(targets == targets.max(), 1.0, -1.0)
    best = linear.fit(rows, y, l1=given.l1, l2=given.l2, tol=1e-12).objective
    curvature = 0.25 * float(np.add.reduceat(rows.values**2, rows.indptr[:-1]).max())
    problem = {
        "model": {"kind": "linear", "l1": given.l1, "l2": given.l2},
        "data": {"kind": "svmlight", "path": str(path), "heldout": 0.0},
        "gap": best * GOAL / 100,
        "workers": WORKERS,
    }
    print(f"{given.set}, {len(y)} rows, logistic, l1 = {given.l1:g}, l2 = {given.l2:g}, ", end="")
    print(f"{WORKERS} workers: optimum {best:.10f}\n")
    print("| method | rounds | MB sent by a worker | rate | rounds over pSCOPE's |")
    print("|---|---|---|---|---|", flush=True)
    chosen = [m for m in methods(len(y), curvature) if given.only in (None, m.name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        ways = pool.map(lambda method: best_of(method, problem, Path(folder)), chosen)
        ours = None
        for method, (rate, way) in zip(chosen, ways, strict=True):
            came = way.reached(best * (1 + GOAL))
            ours = ours or (came[0] if came else None)
            n_rounds = NEVER if came is None else came[0]
            shown = f"{came[0]} | {came[1] / 1e6:.3g}" if came else f"> {way.points[-1][0]} | -"
            asked = "-" if rate is None else f"{rate * curvature:g}/L"
            times = "" if ours is None else f"{n_rounds / ours:.4g}"
            print(f"| {method.name} | {shown} | {asked} | {times} |", flush=True)


def partitions(given: argparse.Namespace) -> None:
    """How good three partitions over a few workers are, and how many rounds pSCOPE takes there."""
    path = given.data / "libsvm" / f"{given.set}.train.libsvm.gz"
    ((rows, targets),) = read([path], None)
    y = np.where(targets == targets.max(), 1.0, -1.0)
    objective = Objective(penalty=Penalty(l1=given.l1, l2=given.l2))
    w = linear.fit(rows, y, l1=given.l1, l2=given.l2, tol=1e-10).w
    n, rng = len(y), np.random.default_rng(0)
    dealt = {
        "iid": np.array_split(rng.permutation(n), FEW_WORKERS),
        "classes": np.array_split(np.argsort(y, kind="stable"), FEW_WORKERS),
        "by_feature": sorted_by(rows.column(given.feature), FEW_WORKERS),
    }
    kinds = {
        "iid": {"kind": "iid"},
        "classes": {"kind": "classes", "per_worker": 1},
        "by_feature": {"kind": "by_feature", "feature": given.feature},
    }
    print("| partition | constant | seen at distance | rounds to a gap of 1e-6 ", end="")
    print("| constant by the run, from 0 | promised |\n|---|---|---|---|---|---|")
    for name, parts in dealt.items():
        shards = [
            Shard(objective=objective, rows=rows.take(np.sort(p)), y=y[np.sort(p)]) for p in parts
        ]
        found = goodness(shards, w, directions=2)
        method = Method(name=name, parallel={"sync": {"kind": "pSCOPE"}}, batch=n)
        problem = {
            "model": {"kind": "linear", "l1": given.l1, "l2": given.l2},
            "data": {
                "kind": "svmlight",
                "path": str(path),
                "heldout": 0.0,
                "partition": kinds[name],
            },
            "gap": 1e-6,
            "workers": FEW_WORKERS,
        }
        with tempfile.TemporaryDirectory() as folder:
            way = play(method, problem, None, 300, Path(folder))
        last = way.points[-1][0]
        n_rounds = f"> {last}" if last == 300 else f"{last - 1}"  # the last makes no move
        seen = f"{found.constant:.3g} | {found.distance:.3g}"
        own = way.anchor or {"constant": math.nan, "promised": math.nan}
        told = f"{own['constant']:.3g} | {own['promised']:.3g}"
        print(f"| {name} | {seen} | {n_rounds} | {told} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("rounds", "partitions"))
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--set", default="a9a")
    parser.add_argument("--l1", type=float, default=1e-4)
    parser.add_argument("--l2", type=float, default=1e-4)
    parser.add_argument("--feature", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", help="one method alone")
    given = parser.parse_args()
    {"rounds": rounds, "partitions": partitions}[given.table](given)


if __name__ == "__main__":
    main()
