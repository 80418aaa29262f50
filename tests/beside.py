"""Runs a tiny job beside its reference in processes of the pool, with or without a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.train import Train
from polyreme.data.order import arrange
from polyreme.graph.dropout import without_dropout
from polyreme.reference.loop import Cut, Reference
from polyreme.reference.model import Layers, plain
from polyreme.runtime.job import Job
from polyreme.runtime.making import grid_for
from polyreme.runtime.mesh import World
from polyreme.runtime.verify import Tolerance, Verdict, verify
from polyreme.sample import SampleSpec
from tiny import Case, plan

TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, tensor=1e-9),
    "fp32": Tolerance(loss=1e-5, tensor=1e-4, apart=False),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


class Random:
    """Samples of any form; some tokens carry no loss."""

    metric, fingerprint, n_train, n_heldout = "heldout_loss", "random", 40, 0

    def __init__(self, sample: SampleSpec) -> None:
        self.sample = sample
        generator = np.random.default_rng(7)
        self._fields = {}
        for name, spec in sample.fields.items():
            shape = (self.n_train, *spec.shape)
            if spec.dtype == "int64":
                high = sample.n_classes if name == "labels" or len(sample.fields) > 1 else 2
                values = torch.from_numpy(generator.integers(0, high, shape))
                if name == "labels" and spec.shape:
                    values[torch.from_numpy(generator.random(shape) < 0.3)] = -100
            else:
                values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
            self._fields[name] = values

    def train(self, indices, epoch=0):
        return {name: values[torch.from_numpy(indices)] for name, values in self._fields.items()}

    def baselines(self, n_heldout=None):
        return {}


@dataclass(frozen=True)
class Family(Case):
    """A model of the options, on random samples of its form."""

    options: Any = None
    sample: Any = None

    def job(self) -> Job:
        graph = self.options.graph(self.sample)
        return Job(
            graph=without_dropout(graph),
            plan=plan(graph, global_batch=self.global_batch, **self.plan),
            source=Random(self.sample),
            train=Train(
                steps=self.steps,
                global_batch=self.global_batch,
                clip_norm=self.clip_norm,
                tail=self.tail,
            ),
            algorithm=DataParallel(rule=self.rule),
        )


def beside(
    world: World, case: Case, fault: Callable[..., Any] | None = None, n_steps: int = 3
) -> Verdict:
    """The verdict on a case; `fault` gets the process's world and what `undo` is told."""
    job = case.job()
    oracle = reference(case, job, world) if world.is_first else None
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> Any:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
        return undo[-1][2]

    if fault is not None:
        job = fault(world, put, job) or job
    try:
        tolerance = TOLERANCES[job.plan.precision]
        return verify(job, world, oracle, n_steps=n_steps, tolerance=tolerance)
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def reference(case: Case, job: Job, world: World) -> Reference:
    layout, seed = grid_for(job.plan), job.train.seed
    if isinstance(case, Family):
        graph = case.options.graph(case.sample)
        model = plain(case.options, graph, case.sample, seed, world.device)
    else:
        model = Layers(job.graph, seed, world.device).train()
    return Reference(
        model,
        source=job.source,
        order=arrange(
            job.source,
            job.partition,
            n_workers=layout.replica,
            global_batch=job.train.global_batch,
            seed=seed,
            tail=job.train.tail,
        ),
        cut=Cut(replica=layout.replica, shard=layout.shard, microbatches=job.plan.microbatches),
        train=job.train,
        rule=case.rule,
        labels=job.graph.labels,
        fields=tuple(job.graph.inputs),
        dtype=DTYPES[job.plan.precision],
        device=world.device,
    )
