"""What a run came to: ``summary.json`` from its events, and the one place that computes W."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import __version__
from .cluster.detect import hardware
from .cluster.types import Cluster
from .graph.layer import LayerGraph
from .plan.ir import Plan, degree
from .profile.record import Profile
from .runlog import (
    EvalEvent,
    Event,
    Partition,
    PartitionEvent,
    RestartEvent,
    Status,
    StepEvent,
    Summary,
)

PASSES = 3  # flops of forward and backward over those of forward alone


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What ran on what: the rest of what a summary is made from."""

    graph: LayerGraph
    plan: Plan
    cluster: Cluster
    profile: Profile | None = None

    @property
    def n_devices(self) -> int:
        """Devices of the plan."""
        return len(self.plan.order)

    @property
    def peak_flops(self) -> float | None:
        """Dense peak of the plan's devices together at its precision; None if one is unknown."""
        peaks = [
            self.cluster.type_of(device).peak_flops.get(self.plan.precision)
            for device in range(self.n_devices)
        ]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if known and len(known) == len(peaks) else None


def summarise(
    events: Iterable[Event],
    setting: Setting,
    *,
    status: Status,
    wall_s: float | None = None,
    effectiveness: float | None = None,
    virtual: bool = False,
) -> Summary:
    """The summary of all attempts in a log; `virtual` says that its clock was.

    `wall_s` is how long the last attempt took as its caller saw it, start-up included (unset: up
    to its last event). `effectiveness` is samples of the reference / samples of this run to the
    target, if there is a reference.
    """
    tally = _Tally()
    for event in events:
        tally.add(event)
    kept = tally.kept
    times = [event.step_s for event, _ in kept if not event.skipped]
    median_s = statistics.median(times) if times else None
    samples = statistics.median(event.samples for event, _ in kept) if kept else 0
    throughput = samples / median_s if median_s else None
    seconds = tally.before_s + wall_s if wall_s is not None else tally.last_s
    goodput = tally.first_s / seconds if seconds > 0 else 0.0
    peak = setting.peak_flops
    rate, basis = (peak, "peak") if peak is not None else _matmul_flops(setting)
    effect = 1.0 if effectiveness is None else effectiveness
    utilisation = _share(setting.graph, throughput, rate)
    found = Summary(
        status=status,
        steps=tally.position,
        samples=sum(event.samples * n for event, n in kept),
        tokens=sum(event.tokens * n for event, n in kept),
        seconds=seconds,
        final_loss=next((e.loss for e, _ in reversed(kept) if e.loss is not None), None),
        metrics=dict(tally.evals[-1].metrics) if tally.evals else {},
        step_s_median=median_s,
        throughput=throughput,
        mfu=_share(setting.graph, throughput, peak),
        wire_bytes=tally.wire_bytes,
        predicted=_predicted(setting.plan),
        measured={
            "step_s": median_s,
            "peak_bytes": tally.peak_bytes,
            "capacity_bytes": min(
                setting.cluster.type_of(device).memory_bytes for device in range(setting.n_devices)
            ),
        },
        w=None if utilisation is None else utilisation * effect * goodput,
        utilisation=utilisation,
        effectiveness=effect,
        goodput=goodput,
        basis={
            "utilisation": basis,
            "effectiveness": "assumed" if effectiveness is None else "reference",
            "goodput": "measured",
        },
        workers=max(degree(layer.split, "replica") for layer in setting.plan.layer_plans.values()),
        devices=setting.n_devices,
        versions=_versions(),
        hardware=hardware(setting.cluster),
        partition=tally.partition,
    )
    if not virtual:
        return found
    return _simulated(found, tally.compute_s / seconds if seconds else 0.0)


def with_effectiveness(summary: Summary, effectiveness: float) -> Summary:
    """The summary of a run that was measured against a reference."""
    share = summary.utilisation
    return msgspec.structs.replace(
        summary,
        effectiveness=effectiveness,
        basis={**summary.basis, "effectiveness": "reference"},
        w=None if share is None else share * effectiveness * summary.goodput,
    )


