"""SNGM, LARS and momentum SGD on a ViT over CIFAR-10 at large batches, with plans and without.

    python benchmarks/gpu/rules.py --data DIR [--seconds 220] [--epochs N]

One process a device; on several, torchrun starts it. A ViT (32 x 32 pixels, patches of 4) from
random weights, in bf16, layers not compiled; images are shifted and mirrored at random. Both
tables are of the same process, line by line as they are known.

Seconds of an epoch: the median time of a step, from the end of one to the end of the next, reading
included, times its steps; ways take turns, several steps each. `planned` is the plan that the
planner chooses by a profile measured here, `by hand` what plain data parallelism does: each device
its share of the batch at once, nothing recomputed (where that does not fit, in as few passes as
do), `loop` the same microbatches in a loop of plain torch on one device: the model of transformers
under autocast, torch's SGD or polyreme.optim, the same images from the same prefetcher.

Accuracy: of all test images after all epochs, cosine after a warm-up of a tenth of the steps. The
rate is that of `ruled.RATES` (three for each rule and batch, each four times the last) that did
best on a tenth of the training images, held out, in runs of as many epochs on the others; * marks
one that is the lowest or highest of the three. One seed. Without --epochs as many as fit.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ruled import RULES, SEED, TIMED, Asked, Ends, Here, Unjudged, Way, plain_loop, trained
from stand import PRECISION, WARM, Model, Setting, where

from polyreme.cluster import accelerator as accelerators
from polyreme.data.class_options import Arrays, Augment
from polyreme.errors import RunError
from polyreme.measure.measure import measure
from polyreme.plan.describe import describe
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.runtime import mesh

sys.path.append(str(Path(__file__).parents[1] / "tables"))
from images import unpack

if TYPE_CHECKING:
    from polyreme.data.source import Source
    from polyreme.runtime.mesh import World

BATCHES = (1024, 8192)
VIT = {"image_size": 32, "patch_size": 4}
ALL = 50_000  # training images
HELDOUT, SHIFT, TURNS = 0.1, 4, 2
PROFILE_S = 15.0  # of layers that are run
SPARE = 0.9  # of the time that is left, what is planned with
FIRST = ("rule", "batch", "planned s", "by hand s", "loop s", "by hand / planned", "loop / planned")
SECOND = ("rule", "batch", "rate", "accuracy", "epoch s", "held-out accuracy by rate")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A rule at a batch, with the plan that is chosen and what took turns."""

    asked: Asked
    plan: Plan
    planned: Way
    by_hand: Way | None
    loop: Way | None
    plans: tuple[str, ...]

    def row(self, n_steps: int) -> str:
        """A line of the first table."""
        base, shown, times = self.planned.epoch_s(n_steps), [], []
        for way in (self.planned, self.by_hand, self.loop):
            shown.append("-" if way is None else way.why or f"{way.epoch_s(n_steps):.2f}")
            times.append("-" if way is None else f"{way.epoch_s(n_steps) / base:.2f}")
        if self.by_hand is None:
            shown[1], times[1] = "the same", "1"
        return _row(self.asked.rule, self.asked.batch, *shown, *times[1:], *self.plans)


def timed(asked: Asked, here: Here) -> Timed:
    """The plan, that by hand, and on one device the loop, having taken turns."""
    plan, by_hand = here.plan(asked, Parallel()), here.by_hand(asked)
    if plan is None:
        raise RunError("no plan fits")

    def by(which: Plan) -> Way:
        unjudged, rate = Unjudged(here.whole), asked.rates[0]
        return Way(run=lambda: trained(asked, here, which, unjudged, rate, WARM + TIMED)[1])

    n = by_hand.microbatches
    found = Timed(
        asked=asked,
        plan=plan,
        planned=by(plan),
        by_hand=None if describe(plan) == describe(by_hand) else by(by_hand),
        loop=Way(run=lambda: plain_loop(asked, here, n)) if here.world.n_ranks == 1 else None,
        plans=(describe(plan), describe(by_hand)),
    )
    for _ in range(TURNS):
        for way in (found.planned, found.by_hand, found.loop):
            if way is not None:
                way.turn(alone=here.world.n_ranks == 1)
    return found


def steps_of(source: Source, asked: Asked) -> int:
    """Steps of an epoch; what is left of the images is dropped."""
    return source.n_train // asked.batch


def cost_s(each: Timed, here: Here) -> tuple[float, float]:
    """Seconds of all its runs: around them with evaluations, and for each epoch."""
    asked, n, step_s = each.asked, len(each.asked.rates), each.planned.epoch_s(1)
    judged = (n * here.tuning.n_heldout + here.whole.n_heldout) / asked.batch
    steps = n * steps_of(here.tuning, asked) + steps_of(here.whole, asked)
    return (n + 1) * each.planned.around_s + judged * step_s, steps * step_s


