"""Claims on workers that do not wait: OrMo, OrLoMo, asynchronous SGD, Partial Reduce.

python benchmarks/tables/asynchrony.py --data DIR --images 20000 [--jobs 16] [--only ormo]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import tomli_w
from trials import Result, Trial, holds, near_chance, options, run_all, run_at, show

from polyreme import api

MODEL = {"kind": "resnet20", "norm": "batch"}
HOMOGENEOUS = {"compute": {"kind": "gamma", "machine_spread": 0.01, "spread": 0.1}}
HETEROGENEOUS = {"compute": {"kind": "heterogeneous", "slow_fraction": 0.25, "slow_factor": 5.0}}
CLUSTERS = {"homogeneous": HOMOGENEOUS, "heterogeneous": HETEROGENEOUS}
DELAYED = {"compute": {"kind": "stragglers", "probability": 0.1, "factor": 5.0, "spell": 1}}
DECAY = {"weight_decay": 1e-4}
SGD = {"kind": "SGD", **DECAY}
HEAVY = {**SGD, "momentum": 0.9}
PER_WORKER = 64  # samples of a gradient

METHODS: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "ASGD": ({"rule": SGD, "sync": {"kind": "ASGD"}}, (0.01, 0.03, 0.1)),
    "naive ASGDm": ({"rule": HEAVY, "sync": {"kind": "ASGD"}}, (0.001, 0.003, 0.01)),
    "shifted momentum": (
        {"rule": SGD, "sync": {"kind": "ShiftedMomentum"}},
        (0.001, 0.003, 0.01),
    ),
    "SMEGA2": ({"rule": SGD, "sync": {"kind": "SMEGA2"}}, (0.001, 0.003, 0.01)),
    "OrMo": ({"rule": SGD, "sync": {"kind": "OrMo"}}, (0.001, 0.003, 0.01)),
}
PUBLISHED = {
    ("ASGD", 16, "homogeneous"): "66.16",
    ("ASGD", 64, "homogeneous"): "61.61",
    ("ASGD", 16, "heterogeneous"): "65.94",
    ("ASGD", 64, "heterogeneous"): "61.74",
    ("naive ASGDm", 16, "homogeneous"): "65.46",
    ("naive ASGDm", 64, "homogeneous"): "59.96",
    ("naive ASGDm", 16, "heterogeneous"): "65.69",
    ("naive ASGDm", 64, "heterogeneous"): "61.13",
    ("shifted momentum", 16, "homogeneous"): "66.37",
    ("shifted momentum", 64, "homogeneous"): "63.55",
    ("shifted momentum", 16, "heterogeneous"): "66.28",
    ("shifted momentum", 64, "heterogeneous"): "63.28",
    ("SMEGA2", 16, "homogeneous"): "67.32",
    ("SMEGA2", 64, "homogeneous"): "64.16",
    ("SMEGA2", 16, "heterogeneous"): "67.29",
    ("SMEGA2", 64, "heterogeneous"): "64.12",
    ("OrMo", 16, "homogeneous"): "67.56",
    ("OrMo", 64, "homogeneous"): "65.48",
    ("OrMo", 16, "heterogeneous"): "67.71",
    ("OrMo", 64, "heterogeneous"): "65.43",
}
ASP_PUBLISHED = {
    4: ("88.27", "92.27", "90.84", "85.97"),
    8: ("88.15", "90.49", "89.67", "10.00"),
    16: ("85.69", "85.74", "81.47", "10.00"),
    32: ("0.00", "0.00", "0.00", "10.00"),
}
ASP_RATES = (0.001, 0.01, 0.1, 0.3)


def ormo(given: argparse.Namespace) -> None:
    """OrMo's table."""
    trials = [
        Trial(
            name=f"{method}, {n}, {cluster}",
            rates=rates,
            data_parallel=parallel,
            model=MODEL,
            workers=n,
            batch=PER_WORKER * n,
            simulate=CLUSTERS[cluster],
        )
        for n in (64, 16)
        for cluster in CLUSTERS
        for method, (parallel, rates) in METHODS.items()
    ]
    found = run_all("ormo", trials, given)
    published = {f"{m}, {n}, {c}": value for (m, n, c), value in PUBLISHED.items()}
    pairs = [("OrMo", other, 64) for other in METHODS if other != "OrMo"]
    pairs += [("ASGD", "naive ASGDm", n) for n in (16, 64)]
    claims = [
        (
            f"{n} workers, {cluster}: {one} is at least {other}",
            partial(_at_least, found, f"{one}, {n}, {cluster}", f"{other}, {n}, {cluster}"),
        )
        for one, other, n in pairs
        for cluster in CLUSTERS
    ]
    show("OrMo, batches of 64", found, published, claims, None)