def _simulated(summary: Summary, utilisation: float) -> Summary:
    """The summary of a run on a virtual clock, whose workers computed for that share of it."""
    return msgspec.structs.replace(
        summary,
        utilisation=utilisation,
        mfu=None,
        basis={**summary.basis, "utilisation": "simulated", "goodput": "simulated"},
        w=utilisation * summary.effectiveness * summary.goodput,
    )


@dataclass(kw_only=True)
class _Tally:
    """Adds up events in the order of the log.

    `kept` are the steps that led to the final weights, each with how many it stands for
    (``train.log_every`` thins them); a restart takes back those after its step. A log whose first
    attempt went on from another run's checkpoint tells of no step before that. `first_s` are
    seconds of steps done for the first time; work done again, or skipped, is none.
    """

    kept: list[tuple[StepEvent, int]] = field(default_factory=list)
    evals: list[EvalEvent] = field(default_factory=list)  # of the way to the final weights
    position: int = 0  # the last step of the way to the final weights
    told: int = 0  # up to here `kept` stands for every step
    furthest: int = 0
    skipped_since: int = 0  # skipped steps after `told`
    first_s: float = 0.0
    compute_s: float = 0.0  # of a worker in the mean, whatever became of it
    wire_bytes: int = 0
    peak_bytes: int | None = None
    partition: Partition | None = None  # of the final weights
    attempt: int | None = None
    begun: int | None = None  # what the first step followed
    before_s: float = 0.0
    last_s: float = 0.0

    def add(self, event: Event) -> None:
        """Take the next event."""
        new = self.attempt is not None and event.attempt != self.attempt
        if new:
            self.before_s = self.last_s
        self.attempt = event.attempt
        self.last_s = max(self.last_s, event.t)
        if isinstance(event, RestartEvent):
            if self.begun is None:
                self.furthest = event.step
            self._go_back(event.step)
        elif isinstance(event, StepEvent):
            if event.step <= self.position:
                self._go_back(event.step - 1)
            self._step(event)
        elif isinstance(event, EvalEvent):
            self.evals.append(event)
        elif isinstance(event, PartitionEvent):
            self.partition = Partition(constant=event.constant, anchors=event.anchors)

    def _step(self, event: StepEvent) -> None:
        if self.begun is None:
            self.begun = self.told = self.furthest
        self.partition = None
        # A skipped step is always logged; other steps that are not are told by the next that is.
        n = 1 if event.skipped else event.step - self.told - self.skipped_since
        self.kept.append((event, n))
        self.position = event.step
        if event.skipped:
            self.skipped_since += 1
        else:
            self.told, self.skipped_since = event.step, 0
            self.first_s += event.step_s * min(n, max(0, event.step - self.furthest))
            self.furthest = max(self.furthest, event.step)
        self.compute_s += event.compute_s * n
        self.wire_bytes += event.wire_bytes * n
        self.peak_bytes = max(self.peak_bytes or 0, event.memory_bytes)

    def _go_back(self, step: int) -> None:
        self.partition = None
        while self.kept and self.kept[-1][0].step > step:
            self.kept.pop()
        while self.evals and self.evals[-1].step > step:
            self.evals.pop()
        self.position = step
        begun = self.begun or 0
        self.told = next((e.step for e, _ in reversed(self.kept) if not e.skipped), begun)
        self.skipped_since = sum(e.step > self.told for e, _ in self.kept)


def _matmul_flops(setting: Setting) -> tuple[float | None, str]:
    profile = setting.profile
    if profile is None:
        return None, "measured"
    return profile.matmul_flops * setting.n_devices, "assumed" if profile.assumed else "measured"


def _share(graph: LayerGraph, throughput: float | None, flops: float | None) -> float | None:
    """Model flops per second over what the devices could do."""
    if throughput is None or not flops:
        return None
    return PASSES * graph.flops * throughput / flops


def _predicted(plan: Plan) -> dict[str, Any]:
    if plan.estimate is None:
        return {}
    return {"step_s": plan.estimate.step_s, "peak_bytes": dict(plan.estimate.peak_bytes)}


def _versions() -> dict[str, str]:
    import torch

    return {
        "polyreme": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
