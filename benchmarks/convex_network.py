"""Four processes behind 100 Mbit/s each: seconds to a relative 1e-6, beside SSP and ASP.

    python benchmarks/convex_network.py [--rows 1000000 --features 1000000] [--mbit 100]

As root: each process is in a network namespace of its own, whose one way out, both directions
limited by tbf, is a bridge. pSCOPE is run by four ranks over gloo; the others by four workers and a
server, which has a namespace too. Rates of the others are tried, by powers of 2, on the virtual
clock first. Seconds are of steps, from the first one's beginning to the first look at which the
objective is low enough; a method that has not arrived by ten times ours is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from convex_hook import PLACES
from sparse_set import sparse_set

from polyreme import linear

WORKERS = 4
GOAL = 1e-6
HERE = Path(__file__).parent
_RUN = "import convex_hook, sys; from polyreme.cli import main; sys.argv[0] = 'polyreme'; main()"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def places(mbit: float) -> Iterator[list[tuple[str, str]]]:
    """Namespaces with their addresses: one for each worker, one more."""
    bridge, names = "prbridge", [f"prspace{k}" for k in range(WORKERS + 1)]
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "1s"]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for k, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"prlink{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"prlink{k}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.87.0.{k + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            limited = ["tc", "qdisc", "add", "dev", "eth0", "root", *limit]
            subprocess.run([*_inside(name), *limited], check=True)
            outside = ["tc", "qdisc", "add", "dev", f"prlink{k}", "root"]
            subprocess.run([*outside, *limit], check=True)
        yield [(name, f"10.87.0.{k + 1}") for k, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def _inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


def specification(data: Path, parallel: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    """Of one method on the set."""
    return {
        "model": {"kind": "linear", "l1": L1, "l2": L2},
        "data": {"kind": "csr", "path": str(data)},
        "train": {"timeout_s": 3600.0, "on_save_error": "continue", **train},
        "data_parallel": dict(parallel),
    }


L1, L2 = 1e-5, 1e-6


def way(out: Path) -> list[tuple[float, float]]:
    """Seconds since the first step began, and objectives."""
    points, begun = [], None
    log = out / "log.jsonl"
    for line in log.read_text().splitlines() if log.exists() else ():
        event = json.loads(line)
        if event["kind"] == "step":
            begun = event["t"] - event["step_s"] if begun is None else begun
            if event.get("objective") is not None:  # before the step: late by a round
                points.append((event["t"] - begun, event["objective"]))
        elif event["kind"] == "eval" and begun is not None:
            points.append((event["t"] - begun, event["metrics"]["objective"]))
    return points


def arrived(points: list[tuple[float, float]], goal: float) -> float | None:
    """Seconds at which an objective was low enough."""
    return next((t for t, low in points if low <= goal), None)


def ranks(spec: Path, out: Path, there: list[tuple[str, str]]) -> None:
    """One rank a namespace, to the run's end."""
    common = {
        "MASTER_ADDR": there[0][1],
        "MASTER_PORT": "29555",
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [
                *_inside(name),
                sys.executable,
                "-m",
                "polyreme",
                "train",
                str(spec),
                "--out",
                str(out),
            ],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank, (name, _) in enumerate(there[:WORKERS])
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError("a rank failed")


def served(
    spec: Path, out: Path, there: list[tuple[str, str]], goal: float, limit_s: float
) -> None:
    """Workers and a server, until the objective is low enough or the time is over."""
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [
            *(*_inside(there[-1][0]), sys.executable, "-c", _RUN, "train", str(spec)),
            *("--out", str(out), "--devices", str(WORKERS)),
        ],
        env={
            **os.environ,
            PLACES: json.dumps(there),
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        time.sleep(1.0)
        points = way(out)
        if arrived(points, goal) is not None or (points and points[-1][0] > limit_s):
            process.send_signal(signal.SIGINT)
            process.wait()


def tuned(data: Path, folder: Path, parallel: Mapping[str, Any], n: int) -> float:
    """The rate that is lowest after some rounds on the virtual clock."""
    tried = {}
    for rate in (2.0**k for k in range(2, 11)):
        given = {**parallel, "rule": {"kind": "ProximalSGD", "lr": rate}}
        spec = specification(data, given, steps=10, global_batch=n, eval_every=10)
        path, out = folder / "tune.toml", folder / f"tune-{rate}"
        path.write_text(tomli_w.dumps({**spec, "simulate": {"workers": WORKERS}}))
        command = [sys.executable, "-m", "polyreme", "simulate", str(path), "--out", str(out)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        points = way(out)
        if not points or (tried and points[-1][1] > 1.1 * min(tried.values())):
            break
        tried[rate] = points[-1][1]
    return min(tried, key=lambda rate: tried[rate])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=1_000_000)
    parser.add_argument("--mbit", type=float, default=100.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, places(given.mbit) as there:
        folder = Path(name)
        data, n = folder / "set", given.rows
        rows, y = sparse_set(n, given.features)
        rows.save(data)
        np.save(data / "labels.npy", y)
        best = linear.fit(rows, y, l1=L1, l2=L2, tol=1e-11).objective
        del rows, y
        goal = best * (1 + GOAL)
        print(f"{n} x {given.features}, l1 = {L1:g}, l2 = {L2:g}: optimum {best:.12f}; ", end="")
        print(f"{WORKERS} processes at {given.mbit:g} Mbit/s\n", flush=True)
        print("| method | seconds to 1e-6 | times pSCOPE's | rate |\n|---|---|---|---|")
        spec = specification(
            data,
            {"sync": {"kind": "pSCOPE"}},
            steps=100,
            gap=best * GOAL / 10,
            global_batch=n,
        )
        path = folder / "ours.toml"
        for rounds, out in ((1, folder / "warm"), (100, folder / "ours")):
            # The first run compiles kernels, which are kept.
            spec["train"]["steps"] = rounds
            path.write_text(tomli_w.dumps(spec))
            ranks(path, out, there)
        out = folder / "ours"
        ours = arrived(way(out), goal)
        if ours is None:
            raise RuntimeError(f"pSCOPE did not arrive: {way(out)[-3:]}, goal {goal}")
        print(f"| pSCOPE | {ours:.1f} | 1 | - |", flush=True)
        for method, sync in {
            "SSP": {"kind": "SSP", "staleness": 3},
            "ASP": {"kind": "ASGD"},
        }.items():
            rate = tuned(data, folder, {"sync": sync}, n)
            parallel = {"sync": sync, "rule": {"kind": "ProximalSGD", "lr": rate}}
            spec = specification(data, parallel, steps=10_000, global_batch=n, eval_every=5)
            path, out = folder / f"{method}.toml", folder / method
            path.write_text(tomli_w.dumps(spec))
            served(path, out, there, goal, 10 * ours)
            points = way(out)
            came = arrived(points, goal)
            last = f"> {points[-1][0]:.0f} (then {points[-1][1] / best - 1:.1e} above)"
            shown = last if came is None else f"{came:.1f}"
            times = f"{(came or points[-1][0]) / ours:.1f}"
            print(f"| {method} | {shown} | {'' if came else '> '}{times} | {rate:g} |", flush=True)


if __name__ == "__main__":
    main()
