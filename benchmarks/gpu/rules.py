"""SNGM, LARS and momentum SGD on a ViT over CIFAR-10 at large batches, with plans and without.

python benchmarks/gpu/rules.py --data DIR [--epochs 5] [--seconds 400] [--compile]

A ViT (32 x 32 pixels, patches of 4, 7 blocks of 384, 6 heads) from its start, in bf16, cosine
after a warm-up of a tenth of the steps, images shifted and mirrored at random. `accuracy` is of the
test images after all epochs, at the rate of those in RATES (powers of 2) that did best on a tenth
of the training images, held out, in a run of as many epochs on the others; * marks a best rate
that is the lowest or highest of them. One seed. No run is begun after --seconds.

An epoch's time is the median time of a step, after the first two, times its steps. `planned` is the
plan that the planner chooses by a profile measured here, `plain` what plain data parallelism
does: each device its share of the batch at once, nothing recomputed or compiled; where that does
not fit, in as few passes as do. --compile compiles the layers of planned runs that are timed.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from stand import PRECISION, STEPS, WARM, Model, Setting, Stand, Timed, where

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import LARS, SGD, SNGM
from polyreme.algo.schedule import Cosine
from polyreme.algo.train import Train
from polyreme.cluster import accelerator as accelerators
from polyreme.data import split
from polyreme.data.class_options import Augment
from polyreme.data.labelled import Drawn, LabelledSource, Part
from polyreme.errors import Infeasible, RunError
from polyreme.plan.ir import Plan, Workload
from polyreme.plan.options import Parallel
from polyreme.planner.search import search
from polyreme.runtime import loop, mesh
from polyreme.runtime.job import Job
from polyreme.runtime.launch import Launcher

sys.path.append(str(Path(__file__).parents[1] / "tables"))
from images import unpack

if TYPE_CHECKING:
    from polyreme.algo.rule import Rule
    from polyreme.profile.record import Profile

DECAY = 5e-4
BATCHES = (1024, 8192)
RULES: Mapping[str, Rule] = {
    "SNGM": SNGM(momentum=0.9, weight_decay=DECAY),
    "LARS": LARS(momentum=0.9, weight_decay=DECAY),
    "momentum SGD": SGD(momentum=0.9, weight_decay=DECAY),
}
RATES: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "SNGM": {1024: (0.125, 0.25, 0.5, 1.0), 8192: (0.25, 0.5, 1.0, 2.0)},
    "LARS": {1024: (2.0, 4.0, 8.0, 16.0), 8192: (4.0, 8.0, 16.0, 32.0)},
    "momentum SGD": {1024: (0.0625, 0.125, 0.25, 0.5), 8192: (0.125, 0.25, 0.5, 1.0)},
}
VIT = {
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
}
HELDOUT, SHIFT = 0.1, 4
HEAD = ("rule", "batch", "rate", "accuracy", "planned s", "plain s", "times", "planned", "plain")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A rule at a batch: what is run, and on what. Values can be sent to other processes."""

    rule: str
    setting: Setting
    images: Path
    limit: int
    epochs: int

    def ruled(self, rate: float) -> Rule:
        """The rule at a rate."""
        return msgspec.structs.replace(RULES[self.rule], lr=rate)

    @property
    def rates(self) -> tuple[float, ...]:
        """Those that are tried."""
        least = min(RATES[self.rule])
        return RATES[self.rule].get(self.setting.global_batch, RATES[self.rule][least])

    @property
    def workload(self) -> Workload:
        """What the planner is told."""
        rule = RULES[self.rule]
        return Workload(
            global_batch=self.setting.global_batch,
            seq_len=1,
            precision=PRECISION,
            optimizer_states=DataParallel(rule=rule).n_vectors(1),
            optimizer_scalars=rule.n_scalars,
            by_entry=rule.by_entry,
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Accuracies on held-out images by rate, and on test images at the best."""

    heldout: Mapping[float, float]
    rate: float
    test: float


def read(asked: Asked, *, tuning: bool) -> LabelledSource:
    """The images in memory; with `tuning` test images are some of those to train on, left out."""
    with np.load(asked.images) as packed:
        arrays = {name: packed[name][: asked.limit] for name in packed.files}
    train = arrays["x_train"], arrays["y_train"]
    test = arrays["x_test"], arrays["y_test"]
    if tuning:
        kept, out = split.stratified(train[1], HELDOUT)
        test = train[0][out], train[1][out]
        train = train[0][kept], train[1][kept]
    options = Augment(shift=SHIFT, flip=True)
    return LabelledSource(
        _part(*train),
        _part(*test),
        field="pixel_values",
        shape=asked.setting.model.sample.fields["pixel_values"].shape,
        n_classes=10,
        fingerprint=f"cifar10 {len(train[0])} {tuning}",
        drawn=Drawn(options=options, seed=0),
    )


def _part(images: np.ndarray, classes: np.ndarray) -> Part:
    """Scaled once, so that to read some is to copy them."""
    ready = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    ready *= np.float32(2 / 255)
    ready -= 1
    return Part(read=lambda indices: ready[indices], classes=classes.astype(np.int64))


def _job(
    asked: Asked, plan: Plan, rate: float, source: LabelledSource, *, compiled: bool, steps: int = 0
) -> Job:
    batch = asked.setting.global_batch
    n_steps = steps or asked.epochs * (source.n_train // batch)
    settings = Train(
        steps=n_steps,
        global_batch=batch,
        precision=PRECISION,
        schedule=Cosine(warmup=n_steps // 10),
        compile=compiled,
    )
    return Job(
        graph=asked.setting.model.graph(),
        plan=plan,
        source=source,
        train=settings,
        algorithm=DataParallel(rule=asked.ruled(rate)),
    )


def _trained(asked: Asked, plan: Plan) -> Trained:
    """Runs at all rates, then one at the best: on each process."""
    world = mesh.open(accelerators.detect())
    source, heldout = read(asked, tuning=True), {}
    for rate in asked.rates:
        heldout[rate] = _accuracy(_job(asked, plan, rate, source, compiled=False), world)
    best = max(heldout, key=lambda rate: heldout[rate])
    whole = read(asked, tuning=False)
    test = _accuracy(_job(asked, plan, best, whole, compiled=False), world)
    mesh.close(world)
    return Trained(heldout=heldout, rate=best, test=test)


def _accuracy(job: Job, world: mesh.World) -> float:
    """Of the held-out images; 0 where too many gradients were not finite."""
    try:
        return loop.train(job, world).metrics["test_accuracy"]
    except RunError as error:
        if "not finite" not in str(error) and "skipped" not in str(error):
            raise
        return 0.0


def _timed(asked: Asked, plan: Plan, compiled: bool) -> Timed:
    """A few steps, on each process."""
    world, source = mesh.open(accelerators.detect()), read(asked, tuning=False)
    job = _job(asked, plan, asked.rates[0], source, compiled=compiled, steps=STEPS + WARM)
    job = replace(job, source=_Unjudged(source))
    try:
        found = loop.train(job, world)
    except torch.OutOfMemoryError:
        return Timed(why="out of memory")
    mesh.close(world)
    return Timed(step_s=statistics.median(found.step_s[WARM:]), peak_bytes=found.peak_bytes)


class _Unjudged:
    """Images without any that are held out, so that nothing is evaluated."""

    n_heldout = 0

    def __init__(self, source: LabelledSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Table:
    """Runs what is asked on all devices of this machine, as long as there is time."""

    def __init__(self, launcher: Launcher, profile: Profile, end_s: float) -> None:
        self._launcher, self._profile, self._end_s = launcher, profile, end_s

    def planned(self, asked: Asked) -> Plan:
        """What the planner chooses."""
        return self._plan(asked, Parallel())

    def _plan(self, asked: Asked, parallel: Parallel) -> Plan:
        setting = asked.setting
        given = setting.model.graph(), setting.cluster, self._profile, asked.workload, parallel
        return search(*given, top=1, all_devices=True)[0]

    def timed(self, asked: Asked, plan: Plan, *, compiled: bool) -> Timed:
        """A few steps by a plan."""
        n = asked.setting.n_devices
        try:
            found = self._launcher.run(_timed, (asked, plan, compiled), n_processes=n)
        except RunError as error:
            if "out of memory" not in str(error).lower():
                raise
            return Timed(why="out of memory")
        return max(found, key=lambda each: each.peak_bytes)

    def plain(self, asked: Asked) -> tuple[Plan, Timed]:
        """Of plans with whole shares of the batch, or halves, ... the first that fits."""
        n = asked.setting.n_devices
        microbatch = asked.setting.global_batch // n
        while True:
            fixed = Parallel(
                replica=n, shard=1, tp=1, pp=1, microbatch=microbatch, recompute="none"
            )
            try:
                plan = self._plan(asked, fixed)
                timed = self.timed(asked, plan, compiled=False)
            except Infeasible:
                timed = Timed(why="out of memory")
            if timed.ran:
                return plan, timed
            if microbatch == 1:
                raise RunError("not one image fits on the device")
            microbatch //= 2

    def trained(self, asked: Asked, plan: Plan) -> Trained | None:
        """Accuracies; None once there is no time left."""
        if time.monotonic() > self._end_s:
            return None
        n = asked.setting.n_devices
        return self._launcher.run(_trained, (asked, plan), n_processes=n)[0]


def words(plan: Plan, asked: Asked) -> str:
    """A plan in short."""
    share = asked.setting.global_batch // (asked.setting.n_devices * plan.microbatches)
    again = sum(each.recompute for each in plan.layer_plans.values())
    recomputed = f", {again} of {len(plan.layer_plans)} layers again" if again else ""
    return f"{plan.microbatches} x {share}{recomputed}"


def line(asked: Asked, found: Trained | None, planned: _Way, plain: _Way) -> str:
    """A line of the table."""
    steps = (min(asked.limit, 50_000)) // asked.setting.global_batch
    rate = accuracy = "no time"
    if found is not None:
        edge = "*" if found.rate in (min(asked.rates), max(asked.rates)) else ""
        rate, accuracy = f"{found.rate:g}{edge}", f"{100 * found.test:.2f} %"
    seconds = [steps * way.timed.step_s for way in (planned, plain)]
    cells = [
        asked.rule,
        str(asked.setting.global_batch),
        rate,
        accuracy,
        *(f"{each:.2f}" for each in seconds),
        f"{seconds[1] / seconds[0]:.2f}",
        *(words(way.plan, asked) for way in (planned, plain)),
    ]
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, kw_only=True)
class _Way:
    plan: Plan
    timed: Timed


def options() -> argparse.Namespace:
    """What the command is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cifar10")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--only", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--limit", type=int, default=50_000, help="images of each kind")
    parser.add_argument("--blocks", type=int, default=VIT["num_hidden_layers"])
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    given, begun_s = options(), time.monotonic()
    n = accelerators.detect().count()
    config = {**VIT, "num_hidden_layers": given.blocks}
    model = Model(model_type="vit", config=config, batch=1, side=32, n_classes=10)
    print(f"{where()}, {datetime.datetime.now(tz=datetime.UTC).date()}; {n} devices, ", end="")
    print(f"{given.epochs} epochs of {min(given.limit, 50_000):,} images\n", flush=True)
    with tempfile.TemporaryDirectory() as home, Stand() as stand, Launcher() as launcher:
        images = unpack("cifar10", given.data, Path(home), 50_000)
        largest = Setting(model=model, n_devices=n, global_batch=max(given.batches))
        profile, profile_s = stand.profile(largest)
        table = Table(launcher, profile, begun_s + given.seconds)
        heldout = []
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
        for batch in given.batches:
            for rule in given.only:
                asked = Asked(
                    rule=rule,
                    setting=replace(largest, global_batch=batch),
                    images=images,
                    limit=given.limit,
                    epochs=given.epochs,
                )
                plan = table.planned(asked)
                planned = _Way(plan=plan, timed=table.timed(asked, plan, compiled=given.compile))
                plain = _Way(**dict(zip(("plan", "timed"), table.plain(asked), strict=True)))
                found = table.trained(asked, plan)
                print(line(asked, found, planned, plain), flush=True)
                if found is not None:
                    heldout.append((rule, batch, found.heldout))
    print("\n| rule | batch | held-out accuracy by rate |\n|---|---|---|")
    for rule, batch, by_rate in heldout:
        shown = ", ".join(f"{rate:g}: {100 * a:.2f} %" for rate, a in by_rate.items())
        print(f"| {rule} | {batch} | {shown} |")
    print(f"\nprofile {profile_s:.0f} s, {time.monotonic() - begun_s:.0f} s in all")


if __name__ == "__main__":
    main()
