"""Feeds a rank its microbatches: read ahead, on the device, filled up where a rank has none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..algo.attack.kind import AttackKind
from ..data.order import Ordering, microbatches, share
from ..data.prefetch import Prefetcher, pin
from ..data.source import Source
from ..graph.layer import LayerGraph
from ..graph.loss import IGNORE_LABEL
from .passes import Microbatch

_FILLER_SAMPLES = 2  # batch norm wants more than one value a channel


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Whose samples are fed: of one worker of several, or of one part of its devices."""

    worker: int
    n_workers: int
    part: int = 0
    n_parts: int = 1


class Feed:
    """Microbatches of one seat for each step.

    Each worker has its samples of the step, its parts contiguous shares of these. A process whose
    layers read no sample (not `reads`) is told how many there are. A hostile worker's labels are as
    its `attack` has them.
    """

    def __init__(
        self,
        *,
        source: Source,
        order: Ordering,
        graph: LayerGraph,
        seat: Seat,
        device: torch.device,
        n_microbatches: int,
        reads: bool = True,
        attack: Sequence[AttackKind] = (),
    ) -> None:
        self._attack = [each for each in attack if seat.worker in each.workers]
        self._reads = reads
        self._source = source
        self._order = order
        self._graph = graph
        self._seat = seat
        self._device = device
        self._n = n_microbatches
        label = source.sample.fields[graph.labels]
        self.labels_per_sample = math.prod(label.shape)
        tokens = source.sample.fields.get("input_ids")
        self.tokens_per_sample = math.prod(tokens.shape) if tokens is not None else 0

    def n_samples(self, step: int) -> int:
        """Samples of the step over all workers."""
        n = self._seat.n_workers
        return sum(len(self._order.local(step, worker, n)) for worker in range(n))

    def n_own(self, step: int) -> int:
        """Samples of the step of this seat's worker."""
        return len(self._order.local(step, self._seat.worker, self._seat.n_workers))

    def sample_ids(self, step: int) -> tuple[int, ...]:
        """Sample numbers of the step, worker by worker."""
        n = self._seat.n_workers
        return tuple(int(i) for worker in range(n) for i in self._order.local(step, worker, n))

    def own_ids(self, step: int) -> list[list[int]]:
        """Sample numbers of this seat's microbatches of the step."""
        return [part.tolist() for part in self._parts(step)]

    def steps(self, first: int, stop: int) -> Prefetcher[list[dict[str, torch.Tensor] | None]]:
        """What is read for each step, ahead of its use; `to_device` makes microbatches of it."""
        return Prefetcher(self.read, first, stop)

    def to_device(
        self, read: list[dict[str, torch.Tensor] | None], *, with_fillers: bool
    ) -> dict[int, Microbatch]:
        """Microbatches on the device by number; None becomes a filler, or is left out."""
        return {
            number: self.microbatch(fields)
            for number, fields in enumerate(read)
            if with_fillers or fields is not None
        }

    def microbatch(self, fields: dict[str, torch.Tensor] | None) -> Microbatch:
        """One microbatch on the device; None becomes a filler."""
        n_samples = 0
        if not self._reads:
            n_rows = _FILLER_SAMPLES if fields is None else len(fields[self._graph.labels])
            n_samples = 0 if fields is None else n_rows
            empty = torch.empty(n_rows, 0, dtype=torch.int64)
            return Microbatch(fields={}, labels=empty, n_samples=n_samples, n_rows=n_rows)
        if fields is None:
            fields = dict(self._source.train(np.zeros(_FILLER_SAMPLES, dtype=np.int64)))
            fields[self._graph.labels] = torch.full_like(fields[self._graph.labels], IGNORE_LABEL)
        else:
            n_samples = len(fields[self._graph.labels])
        device = self._device
        moved = {name: field.to(device, non_blocking=True) for name, field in fields.items()}
        labels = moved[self._graph.labels]
        return Microbatch(fields=moved, labels=labels, n_samples=n_samples, n_rows=len(labels))

    def read(self, step: int) -> list[dict[str, torch.Tensor] | None]:
        """What is read for one step; None stands for a microbatch without samples."""
        epoch = self._order.epoch(step, self._seat.worker, self._seat.n_workers)
        return [self._pinned(part, epoch) for part in self._parts(step)]

    def _parts(self, step: int) -> list[np.ndarray]:
        seat = self._seat
        own = self._order.local(step, seat.worker, seat.n_workers)
        return microbatches(share(own, seat.part, seat.n_parts), self._n)

    def _pinned(self, part: np.ndarray, epoch: int) -> dict[str, torch.Tensor] | None:
        if not len(part):
            return None
        if not self._reads:
            return {self._graph.labels: torch.empty(len(part), 0, dtype=torch.int64)}
        fields, labels = dict(self._source.train(part, epoch)), self._graph.labels
        for each in self._attack:
            fields[labels] = each.labelled(fields[labels], self._source.sample.n_classes)
        return fields if self._device.type == "cpu" else pin(fields)


def heldout(
    source: Source, indices: np.ndarray, batch: int, n_batches: int
) -> Iterator[dict[str, torch.Tensor] | None]:
    """The held-out samples of these indices in batches, then None up to `n_batches`."""
    for number in range(n_batches):
        part = indices[number * batch : (number + 1) * batch]
        yield dict(source.heldout(part)) if len(part) else None
