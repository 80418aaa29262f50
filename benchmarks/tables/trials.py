"""Runs of many configurations, several at a time on one device: rates, seeds, and what they mean.

Each configuration is tried at its rates on seed 0, at more where the best of them is the lowest or
the highest, then run on seeds 1 and 2 at the best. What is done is kept in ``results.jsonl``; a
command that is started again goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from images import unpack

from polyreme.cluster.accelerator import detect

SEEDS = (0, 1, 2)
MOST_RATES = 6
BASELINE = 0.70  # below this accuracy of the dense runs nothing is decided
CHANCE = 0.1
NEAR = 0.05  # no further above chance than this is not learning


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A configuration: its name, what it adds to the spec, and the rates that are tried.

    `simulate` are the virtual machines beside the number of workers, `eval_every` the steps between
    evaluations on the way (unset: none).
    """

    name: str
    rates: tuple[float, ...]
    data_parallel: Mapping[str, Any]
    model: Mapping[str, Any]
    workers: int
    batch: int
    partition: Mapping[str, Any] | None = None
    simulate: Mapping[str, Any] = field(default_factory=dict)
    eval_every: int | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Test accuracies of a configuration at its best rate, by seed, and on the way to them.

    `ways` has of each seed virtual seconds and accuracies after evaluations, `seconds` what each
    run took here, its start and evaluation included (NaN: not kept).
    """

    rate: float
    accuracies: tuple[float, ...]
    ways: tuple[tuple[tuple[float, float], ...], ...] = ()
    seconds: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Of all seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        n = len(self.accuracies)
        return statistics.stdev(self.accuracies) / math.sqrt(n) if n > 1 else math.inf

    @property
    def shown(self) -> str:
        """In percent."""
        return f"{100 * self.mean:.2f} ± {100 * self.error:.2f} (rate {self.rate:g})"


def holds(above: Result, below: Result, by: float = 0.0) -> str:
    """Whether one is above another by more than `by` and the summed standard errors."""
    gap = above.mean - below.mean - by
    errors = above.error + below.error
    return "holds" if gap > errors else "does not hold" if gap < -errors else "undecided"


def near_chance(found: Result) -> str:
    """Whether it is no further above chance than what is near it, but for its standard error."""
    above = found.mean - CHANCE - NEAR
    return (
        "holds" if above < -found.error else "does not hold" if above > found.error else "undecided"
    )


def options(
    description: str | None,
    only: Sequence[str] = (),
    tasks: bool = False,
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """What every table is told; `only` are names of tables of which one may be asked for.

    `tasks` says whether another than CIFAR-10 may be asked for.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--out", type=Path, default=Path("tables"))
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--devices", type=int, default=1, help="devices that runs are dealt to")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after that")
    if only:
        parser.add_argument("--only", choices=only, help="one table alone")
    parser.set_defaults(task="cifar10")
    if tasks:
        parser.add_argument("--task", choices=("cifar10", "mnist"))
    return parser.parse_args(arguments)


def model(task: str, norm: str = "batch") -> dict[str, Any]:
    """What is trained: ResNet-20, or on MNIST a perceptron, for which two cores do."""
    if task == "mnist":
        return {"kind": "mlp", "hidden": [128]}
    return {"kind": "resnet20", "norm": norm}


def _unpacked(table: str, given: argparse.Namespace) -> tuple[Path, Path]:
    """The folder of a table's runs, and the data."""
    home = given.out / (table if given.task == "cifar10" else f"{table}-{given.task}")
    home.mkdir(parents=True, exist_ok=True)
    return home, unpack(given.task, given.data, given.out, given.images)


