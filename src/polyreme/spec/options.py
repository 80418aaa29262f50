"""The run specification as structs: one table of the file each."""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from ..algo.compose import DataParallel
from ..algo.train import Train
from ..cluster.options import ClusterOptions
from ..data.options import Data
from ..errors import Violation
from ..graph.options import Model
from ..plan.options import Parallel
from ..sim.options import Simulate

_METRICS = {"heldout_loss": "1.5", "test_accuracy": "0.98"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the run is judged by.

    Attributes:
        target: ``metric=value`` that counts as trained: ``heldout_loss`` (nats, to be reached from
            above) or ``test_accuracy`` (0 to 1, from below).
        reference: Run folder against which effectiveness is measured (with `target`).
        trackers: Where numbers go besides the log; each needs the extra of its name.
        partition: Whether a run of a linear model by several workers ends with a measure of how
            good the partition of its rows is; it takes as long as two or three rounds of pSCOPE
            with one pass each.
    """

    target: str | None = None
    reference: str | None = None
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    partition: bool = True

    @property
    def goal(self) -> tuple[str, float] | None:
        """Metric and value of `target`; None where there is no target, or a wrong one."""
        if self.target is None or self.check():
            return None
        metric, _, number = self.target.partition("=")
        return metric.strip(), float(number)

    def check(self) -> list[Violation]:
        """The target must be a metric that runs measure, and a value that it can take."""
        if self.target is None:
            return []
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\S+)\s*", self.target, re.ASCII)
        metric = match[1] if match else ""
        if match is None or metric not in _METRICS:
            rule = "is not metric=value"
            legal = ", ".join(f'"{name}={number}"' for name, number in _METRICS.items())
            return [_refused(self.target, rule, legal)]
        try:
            number = float(match[2])
        except ValueError:
            number = math.nan
        highest = 1.0 if metric == "test_accuracy" else math.inf
        if 0 <= number <= highest and math.isfinite(number):
            return []
        span = "0 to 1" if highest == 1 else "0 or more"
        legal = f'"{metric}={_METRICS[metric]}" (or any value of {span})'
        return [_refused(self.target, f"asks for a value that {metric} never has", legal)]


def _refused(target: str, rule: str, legal: str) -> Violation:
    return Violation(path="report.target", value=target, rule=rule, legal=legal)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: what is trained on what, where, and how.

    Attributes:
        model: Which model is trained.
        data: What it is trained on.
        train: How long, in which batches and precision.
        cluster: Which machines; all of this one unless told.
        parallel: Parts of the split that are fixed; the rest is searched.
        data_parallel: The algorithm between replicas.
        simulate: The workers of `polyreme simulate`, and what their time and links cost.
        report: What the run is judged by.
    """

    model: Model
    data: Data
    train: Train = Train()
    cluster: ClusterOptions = ClusterOptions()
    parallel: Parallel = Parallel()
    data_parallel: DataParallel = DataParallel()
    simulate: Simulate = Simulate()
    report: Report = Report()

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that every rank would else import for itself."""
        return (*self.model.imports, *self.data.imports)
