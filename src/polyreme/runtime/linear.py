"""What workers of a linear model, or one alike, work on: their samples, gradients of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import runlog
from ..algo.effects import Computed
from ..algo.task import Certificate, Here, Sum, Task
from ..convex.goodness import fallen
from ..convex.sums import Samples
from ..data.deal import deal
from ..data.partition import Iid, Partition
from ..data.source import Source
from .applied import Applied
from .feed import Feed
from .gradients import Gradients
from .mesh import World

_ANCHORS = (0.0, 0.5)  # times the model


def tasks(
    samples: Samples,
    source: Source,
    partition: Partition | None,
    *,
    which: Sequence[int],
    n_workers: int,
    global_batch: int,
    seed: int,
) -> dict[int, Sum]:
    """Of these workers: the samples that a partition deals them, or equal shares of a shuffle.

    Raises ConfigError where a worker would be without samples.
    """
    parts = deal(partition or Iid(), source, n_workers, seed)
    batch = max(1, global_batch // n_workers)
    return {rank: samples.task(parts[rank], batch) for rank in which}


class SumGradients(Gradients):
    """Mean gradients of batches of samples, with the penalty's; by kernels."""

    def __init__(
        self, applied: Applied, feeds: Mapping[int, Feed], *, seed: int, samples: Samples
    ) -> None:
        for slot in applied.buffers:
            value = samples.constants.get(slot.name.rpartition(".")[2])
            if value is not None:
                slot.tensor.copy_(torch.from_numpy(value))
        super().__init__(applied, feeds, seed=seed)
        self._samples = samples
        self.maps = False

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch; zero where it has no sample."""
        which = np.array([i for part in self.feeds[rank].own_ids(batch) for i in part], np.int64)
        self.reads[rank] = batch, []
        gradient, loss = self._samples.gradient(which, params)
        n = len(which)
        computed = Computed(gradient=gradient, loss=loss / max(1, n), weight=float(n), n_samples=n)
        if not computed.is_finite:
            self.bad[rank] = batch, []
        return computed


@dataclass(frozen=True, kw_only=True)
class At:
    """At a model: what each worker of this process has there, and of all their samples together.

    `z` [D] is the gradient of the mean loss over all `n`.
    """

    here: Mapping[int, Here]
    z: torch.Tensor
    loss: float
    n: float


def certified(
    own: Mapping[int, Sum],
    applied: Applied,
    world: World,
    w: torch.Tensor,
    lower: Mapping[int, float],
) -> Certificate:
    """Of a model on all workers' samples, of which this process has those; all call it together.

    `lower` is what each worker knows that the objective is never below: it counts if all know it.
    """
    return _certified(own, applied, world, w, _at(own, applied, world, w), lower)


def anchors(
    own: Mapping[int, Task],
    applied: Applied,
    world: World,
    w: torch.Tensor,
    seed: int,
    lower: Mapping[int, float] | None = None,
) -> tuple[runlog.Anchor, ...]:
    """How good the partition of the samples is, seen from anchors; all call it together.

    `w` is taken for the optimum, less its gap. Two passes of steps and five of sums in all; none
    if nothing is known: w is 0, or its gap has no bound. `lower`: see `certified`.

    Source: Zhao et al. 2018, "Proximal SCOPE for Distributed Sparse Learning", definitions 2 to 5.
    Differs: workers count by their samples, so that the bound holds where they have unlike many.
    """
    size, end = float(w.norm()), _at(own, applied, world, w)
    last = _certified(own, applied, world, w, end, lower or {})
    least = last.objective - max(0.0, last.gap)
    if not (size and math.isfinite(least)):
        return ()
    one, told = next(iter(own.values())), []
    curvatures = {rank: task.curvature() for rank, task in own.items()}
    for number, at in enumerate(_ANCHORS):
        anchor = at * w
        there = _at(own, applied, world, anchor)
        sums = sum(
            fallen(
                task,
                w,
                end.here[rank],
                there.z - there.here[rank].gradient / task.n_own,
                eta=0.5 / curvatures[rank] if curvatures[rank] else 1.0,
                seed=(seed, rank, number),
            )
            for rank, task in own.items()
        )
        (all_sums,) = _summed(w.new_tensor([sums]), applied, world).tolist()
        low, high = all_sums / end.n, there.loss + one.penalty(anchor)
        fall, distance = high - least, (1 - at) * size
        told.append(
            runlog.Anchor(
                at=at,
                distance=distance,
                constant=max(0.0, least - low) / distance**2,
                promised=max(1.0, (high - low) / fall) if fall > 0 else None,
            )
        )
    return tuple(told)


def _at(own: Mapping[int, Sum], applied: Applied, world: World, w: torch.Tensor) -> At:
    here = {rank: task.at(w) for rank, task in own.items()}
    sums = torch.stack([found.gradient for found in here.values()]).sum(0)
    said = w.new_tensor(
        [sum(found.loss for found in here.values()), sum(task.n_own for task in own.values())]
    )
    whole = _summed(torch.cat([sums, said]), applied, world)
    loss, n = whole[-2:].tolist()
    return At(here=here, z=whole[:-2] / whole[-1], loss=loss / n, n=n)


def _certified(
    own: Mapping[int, Sum],
    applied: Applied,
    world: World,
    w: torch.Tensor,
    at: At,
    lower: Mapping[int, float],
) -> Certificate:
    one = next(iter(own.values()))
    c = one.shrink(at.z)
    each = [task.conjugates(at.here[rank].slopes, c) for rank, task in own.items()]
    known = [lower.get(rank, -math.inf) for rank in own]
    told = w.new_tensor([sum(each), sum(math.isinf(bound) for bound in known)])
    conjugates, unknown = _summed(told, applied, world).tolist()
    found = one.certificate(w, at.z, at.loss, conjugates / at.n)
    if unknown or not found.objective - known[0] < found.gap:
        return found
    return one.certificate(w, at.z, at.loss, -known[0])


def _summed(own: torch.Tensor, applied: Applied, world: World) -> torch.Tensor:
    if world.group is None:
        return own
    applied.traffic.sums(own, world.group)
    return own
