"""A training run under a storm of faults, against quiet runs of the same spec.

Ranks are killed, stopped, slowed and made to compute NaN, any process of the run is asked to end,
and the disk fills up, in an order that the seed fixes. A run that was asked to end is started
again with ``--resume auto``; nothing else is done for it. Then must hold:

* the run has all its steps, and each saw the samples that it sees in a quiet run;
* it ends with the very bits of a quiet run that skips the same steps as not finite;
* its final loss lies within those of three quiet runs that skip none (other seeds; the storm takes
  the seed whose loss is the middle one);
* every checkpoint can be read, and no process is left.

    python benchmarks/storm.py [--seconds 600] [--events 100] [--steps 4000] [--seed 0]

The disk can be filled only where the run folder is a file system of its own, which needs root;
without it that fault is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from storm_runs import (
    PATIENCE_S,
    Setting,
    disk,
    final_loss,
    marked,
    quiet,
    ranks,
    start,
    steps,
    summary,
    write_spec,
)

KINDS = ("kill", "stop", "end", "disk", "nan", "slow")


@dataclass
class Weather:
    """What a storm came to."""

    events: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def child() -> None:
    """The command `polyreme`, with the faults imported where its ranks are forked from."""
    from polyreme import cli
    from polyreme.api import training

    training._PRELOAD = (*training._PRELOAD, "storm_faults")
    sys.argv[:2] = ["polyreme"]
    cli.main()


class Storm:
    """Plants one fault after another while the run lives."""

    def __init__(self, setting: Setting, mark: str, folder: Path, *, has_disk: bool) -> None:
        self.setting, self.mark, self.folder = setting, mark, folder
        self.random = random.Random(setting.seed)
        self.kinds = [kind for kind in KINDS if kind != "disk" or has_disk]
        self.weather = Weather()
        self.faults: list[str] = []

    def run(self, spec: Path) -> Weather:
        """Until the run has ended by itself."""
        setting, weather = self.setting, self.weather
        began_s = time.monotonic()
        pause_s = setting.seconds / setting.n_events
        next_s = began_s + pause_s
        process = None
        while True:
            if time.monotonic() > began_s + setting.seconds + PATIENCE_S:
                weather.wrong.append("the run has neither ended nor failed")
                break
            if process is None:
                process = start(setting, spec, self.folder, self.mark, pace_s=setting.pace_s)
                weather.starts += 1
            code = process.poll()
            if code == 0:
                break
            if code is not None:
                process = None
                if code != 130:
                    said = (setting.home / f"{self.mark}.stderr").read_text()[-3000:]
                    weather.wrong.append(f"the command ended with exit code {code}: {said}")
                    break
                continue
            blows = weather.events.total() < setting.n_events
            if blows and time.monotonic() >= next_s and self.strike():
                next_s = time.monotonic() + self.random.uniform(0.2, 1.2) * pause_s
            time.sleep(0.05)
        weather.seconds = time.monotonic() - began_s
        return weather

    def strike(self) -> bool:
        """One fault, if the run is up."""
        if not self.faults:
            self.faults = self.random.sample(self.kinds, len(self.kinds))
        victims = ranks(self.mark)
        if len(victims) < self.setting.processes:
            return False
        if self.faults[-1] == "disk" and not (self.folder / "checkpoints" / "latest").exists():
            return False  # a run cannot begin on a full disk
        kind = self.faults.pop()
        victim = self.random.choice(victims)
        try:
            getattr(self, kind)(victim)
        except psutil.NoSuchProcess:
            return False
        self.weather.events[kind] += 1
        return True

    def kill(self, victim: psutil.Process) -> None:
        """A rank dies."""
        victim.send_signal(signal.SIGKILL)

    def stop(self, victim: psutil.Process) -> None:
        """A rank stands still, until somebody finds it."""
        victim.send_signal(signal.SIGSTOP)

    def end(self, _: psutil.Process) -> None:
        """Some process of the run is asked to end."""
        self.random.choice(marked(self.mark)).send_signal(signal.SIGTERM)

    def disk(self, _: psutil.Process) -> None:
        """The disk is full for a while."""
        filler = self.folder.parent / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                pass
        time.sleep(self.random.uniform(0.5, 2.5))
        filler.unlink()

    def nan(self, _: psutil.Process) -> None:
        """A rank computes what is not finite."""
        rank = self.random.randrange(self.setting.processes)
        what = self.random.choice(["loss", "gradient"])
        (self.setting.home / "faults" / f"rank-{rank}").write_text(what)

    def slow(self, victim: psutil.Process) -> None:
        """A rank is slow for a while: it stands still every other moment."""
        for _ in range(self.random.randrange(2, 8)):
            victim.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            victim.send_signal(signal.SIGCONT)
            time.sleep(0.1)


def judge(setting: Setting, weather: Weather, mark: str, folder: Path, seed: int) -> None:
    """Add whatever is wrong with the run that went through the storm."""
    wrong = weather.wrong
    end_s = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < end_s:
        time.sleep(0.1)
    wrong += [f"process {process.pid} is left" for process in left]
    came = summary(folder)
    if (came["status"], came["steps"]) != ("done", setting.steps):
        wrong.append(f"ended as {came['status']} after {came['steps']} steps")
        return
    wrong += unreadable(folder)
    ours = steps(folder)
    skipped = [step for step, event in ours.items() if event["skipped"]]
    calm = quiet(setting, seed, skipped)
    for step, event in steps(calm).items():
        if step not in ours or ours[step]["sample_ids"] != event["sample_ids"]:
            wrong.append(f"step {step} saw other samples")
        elif ours[step]["loss"] != event["loss"]:
            wrong.append(f"step {step} has another loss: {ours[step]['loss']}, not {event['loss']}")
    bits = [(each / "final.safetensors").read_bytes() for each in (folder, calm)]
    if bits[0] != bits[1]:
        wrong.append("the final weights have other bits")


def unreadable(folder: Path) -> list[str]:
    """Checkpoints of a run that cannot be read whole."""
    from polyreme.errors import PolyremeError
    from polyreme.runtime import checkpoint, checkpoints

    found = []
    for each in sorted((folder / "checkpoints").glob("step-*")):
        try:
            checkpoint.verify(each)
        except PolyremeError as error:
            found.append(str(error))
    return found or ([] if checkpoints.newest(folder) else ["there is no checkpoint"])


def end(mark: str) -> None:
    """Kill what is left of a run."""
    for process in marked(mark):
        process.kill()


def storm(setting: Setting, seed: int) -> tuple[Weather, dict[str, Any]]:
    """The storm over the spec with a seed: its weather, and the run's summary."""
    mark = f"storm-{uuid.uuid4().hex}"
    with disk(setting.home / "disk") as has_disk:
        folder = setting.home / "disk" / "run"
        try:
            weather = Storm(setting, mark, folder, has_disk=has_disk).run(write_spec(setting, seed))
        except BaseException:
            end(mark)
            raise
        if weather.wrong:
            end(mark)
        else:
            judge(setting, weather, mark, folder, seed)
        came = summary(folder) if (folder / "summary.json").exists() else {}
    return weather, came


