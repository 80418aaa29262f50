"""A run against a reference: samples and seconds to a target, and what made the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ..errors import ConfigError, Violation
from .facts import factors, product, totals
from .runs import Run

FALLING = ("loss", "perplexity", "error", "suboptimality", "norm")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A value of an evaluation's metric that counts as learned."""

    metric: str
    value: float

    @property
    def falls(self) -> bool:
        """Whether smaller is better."""
        return any(word in self.metric for word in FALLING)

    def reached(self, value: float) -> bool:
        """Whether a value is as good as the target."""
        return value <= self.value if self.falls else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.falls else '>='} {self.value:g}"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The first evaluation that was as good as the target."""

    step: int
    samples: int
    seconds: float


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the reference; ratios are run over reference, above 1 is better.

    `real` is the speed-up in seconds to the target, `hardware` that of the devices alone.
    real = hardware x utilisation x effectiveness x goodput x `rest`, where `rest` is what the
    medians and whole-run factors do not say. None where unknown; `why` says what is missing.
    """

    run: str
    reach: Reach | None
    effectiveness: float | None
    real: float | None
    hardware: float | None
    utilisation: float | None
    goodput: float | None
    why: tuple[str, ...]

    @property
    def w(self) -> float | None:
        """W of the run with the reference's taken as 1."""
        return _times(self.utilisation, self.effectiveness, self.goodput)

    @property
    def rest(self) -> float | None:
        """What the factors leave unexplained."""
        explained = _times(self.hardware, self.w)
        return self.real / explained if self.real is not None and explained else None


def parse_target(text: str) -> Target:
    """``heldout_loss=1.9`` as a target. Raises ConfigError for anything else."""
    metric, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not metric.strip() or not math.isfinite(number):
        legal = 'a metric and a number, "heldout_loss=1.9"'
        rule = "is no target"
        raise ConfigError([Violation(path="target", value=text, rule=rule, legal=legal)])
    return Target(metric=metric.strip(), value=number)


def check_target(target: Target, runs: Sequence[Run]) -> None:
    """Raises ConfigError if no run has the target's metric."""
    known = sorted({name for run in runs for event in run.evals for name in event.metrics})
    if target.metric not in known:
        legal = ", ".join(known) or "none: no run was evaluated"
        rule = "is a metric of none of the runs"
        raise ConfigError([Violation(path="target", value=target.metric, rule=rule, legal=legal)])


def reach(run: Run, target: Target) -> Reach | None:
    """When the run first was as good as the target; None if never.

    Samples count those of every attempt up to that evaluation: work done twice is needed once
    for the target, but steps logged again after a restart replace those logged before.
    """
    for event in run.evals:
        value = event.metrics.get(target.metric)
        if value is not None and target.reached(value):
            by_step = {
                step.step: step.samples * n_steps
                for step, n_steps in zip(run.steps, run.covered, strict=True)
                if step.step <= event.step
            }
            return Reach(step=event.step, samples=sum(by_step.values()), seconds=event.t)
    return None


def against(run: Run, reference: Run, target: Target | None) -> Against:
    """The run's speed-up over the reference, taken apart."""
    mine = reach(run, target) if target else None
    theirs = reach(reference, target) if target else None
    why = []
    if target is None:
        why.append("no target was given (--target metric=value)")
    else:
        why += [
            f"{name} never reached {target}"
            for name, found in ((run.name, mine), (reference.name, theirs))
            if found is None
        ]
    effectiveness = real = None
    if mine and theirs and mine.samples and mine.seconds > 0:
        effectiveness = theirs.samples / mine.samples
        real = theirs.seconds / mine.seconds
    utilisation, goodput = (_ratio(run, reference, name) for name in ("utilisation", "goodput"))
    if utilisation is None:
        why.append("utilisation is not known for both runs")
    return Against(
        run=run.name,
        reach=mine,
        effectiveness=effectiveness,
        real=real,
        hardware=hardware_speedup(run, reference),
        utilisation=utilisation,
        goodput=goodput,
        why=tuple(why),
    )


def hardware_speedup(run: Run, reference: Run) -> float | None:
    """How many times the model flops per second of the reference's devices these could do.

    For one model that is the ratio of throughput / utilisation: both name the same samples.
    """
    best = []
    for each in (run, reference):
        rate = totals(each).throughput
        utilisation = factors(each)[0].value
        best.append(rate / utilisation if rate and utilisation else None)
    mine, theirs = best
    return mine / theirs if mine is not None and theirs else None


def w_of(run: Run, found: Against | None) -> float | None:
    """W of a run; with the effectiveness had from the reference where there is one."""
    return product(factors(run, found.effectiveness if found else None))


def _ratio(run: Run, reference: Run, name: str) -> float | None:
    values = [
        getattr(each.summary, name) if each.summary is not None else None
        for each in (run, reference)
    ]
    mine, theirs = values
    return mine / theirs if mine is not None and theirs else None


def _times(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return math.prod(known) if len(known) == len(values) else None
