"""What workers of a linear model work on: their rows, and gradients of batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..algo.effects import Computed
from ..convex import kernels
from ..convex.problem import Certificate, Objective, certificate
from ..convex.shard import Shard
from ..convex.task import LinearTask
from ..data.deal import deal
from ..data.partition import Iid, Partition
from ..data.rows import Rows
from ..data.source import Source
from ..data.sparse_source import SparseSource
from .applied import Applied
from .feed import Feed
from .gradients import Gradients
from .mesh import World


def labelled(source: Source, objective: Objective) -> tuple[Rows, np.ndarray]:
    """All training samples as rows, with their labels: -1 and 1, or numbers.

    Raises ConfigError where labels are not two classes.
    """
    if isinstance(source, SparseSource):
        return source.rows, source.signs()[0] if objective.classifies else source.predicted
    fields = source.train(np.arange(source.n_train))
    y = fields["labels"].double().numpy()
    if source.sample.n_classes == 2:
        y = 2 * y - 1
    return Rows.of(fields["features"].flatten(1).double().numpy()), y


def tasks(
    source: Source,
    objective: Objective,
    partition: Partition | None,
    *,
    which: Sequence[int],
    n_workers: int,
    global_batch: int,
    seed: int,
) -> dict[int, LinearTask]:
    """Of these workers: the rows that a partition deals them, or equal shares of a shuffle.

    Raises ConfigError where a worker would be without rows.
    """
    rows, y = labelled(source, objective)
    parts = deal(partition or Iid(), source, n_workers, seed)
    batch = max(1, global_batch // n_workers)
    return {
        rank: LinearTask(
            shard=Shard(objective=objective, rows=rows.take(parts[rank]), y=y[parts[rank]]),
            batch=batch,
        )
        for rank in which
    }


class LinearGradients(Gradients):
    """Mean gradients of batches of rows, with that of l2; by kernels over what is stored."""

    def __init__(
        self,
        applied: Applied,
        feeds: Mapping[int, Feed],
        *,
        seed: int,
        source: Source,
        objective: Objective,
    ) -> None:
        super().__init__(applied, feeds, seed=seed)
        self._objective = objective
        self._rows, self._y = labelled(source, objective)
        self.maps = False

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch; zero where it has no row."""
        feed, objective = self.feeds[rank], self._objective
        which = np.array([i for part in feed.own_ids(batch) for i in part], dtype=np.int64)
        self.reads[rank] = batch, []
        shard = Shard(objective=objective, rows=self._rows.take(which), y=self._y[which])
        found, _, loss = kernels.gradient(*shard.given, params.numpy())
        gradient, n = torch.from_numpy(found), len(which)
        if n:
            gradient.div_(n).add_(params, alpha=objective.penalty.l2)
        computed = Computed(gradient=gradient, loss=loss / max(1, n), weight=float(n), n_samples=n)
        if not computed.is_finite:
            self.bad[rank] = batch, []
        return computed


def certified(
    own: Mapping[int, LinearTask], applied: Applied, world: World, w: torch.Tensor
) -> Certificate:
    """Of a model on all workers' rows, of which this process has those; all call it together."""
    objective = next(iter(own.values())).shard.objective
    here = {rank: task.at(w) for rank, task in own.items()}
    sums = torch.stack([found.gradient for found in here.values()]).sum(0)
    said = w.new_tensor(
        [sum(found.loss for found in here.values()), sum(task.n_own for task in own.values())]
    )
    whole = _summed(torch.cat([sums, said]), applied, world)
    z, (loss, n) = whole[:-2] / whole[-1], whole[-2:].tolist()
    c = objective.penalty.shrink(z.numpy())
    each = [task.conjugates(here[rank].slopes, c) for rank, task in own.items()]
    (told,) = _summed(w.new_tensor([sum(each)]), applied, world).tolist()
    return certificate(objective, w.numpy(), z.numpy(), loss / n, told / n)


def _summed(own: torch.Tensor, applied: Applied, world: World) -> torch.Tensor:
    if world.group is None:
        return own
    applied.traffic.sums(own, world.group)
    return own


def reached(gap: float | None, wanted: float | None) -> bool:
    """Whether a gap is known, and one that small was asked for."""
    return gap is not None and wanted is not None and gap <= wanted
