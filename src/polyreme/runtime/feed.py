"""Feeds a rank its microbatches: read ahead, on the device, filled up where a rank has none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from ..data.order import Ordering, microbatches, share
from ..data.prefetch import Prefetcher, pin
from ..data.source import Source
from ..graph.layer import LayerGraph
from ..graph.loss import IGNORE_LABEL
from ..plan.ir import DataLayout
from .driver import Microbatch
from .mesh import World

_FILLER_SAMPLES = 2  # batch norm wants more than one value a channel


class Feed:
    """Microbatches of one rank for each step.

    Each replica takes its worker's samples of the step, its ranks contiguous parts of these.
    """

    def __init__(
        self,
        *,
        source: Source,
        order: Ordering,
        graph: LayerGraph,
        world: World,
        layout: DataLayout,
        n_microbatches: int,
    ) -> None:
        self._source = source
        self._order = order
        self._graph = graph
        self._world = world
        self._layout = layout
        self._n = n_microbatches
        label = source.sample.fields[graph.labels]
        self.labels_per_sample = math.prod(label.shape)
        tokens = source.sample.fields.get("input_ids")
        self.tokens_per_sample = math.prod(tokens.shape) if tokens is not None else 0

    def n_samples(self, step: int) -> int:
        """Samples of the step over all ranks."""
        n = self._layout.replica
        return sum(len(self._order.local(step, worker, n)) for worker in range(n))

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """Sample numbers of the step, worker by worker."""
        n = self._layout.replica
        return tuple(int(i) for worker in range(n) for i in self._order.local(step, worker, n))

    def own_ids(self, step: int) -> list[list[int]]:
        """Sample numbers of this rank's microbatches of the step."""
        replica, shard = self._world.coordinates(self._layout)
        worker = self._order.local(step, replica, self._layout.replica)
        local = share(worker, shard, self._layout.shard)
        return [part.tolist() for part in microbatches(local, self._n)]

    def steps(self, first: int, stop: int) -> Prefetcher[list[dict[str, torch.Tensor] | None]]:
        """What is read for each step, ahead of its use; `to_device` makes microbatches of it."""
        return Prefetcher(self._read, first, stop)

    def to_device(
        self, read: list[dict[str, torch.Tensor] | None], *, with_fillers: bool
    ) -> list[Microbatch]:
        """Microbatches on the device; None becomes a filler, or is left out."""
        return [self.microbatch(fields) for fields in read if with_fillers or fields is not None]

    def microbatch(self, fields: dict[str, torch.Tensor] | None) -> Microbatch:
        """One microbatch on the device; None becomes a filler."""
        n_samples = 0
        if fields is None:
            fields = dict(self._source.train(np.zeros(_FILLER_SAMPLES, dtype=np.int64)))
            fields[self._graph.labels] = torch.full_like(fields[self._graph.labels], IGNORE_LABEL)
        else:
            n_samples = len(fields[self._graph.labels])
        device = self._world.device
        moved = {name: field.to(device, non_blocking=True) for name, field in fields.items()}
        labels = moved[self._graph.labels]
        return Microbatch(fields=moved, labels=labels, n_samples=n_samples)

    def _read(self, step: int) -> list[dict[str, torch.Tensor] | None]:
        layout = self._layout
        replica, shard = self._world.coordinates(layout)
        worker = self._order.local(step, replica, layout.replica)
        epoch = self._order.epoch(step, replica, layout.replica)
        local = share(worker, shard, layout.shard)
        return [self._pinned(part, epoch) for part in microbatches(local, self._n)]

    def _pinned(self, part: np.ndarray, epoch: int) -> dict[str, torch.Tensor] | None:
        if not len(part):
            return None
        fields = dict(self._source.train(part, epoch))
        return fields if self._world.device.type == "cpu" else pin(fields)


def heldout(
    source: Source, indices: np.ndarray, batch: int, n_batches: int
) -> Iterator[dict[str, torch.Tensor] | None]:
    """The held-out samples of these indices in batches, then None up to `n_batches`."""
    for number in range(n_batches):
        part = indices[number * batch : (number + 1) * batch]
        yield dict(source.heldout(part)) if len(part) else None