def _at_least(found: Mapping[str, Result], above: str, below: str) -> str:
    """Whether one is not below another by more than the summed standard errors."""
    return "does not hold" if holds(found[below], found[above]) == "holds" else "holds"


def orlomo(given: argparse.Namespace) -> None:
    """Local steps with and without waiting, on both clusters."""
    for steps in (8, 2):
        _orlomo(given, steps)


def _orlomo(given: argparse.Namespace, steps: int) -> None:
    n = 16
    syncs = {
        "local momentum SGD": {"rule": HEAVY, "sync": {"kind": "LocalSteps", "every": steps}},
        "OrLoMo": {"rule": SGD, "sync": {"kind": "OrLoMo", "local_steps": steps}},
    }
    trials = [
        Trial(
            name=f"{name}, {steps} steps, {cluster}",
            rates=(0.01, 0.03, 0.1),
            data_parallel=parallel,
            model=MODEL,
            workers=n,
            batch=PER_WORKER * n,
            simulate=simulate,
            eval_every=max(8, given.images // (PER_WORKER * n) // 8 * 8),
        )
        for cluster, simulate in CLUSTERS.items()
        for name, parallel in syncs.items()
    ]
    found = run_all("orlomo", trials, given)
    target = _target(found)
    wanted = {"heterogeneous": (2.0, "at least 2 times faster"), "homogeneous": (1.0, "no slower")}
    claims = [
        (
            f"{cluster}: OrLoMo is {words} to {100 * target:.0f} %",
            partial(
                _faster,
                found,
                f"OrLoMo, {steps} steps, {cluster}",
                f"local momentum SGD, {steps} steps, {cluster}",
                target,
                times,
            ),
        )
        for cluster, (times, words) in wanted.items()
    ]
    show(f"OrLoMo, 16 workers, {steps} local steps", found, {}, claims, None)
    _show_times(found, target)


def partial_reduce(given: argparse.Namespace) -> None:
    """Groups of three of eight workers, one in ten of whose steps is delayed."""
    n, steps = 8, given.images // (PER_WORKER * 8)
    syncs = {
        "all-reduce": {"rule": HEAVY, "sync": {"kind": "EveryStep"}},
        "Partial Reduce": {"rule": HEAVY, "sync": {"kind": "PartialReduce", "group_size": 3}},
    }
    trials = [
        Trial(
            name=name,
            rates=(0.03, 0.1, 0.3),
            data_parallel=parallel,
            model=MODEL,
            workers=n,
            batch=PER_WORKER * n,
            simulate=DELAYED,
            eval_every=steps,
        )
        for name, parallel in syncs.items()
    ]
    found = run_all("partial_reduce", trials, given)
    target = _target(found)
    claim = (
        f"Partial Reduce is at least 1.2 times faster to {100 * target:.0f} %",
        partial(_faster, found, "Partial Reduce", "all-reduce", target, 1.2),
    )
    show("Partial Reduce, 8 workers", found, {}, [claim], None)
    _show_times(found, target)


def asp(given: argparse.Namespace) -> None:
    """Asynchronous SGD by workers and rates, as the survey's table 3 has them."""
    trials = [
        Trial(
            name=f"ASP, {n} workers",
            rates=ASP_RATES,
            data_parallel=METHODS["naive ASGDm"][0],
            model=MODEL,
            workers=n,
            batch=PER_WORKER * n,
            simulate=HOMOGENEOUS,
        )
        for n in ASP_PUBLISHED
    ]
    found = run_at("asp", trials, given)
    shown = {
        f"{trial.name}, rate {rate:g}": found[trial.name, rate]
        for trial in trials
        for rate in ASP_RATES
        if (trial.name, rate) in found
    }
    published = {
        f"ASP, {n} workers, rate {rate:g}": f"{there}"
        for n, row in ASP_PUBLISHED.items()
        for rate, there in zip(ASP_RATES, row, strict=True)
    }
    names = [trial.name for trial in trials]
    claims = [
        (f"rate {rate:g}: {one} is above {other}", partial(_above, found, one, other, rate))
        for rate in ASP_RATES
        for one, other in pairwise(names)
    ] + [
        (f"rate 0.3: {name} does not learn", partial(_near_chance, found, name, 0.3))
        for name in names[1:]
    ]
    show("Asynchronous momentum SGD", shown, published, claims, None)


def _above(found: Mapping[Any, Result], one: str, other: str, rate: float) -> str:
    return holds(found[one, rate], found[other, rate])


def _near_chance(found: Mapping[Any, Result], name: str, rate: float) -> str:
    return near_chance(found[name, rate])


def seconds(result: Result, target: float) -> list[float]:
    """Of each seed the virtual seconds after which an evaluation reached the target."""
    return [
        next((second for second, accuracy in way if accuracy >= target), math.inf)
        for way in result.ways
    ]


def _faster(found: Mapping[str, Result], one: str, other: str, target: float, times: float) -> str:
    """Whether one is so many times as fast to the target as another, but for standard errors.

    "No slower" (once as fast) does not hold only where it is slower by more than these.
    """
    ours = seconds(found[one], target)
    theirs = [second / times for second in seconds(found[other], target)]
    if not all(map(math.isfinite, [*ours, *theirs])):
        return "undecided (a run did not reach it)"
    gap = statistics.fmean(theirs) - statistics.fmean(ours)
    errors = sum(statistics.stdev(each) / math.sqrt(len(each)) for each in (ours, theirs))
    if gap < -errors:
        return "does not hold"
    return "holds" if gap > errors or times == 1.0 else "undecided"


def _target(found: Mapping[str, Result]) -> float:
    """The highest whole percent, of tens and fives, that every run reached."""
    most = [max((a for _, a in way), default=0.0) for r in found.values() for way in r.ways]
    return math.floor(20 * min(most, default=0.0)) / 20


def _show_times(found: Mapping[str, Result], target: float) -> None:
    targets = (target, target + 0.2)  # what all reach, and what some do
    heads = " | ".join(f"virtual seconds to {100 * each:.0f} %" for each in targets)
    print(f"\n| configuration | {heads} |\n|---|---|---|")
    for name, result in found.items():
        cells = [", ".join(f"{s:.0f}" for s in seconds(result, each)) for each in targets]
        print(f"| {name} | {' | '.join(cells)} |")


def delays(given: argparse.Namespace) -> None:
    """How late gradients are on each cluster, which goes by the clock and not by the model.

    So it is that of a small model on digits, in as many steps as the tables have.
    """
    rows = [
        (f"{method}, {n} workers, {cluster}", parallel, n, simulate)
        for method, parallel, workers in (
            ("ASGD", {"rule": SGD, "sync": {"kind": "ASGD"}}, (16, 64)),
            ("OrLoMo, 8 steps", {"rule": SGD, "sync": {"kind": "OrLoMo"}}, (16,)),
        )
        for n in workers
        for cluster, simulate in CLUSTERS.items()
    ]
    rows += [
        (f"ASP, {n} workers", {"rule": HEAVY, "sync": {"kind": "ASGD"}}, n, HOMOGENEOUS)
        for n in (4, 8, 32)
    ]
    print("\nDelays: pushes that were applied between a push's beginning and its own\n")
    print("| configuration | mean | median | 95 of 100 | most |\n|---|---|---|---|---|")
    for name, parallel, n, simulate in rows:
        steps = given.epochs * given.images // (PER_WORKER * n)
        found = sorted(_delays(given, parallel, n, simulate, steps))
        mean, last = statistics.fmean(found), len(found) - 1
        shown = " | ".join(f"{found[last * share // 100]}" for share in (50, 95, 100))
        print(f"| {name} | {mean:.1f} | {shown} |")


def _delays(
    given: argparse.Namespace, parallel: Mapping[str, Any], n: int, simulate: Any, steps: int
) -> list[int]:
    """Of all gradients of a run."""
    folder = given.out / "delays"
    shutil.rmtree(folder, ignore_errors=True)
    spec = {
        "model": {"kind": "mlp", "hidden": [4]},
        "data": {"kind": "digits"},
        "train": {"steps": steps, "global_batch": n},
        "data_parallel": {**parallel, "rule": {**parallel["rule"], "lr": 0.001}},
        "simulate": {"workers": n, **simulate},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "delays.toml"
    path.write_text(tomli_w.dumps(spec))
    api.simulate(path, out=folder)
    events = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    steps_logged = (event for event in events if event["kind"] == "step")
    return [
        int(delay)
        for event in steps_logged
        for delay, count in event["delays"].items()
        for _ in range(count)
    ]


TABLES = {
    "ormo": ormo,
    "orlomo": orlomo,
    "asp": asp,
    "partial_reduce": partial_reduce,
    "delays": delays,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    given = options(__doc__, only=tuple(TABLES), arguments=arguments)
    for name, table in TABLES.items():
        if given.only in (None, name):
            table(given)


if __name__ == "__main__":
    main()