def run_all(table: str, trials: Sequence[Trial], given: argparse.Namespace) -> dict[str, Result]:
    """All configurations that could be run to their end."""
    home, data = _unpacked(table, given)
    end_s = time.monotonic() + given.seconds
    # Small batches take the most steps: begun last they would run on alone.
    ordered = sorted(trials, key=lambda trial: trial.batch)
    begun: set[tuple[str, float, int]] = set()
    flying: set[Future[None]] = set()
    with ThreadPoolExecutor(given.jobs) as pool:
        while True:
            done = _kept(home)
            for trial, rate, seed in (run for t in ordered for run in _due(t, done)):
                if (trial.name, rate, seed) not in begun:
                    number = len(begun)
                    begun.add((trial.name, rate, seed))
                    run = trial, rate, seed
                    flying.add(pool.submit(_one, run, number, home, data, given, end_s))
            if not flying:
                break
            ended, flying = wait(flying, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()
    done, found = _kept(home), {}
    for trial in trials:
        rate = _best(trial, done)
        result = None if rate is None else _result(trial.name, rate, done)
        if result is not None:
            found[trial.name] = result
    return found


def run_at(
    table: str, trials: Sequence[Trial], given: argparse.Namespace
) -> dict[tuple[str, float], Result]:
    """Each configuration at each of its rates, those that could be run on all seeds."""
    home, data = _unpacked(table, given)
    done, end_s = _kept(home), time.monotonic() + given.seconds
    runs = [(trial, rate, seed) for seed in SEEDS for trial in trials for rate in trial.rates]
    left = [run for run in runs if (run[0].name, run[1], run[2]) not in done]
    with ThreadPoolExecutor(given.jobs) as pool:
        doing = [
            pool.submit(_one, run, number, home, data, given, end_s)
            for number, run in enumerate(left)
        ]
        for each in doing:
            each.result()
    done = _kept(home)
    keys = [(trial.name, rate) for trial in trials for rate in trial.rates]
    return {key: found for key in keys if (found := _result(*key, done)) is not None}


def _due(
    trial: Trial, done: Mapping[tuple[str, float, int], _Kept]
) -> list[tuple[Trial, float, int]]:
    """What is to be run next of a configuration, whatever is running."""
    if rates := untried(trial, done):
        return [(trial, rate, 0) for rate in rates]
    best = _best(trial, done)
    return [
        (trial, best, s)
        for s in SEEDS[1:]
        if best is not None and (trial.name, best, s) not in done
    ]


def _one(
    run: tuple[Trial, float, int],
    number: int,
    home: Path,
    data: Path,
    given: argparse.Namespace,
    end_s: float,
) -> None:
    """Do one run and keep what came of it, unless time is over."""
    trial, rate, seed = run
    if time.monotonic() > end_s:
        return
    begun_s = time.monotonic()
    accuracy, way = _run(trial, rate, seed, home, data, given, number % given.devices)
    took_s = round(time.monotonic() - begun_s, 1)
    row = {"name": trial.name, "rate": rate, "seed": seed, "accuracy": accuracy, "seconds": took_s}
    row |= {"way": way} if way else {}
    with (home / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    ran = f"{trial.name}, rate {rate:g}, seed {seed}"
    print(f"{ran}: {100 * accuracy:.2f} % in {took_s:.0f} s", flush=True)


def _run(
    trial: Trial,
    rate: float,
    seed: int,
    home: Path,
    data: Path,
    given: argparse.Namespace,
    device: int,
) -> tuple[float, list[tuple[float, float]]]:
    """Test accuracy of one run, and on its way; 0 where its loss was not finite."""
    folder = home / f"{trial.name}-{rate:g}-{seed}".replace(" ", "-")
    table: dict[str, Any] = {"kind": "arrays", "path": str(data.resolve())}
    if given.task == "cifar10":
        table["augment"] = {"shift": 4, "flip": True}
    if trial.partition is not None:
        table["partition"] = dict(trial.partition)
    steps = given.epochs * given.images // trial.batch
    parallel = dict(trial.data_parallel)
    parallel["rule"] = {**parallel["rule"], "lr": rate}
    spec = {
        "model": dict(trial.model),
        "data": table,
        "train": {
            "epochs": given.epochs,
            "global_batch": trial.batch,
            "seed": seed,
            "precision": "fp32",
            "schedule": {"kind": "cosine", "warmup": min(100, steps // 10)},
            "log_every": 50,
            **({} if trial.eval_every is None else {"eval_every": trial.eval_every}),
        },
        "data_parallel": parallel,
        "simulate": {"workers": trial.workers, **trial.simulate},
    }
    shutil.rmtree(folder, ignore_errors=True)  # a run that was ended before its end begins anew
    path = home / f"{folder.name}.toml"
    path.write_text(tomli_w.dumps(spec))
    command = [sys.executable, "-m", "polyreme", "simulate", str(path), "--out", str(folder)]
    done = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        env=_environment(device, given.devices),
        check=False,
    )
    if done.returncode == 1 and "not finite" in done.stderr:
        return 0.0, []
    if done.returncode != 0:
        raise RuntimeError(f"{path}: {done.stderr[-2000:]}")
    events = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    way = [(e["t"], e["metrics"]["test_accuracy"]) for e in events if e["kind"] == "eval"]
    accuracy = float(json.loads(done.stdout)["metrics"]["test_accuracy"])
    return accuracy, way if trial.eval_every is not None else []


def _environment(device: int, n_devices: int) -> dict[str, str]:
    found = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    if n_devices > 1:
        found[f"{detect().device_type.upper()}_VISIBLE_DEVICES"] = str(device)
    return found


class _Kept(NamedTuple):
    """Of one run."""

    accuracy: float
    way: tuple[tuple[float, float], ...]
    seconds: float


def _kept(home: Path) -> dict[tuple[str, float, int], _Kept]:
    return {
        (r["name"], r["rate"], r["seed"]): _Kept(
            r["accuracy"], tuple(map(tuple, r.get("way", ()))), r.get("seconds", math.nan)
        )
        for r in _rows(home)
    }


def _rows(home: Path) -> Iterator[dict[str, Any]]:
    path = home / "results.jsonl"
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def _result(name: str, rate: float, done: Mapping[tuple[str, float, int], _Kept]) -> Result | None:
    """Of a configuration at a rate, if it was run on all seeds."""
    keys = [(name, rate, seed) for seed in SEEDS]
    if not all(key in done for key in keys):
        return None
    return Result(
        rate=rate,
        accuracies=tuple(done[key].accuracy for key in keys),
        ways=tuple(done[key].way for key in keys),
        seconds=tuple(done[key].seconds for key in keys),
    )


def untried(trial: Trial, done: Mapping[tuple[str, float, int], _Kept]) -> list[float]:
    """Rates to try next on seed 0: its own, then one beyond an end where the best lies."""
    if left := [rate for rate in trial.rates if (trial.name, rate, 0) not in done]:
        return left
    tried = _tried(trial, done)
    rates, best = sorted(tried), max(tried, key=lambda rate: tried[rate])
    if len(rates) >= MOST_RATES or best not in (rates[0], rates[-1]):
        return []
    beside = rates[1] if best == rates[0] else rates[-2]
    return [float(f"{best * best / beside:.2g}")]


def _tried(trial: Trial, done: Mapping[tuple[str, float, int], _Kept]) -> dict[float, float]:
    return {
        rate: done[name, rate, seed].accuracy
        for name, rate, seed in done
        if (name, seed) == (trial.name, 0)
    }


def _best(trial: Trial, done: Mapping[tuple[str, float, int], _Kept]) -> float | None:
    """The rate with the best accuracy on seed 0, once there is none left to try."""
    if untried(trial, done):
        return None
    tried = _tried(trial, done)
    return max(tried, key=lambda rate: tried[rate])


def show(
    title: str,
    found: Mapping[str, Result],
    published: Mapping[str, str],
    claims: Sequence[tuple[str, Any]],
    baseline: str | None,
) -> None:
    """The table, and what became of each claim; none is decided where the baseline is weak."""
    print(f"\n{title}\n\n| configuration | published | here |\n|---|---|---|")
    for name, result in found.items():
        print(f"| {name} | {published.get(name, '')} | {result.shown} |")
    print("\n| claim | verdict |\n|---|---|")
    weak = baseline is not None and (baseline not in found or found[baseline].mean < BASELINE)
    for claim, judged in claims:
        try:
            verdict = "undecided (the dense baseline is too low)" if weak else judged()
        except KeyError as missing:
            verdict = f"undecided ({missing} was not run to its end)"
        print(f"| {claim} | {verdict} |")
