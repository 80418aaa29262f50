"""What the runtime is handed: everything a process needs to train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..algo.attack import Attack
from ..algo.compose import DataParallel
from ..algo.train import Train
from ..convex.sums import Objective
from ..data.partition import Partition
from ..data.source import Source
from ..graph.layer import LayerGraph
from ..plan.ir import Plan


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run as one process sees it.

    `partition` says how samples are dealt to replicas that own their data (unset: all share one
    order). `folder` is the run folder (exists already; without one, samples that made a run fail
    are not kept). With `general` even plain training is played as a program, worker by worker.
    `objective` is what a linear model, or one alike, minimises.
    """

    graph: LayerGraph
    plan: Plan
    source: Source
    train: Train
    algorithm: DataParallel
    folder: Path | None = None
    partition: Partition | None = None
    general: bool = False
    attack: tuple[Attack, ...] = ()
    objective: Objective | None = None