def judged(each: Timed, here: Here, epochs: int) -> str:
    """A line of the second table: rates are tried, then the best trains on all images."""
    asked, found = each.asked, dict[float, float]()
    around_s, epoch_s = cost_s(each, here)
    run_s = (around_s + epochs * epoch_s) / (len(asked.rates) + 1)

    def accuracy(source: Source, rate: float) -> tuple[float, Ends] | None:
        if not here.has(run_s):
            return None
        steps = epochs * steps_of(source, asked)
        metrics, ends = trained(asked, here, each.plan, source, rate, steps)
        return metrics.get("test_accuracy", 0.0), ends

    for rate in asked.rates:
        if (came := accuracy(here.tuning, rate)) is not None:
            found[rate] = came[0]
    tried = ", ".join(f"{rate:g}: {_share(a)}" for rate, a in found.items())
    best = max(found, key=lambda rate: found[rate], default=None)
    came = None
    if best is not None and len(found) == len(asked.rates):
        came = accuracy(here.whole, best)
    if came is None or best is None:
        return _row(asked.rule, asked.batch, "no time", "no time", "-", tried or "-")
    edge = "*" if best in (min(asked.rates), max(asked.rates)) else ""
    steps_s = came[1].steps_s() or [float("nan")]
    whole_s = f"{steps_of(here.whole, asked) * statistics.median(steps_s):.2f}"
    return _row(asked.rule, asked.batch, f"{best:g}{edge}", _share(came[0]), whole_s, tried)


def _share(accuracy: float) -> str:
    """A run that came to no accuracy has 0."""
    return f"{100 * accuracy:.2f} %" if accuracy else "not finite"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def opened(data: Path, home: Path, images: int) -> tuple[Source, Source]:
    """All images, and those to train on of which some are held out."""
    path = unpack("cifar10", data, home, images)
    with np.load(path) as packed:
        np.savez(home / "tuning.npz", x_train=packed["x_train"], y_train=packed["y_train"])
    augment = Augment(shift=SHIFT, flip=True)
    whole = Arrays(path=str(path), augment=augment)
    tuning = Arrays(path=str(home / "tuning.npz"), augment=augment, heldout=HELDOUT)
    return whole.open(None, SEED), tuning.open(None, SEED)


def options() -> argparse.Namespace:
    """What the command is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cifar10")
    parser.add_argument("--seconds", type=float, default=220.0, help="for all of it")
    parser.add_argument("--epochs", type=int, help="unless given, as many as fit")
    parser.add_argument("--most", type=int, default=30, help="epochs where many fit")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--only", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--images", type=int, default=ALL, help="training images")
    parser.add_argument("--width", type=int, default=256, help="in heads of 64, or one")
    parser.add_argument("--blocks", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    """Print the tables."""
    begun_s, given = time.monotonic(), options()
    world = mesh.open(accelerators.detect())
    try:
        run(given, world, begun_s)
    finally:
        mesh.close(world)


def run(given: argparse.Namespace, world: World, begun_s: float) -> None:
    """Time all rules, then train with all."""

    def say(what: str) -> None:
        if world.is_first:
            print(what, flush=True)

    width = given.width
    sizes = {"hidden_size": width, "intermediate_size": 4 * width}
    sizes |= {"num_hidden_layers": given.blocks, "num_attention_heads": max(1, width // 64)}
    model = Model(model_type="vit", config=VIT | sizes, batch=1, side=32, n_classes=10)
    largest = Setting(model=model, n_devices=world.n_ranks, global_batch=max(given.batches))
    with tempfile.TemporaryDirectory() as home:
        whole, tuning = opened(given.data, Path(home), given.images)
    say(f"{where()}, {datetime.datetime.now(tz=datetime.UTC).date()}")
    said = f"ViT of {given.blocks} blocks of {width}, {PRECISION}, not compiled"
    say(f"{said}, {whole.n_train:,} images, {world.n_ranks} processes of one device")
    read_s = time.monotonic() - begun_s
    cluster, graph = largest.cluster, model.graph()
    profile = measure(graph, cluster, PRECISION, world, largest.global_batch, PROFILE_S)
    profile_s = time.monotonic() - begun_s - read_s
    here = Here(
        world=world, profile=profile, whole=whole, tuning=tuning, end_s=begun_s + given.seconds
    )
    say(f"images ready in {read_s:.0f} s, profile in {profile_s:.0f} s\n")
    say(f"Seconds of an epoch\n\n{_head((*FIRST, 'planned', 'by hand'))}")
    every: list[Timed] = []
    for batch, rule in itertools.product(given.batches, given.only):
        asked = Asked(rule=rule, setting=replace(largest, global_batch=batch))
        every.append(timed(asked, here))
        say(every[-1].row(steps_of(whole, asked)))
    ran = [each for each in every if each.planned.steps_s]
    costs = [cost_s(each, here) for each in ran]
    left_s = SPARE * (here.end_s - time.monotonic()) - sum(around for around, _ in costs)
    fit = int(left_s / sum(epoch for _, epoch in costs)) if ran else 0
    epochs = world.gather(given.epochs or min(max(fit, 1), given.most))[0]
    say(f"\nAfter {time.monotonic() - begun_s:.0f} s: accuracy after {epochs} epochs; rates by 3")
    say(f"runs each, of as many epochs on {tuning.n_train:,} images\n\n{_head(SECOND)}")
    for each in ran:
        say(judged(each, here, epochs))
    say(f"\n{time.monotonic() - begun_s:.0f} s in all")


def _head(names: Sequence[str]) -> str:
    return f"{_row(*names)}\n|{'---|' * len(names)}"


if __name__ == "__main__":
    main()