def main() -> None:
    """Print the table; exit 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as home:
        setting = Setting(
            home=Path(home),
            steps=options.steps,
            seconds=options.seconds,
            n_events=options.events,
            seed=options.seed,
        )
        losses = {seed: final_loss(quiet(setting, seed)) for seed in range(3)}
        low, seed, high = sorted(losses, key=lambda seed: losses[seed])
        weather, came = storm(setting, seed)
        calm = summary(setting.home / f"quiet-{seed}")
    loss = came.get("metrics", {}).get("heldout_loss", math.nan)
    if not losses[low] <= loss <= losses[high]:
        weather.wrong.append(f"final loss {loss} is not within those of the quiet runs")
    print(f"{weather.events.total()} faults in {weather.seconds:.0f} s:", dict(weather.events))
    print(f"the command was started {weather.starts} times")
    quiet_losses = ", ".join(f"{losses[each]:.4f}" for each in (low, seed, high))
    print(f"held-out loss {loss:.4f}; of quiet runs {quiet_losses}")
    print(f"goodput {came.get('goodput', math.nan):.2f}; of the quiet run {calm['goodput']:.2f}")
    if weather.events.total() < setting.n_events:
        weather.wrong.append(f"only {weather.events.total()} faults before the run had ended")
    print("\n".join(weather.wrong) or "nothing is wrong")
    sys.exit(bool(weather.wrong))


if __name__ == "__main__":
    child() if sys.argv[1:2] == ["--child"] else main()
