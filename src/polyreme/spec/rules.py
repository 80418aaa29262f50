"""Combinations of tables that cannot run. Each rule reads only what it needs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..algo.attack.fitting import unfit
from ..algo.exchange import unweighted
from ..algo.sync import FedAvg
from ..data.options import Arrays
from ..errors import Violation
from ..plan.options import degrees_left
from . import fit
from .linear import linear
from .options import Spec
from .partial import checked

_SPACE = ("replica", "shard", "tp", "cp", "pp")


def impossible(
    spec: Spec, n_devices: int | None, allowed: Mapping[str, Sequence[int]] | None = None
) -> list[Violation]:
    """Every combination of a spec that cannot run, on so many devices if they are known.

    `allowed` are degrees of axes that the model allows, if they are known.
    """
    rules: tuple[Callable[[], Iterator[Violation]], ...] = (
        partial(_batch, spec, n_devices),
        partial(_metric, spec),
        partial(_heldout, spec),
        partial(_best, spec),
        partial(_fewer, spec, n_devices),
        partial(_reference, spec),
        partial(_trackers, spec),
        partial(fit.objective, spec),
        partial(fit.classes, spec),
        partial(fit.positions, spec),
        partial(fit.pixels, spec),
        partial(_devices, spec, n_devices, allowed or {}),
        partial(_versions, spec),
        partial(_workers, spec, n_devices),
        partial(_faults, spec),
        partial(_attack, spec),
        partial(_weights, spec),
        partial(linear, spec),
    )
    # Where the data are of the wrong form, a length of sequences may yet be right.
    apart = checked(partial(fit.form, spec), "spec")
    found = apart or checked(partial(_sequence, spec), "spec")
    return [*found, *(violation for rule in rules for violation in checked(rule, "spec"))]


def _sequence(spec: Spec) -> Iterator[Violation]:
    needs, given = spec.data.needs_seq_len, spec.train.seq_len
    if needs and given is None:
        rule = "is missing; text is cut into samples of so many tokens"
        yield Violation(
            path="train.seq_len", value=None, rule=rule, legal="128 (or any integer >= 1)"
        )
    if not needs and given is not None:
        rule = "is given, but these data come as whole samples"
        yield Violation(path="train.seq_len", value=given, rule=rule, legal="leave it out")


def _batch(spec: Spec, n_devices: int | None) -> Iterator[Violation]:
    replica, shard = spec.parallel.replica or 1, spec.parallel.shard or 1
    batch = spec.train.global_batch
    if batch < replica * shard:
        yield _without_sample(batch, replica * shard, f"replica {replica} x shard {shard}")
    elif n_devices is not None and spec.parallel.replica is None and spec.parallel.plan is None:
        # Plain training leaves devices out; an algorithm's workers are all of them.
        yield from () if spec.data_parallel.is_plain else workers_without_sample(spec, n_devices)


def workers_without_sample(spec: Spec, n_workers: int) -> Iterator[Violation]:
    """A batch that is too small for so many workers: it is split over all of them."""
    batch = spec.train.global_batch
    if batch < n_workers:
        yield _without_sample(batch, n_workers, f"{n_workers} workers")


def _without_sample(batch: int, n: int, whom: str) -> Violation:
    rule, legal = f"leaves some of {whom} without a sample", f"{n} (or any integer >= {n})"
    return Violation(path="train.global_batch", value=batch, rule=rule, legal=legal)


def _metric(spec: Spec) -> Iterator[Violation]:
    goal = spec.report.goal
    if goal is None or not spec.data.needs_seq_len or goal[0] == "heldout_loss":
        return
    rule = "asks for accuracy, and text is judged by its held-out loss"
    yield Violation(
        path="report.target", value=spec.report.target, rule=rule, legal='"heldout_loss=1.5"'
    )


def _heldout(spec: Spec) -> Iterator[Violation]:
    # The held-out part of arrays may be in their file.
    if spec.report.goal is None or spec.data.heldout != 0 or isinstance(spec.data, Arrays):
        return
    rule = "holds nothing out, so report.target is never measured"
    yield Violation(path="data.heldout", value=spec.data.heldout, rule=rule, legal="0.1")


def _best(spec: Spec) -> Iterator[Violation]:
    best = spec.train.keep_best
    if best is None:
        return
    path = "train.keep_best"
    if best == "test_accuracy" and spec.data.needs_seq_len:
        rule = "is never measured: text is judged by its held-out loss"
        legal = '"heldout_loss" (or leave it out)'
        yield Violation(path=path, value=best, rule=rule, legal=legal)
    elif spec.data.heldout == 0 and not isinstance(spec.data, Arrays):
        rule = "is never measured: data.heldout is 0"
        legal = "leave it out, or data.heldout = 0.1"
        yield Violation(path=path, value=best, rule=rule, legal=legal)


def _fewer(spec: Spec, n_devices: int | None) -> Iterator[Violation]:
    least = spec.train.min_devices
    if least is None:
        return
    path = "train.min_devices"
    degrees = {axis: getattr(spec.parallel, axis) or 1 for axis in _SPACE}
    fixed = math.prod(degrees.values())
    if n_devices is not None and least > n_devices:
        rule = f"is more than the number of devices, {n_devices}"
        legal = f"{n_devices} (or any integer >= {min(fixed, n_devices)} and <= {n_devices})"
        yield Violation(path=path, value=least, rule=rule, legal=legal)
    elif least < fixed:
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        rule = f"is less than {shown} = {fixed}, which [parallel] fixes"
        legal = f"{fixed} (or any integer >= {fixed})"
        yield Violation(path=path, value=least, rule=rule, legal=legal)


def _reference(spec: Spec) -> Iterator[Violation]:
    report = spec.report
    if report.reference is None or report.target is None:
        return
    folder = Path(report.reference)
    if not (folder / "log.jsonl").is_file():
        rule = f"holds no run (looked for {(folder / 'log.jsonl').absolute()})"
        legal = '"runs/quickstart" (any folder that a run has written)'
        yield Violation(path="report.reference", value=report.reference, rule=rule, legal=legal)


def _trackers(spec: Spec) -> Iterator[Violation]:
    for index, name in enumerate(spec.report.trackers):
        if importlib.util.find_spec(name) is None:
            rule = f'needs a package that is not here: pip install "polyreme[{name}]"'
            path = f"report.trackers[{index}]"
            yield Violation(path=path, value=name, rule=rule, legal="leave it out, or install it")


def _versions(spec: Spec) -> Iterator[Violation]:
    """An order that updates within a step knows no norm of the step, and no algorithm between."""
    parallel = spec.parallel
    if (parallel.pp or 1) == 1 or parallel.pipeline.synchronous:
        return
    updates = f'is not known within a step, and order "{parallel.order}" updates there'
    if spec.train.clip_norm is not None:
        rule = f"clips by a norm that {updates}"
        yield Violation(
            path="train.clip_norm", value=spec.train.clip_norm, rule=rule, legal="leave it out"
        )
    if parallel.decouple:
        rule = f'gathers after a step, and order "{parallel.order}" updates within it'
        yield Violation(path="parallel.decouple", value=True, rule=rule, legal="false")
    if parallel.level not in (None, "none"):
        rule = f'shards weights, and order "{parallel.order}" keeps versions of them'
        yield Violation(path="parallel.level", value=parallel.level, rule=rule, legal='"none"')
    if not spec.data_parallel.is_plain:
        rule = f'waits for the gradient of a step, and order "{parallel.order}" updates within it'
        legal = "every step, mean, dense (or another parallel.order)"
        yield Violation(path="data_parallel", value="", rule=rule, legal=legal)


def _workers(spec: Spec, n_devices: int | None) -> Iterator[Violation]:
    n = spec.parallel.replica
    if n is None and n_devices is not None:
        n = max(1, n_devices // spec.parallel.inside)
    if not spec.data_parallel.is_plain and n is not None:
        yield from spec.data_parallel.refused(n)


def _devices(
    spec: Spec, n_devices: int | None, allowed: Mapping[str, Sequence[int]]
) -> Iterator[Violation]:
    fixed = {axis: getattr(spec.parallel, axis) for axis in _SPACE}
    degrees = {axis: degree for axis, degree in fixed.items() if degree is not None}
    if n_devices is None or not degrees:
        return
    product = math.prod(degrees.values())
    whole = len(degrees) == len(_SPACE)
    if product == n_devices if whole else n_devices % product == 0:
        return
    shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    verb = "is not" if whole else "does not divide"
    # The axis whose change alone mends it; where there is none, the largest.
    mendable = [axis for axis in degrees if n_devices % (product // degrees[axis]) == 0]
    if whole:
        to = {axis: n_devices // (product // degrees[axis]) for axis in mendable}
        mendable.sort(key=lambda axis: to[axis] not in allowed.get(axis, (to[axis],)))
    axis = mendable[0] if mendable else max(degrees, key=lambda name: degrees[name])
    others = product // degrees[axis]
    rest = n_devices // others
    if not mendable:
        legal = "1"
    elif whole:
        legal = str(rest)
        if rest not in allowed.get(axis, (rest,)) and product < n_devices:
            legal = f"{degrees[axis]} with --devices {product}"
    else:
        values = allowed.get(axis, range(1, rest + 1))
        legal = degrees_left(values, others, n_devices, degrees[axis])
    makes = "" if len(degrees) == 1 else f"makes {shown} = {product}, which "
    yield Violation(
        path=f"parallel.{axis}",
        value=degrees[axis],
        rule=f"{makes}{verb} the number of devices, {n_devices}",
        legal=legal,
    )


def _faults(spec: Spec) -> Iterator[Violation]:
    faults, sync = spec.simulate.faults, spec.data_parallel.sync
    if not faults or sync.n_servers(spec.simulate.workers):
        return
    rule = f"has workers that go, and under {type(sync).__name__} all workers meet"
    legal = 'no faults, or a data_parallel.sync with servers, such as "ASGD"'
    for index, fault in enumerate(faults):
        path, kind = f"simulate.faults[{index}].kind", fault.__struct_config__.tag
        yield Violation(path=path, value=kind, rule=rule, legal=legal)


def _attack(spec: Spec) -> Iterator[Violation]:
    simulate = spec.simulate
    yield from unfit(simulate.attacks, simulate.workers, spec.data_parallel, "simulate.attack")


def _weights(spec: Spec) -> Iterator[Violation]:
    """Clients that own their data count by it, wherever what they send becomes one."""
    algorithm = spec.data_parallel
    sync, aggregate = algorithm.sync, algorithm.aggregate
    if spec.data.partition is None or not isinstance(sync, FedAvg) or sync.alike:
        return
    if not (aggregate.is_mean or aggregate.takes_weights):
        yield unweighted(algorithm)
