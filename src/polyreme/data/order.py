"""Which samples a step reads: pure functions of (seed, step), whatever the number of machines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ..errors import ConfigError, Violation
from . import shuffle

if TYPE_CHECKING:
    from .partition import Partition
    from .source import Source

Tail = Literal["drop", "short", "wrap"]


class Ordering(Protocol):
    """What the runtime and the simulator ask: the samples of a worker's step."""

    steps_per_epoch: int

    def n_steps(self, epochs: int) -> int:
        """Steps after which every sample was due `epochs` times (dropped ones aside)."""

    def local(self, step: int, worker: int, n_workers: int) -> np.ndarray:
        """Sample numbers (int64) of a worker's step; may be empty in a short last batch."""

    def epoch(self, step: int, worker: int, n_workers: int) -> int:
        """The epoch in which that step of the worker begins: what augmentation is drawn from."""

    def n_own(self, worker: int) -> int:
        """Samples that are this worker's alone; 0 where all share one order."""


def share(indices: np.ndarray, rank: int, n_ranks: int) -> np.ndarray:
    """One rank's contiguous part; sizes differ by at most one, the parts in order are the whole.

    >>> [share(np.arange(5), rank, 3).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    each, left = divmod(len(indices), n_ranks)
    first = rank * each + min(rank, left)
    return indices[first : first + each + (rank < left)]


def microbatches(indices: np.ndarray, n: int) -> list[np.ndarray]:
    """`n` contiguous parts, as `share` cuts them; the last are empty if there are too few."""
    return [share(indices, part, n) for part in range(n)]


class Stream:
    """The endless, shuffled sequence of batches over `n_samples`, anew for each epoch.

    `tail` says what becomes of an epoch's last, incomplete batch: "drop" leaves it out, "short"
    makes it a smaller batch, "wrap" fills it from the next epoch (which goes on from there).
    """

    def __init__(self, *, n_samples: int, batch: int, key: int, tail: Tail) -> None:
        assert n_samples > 0
        assert batch > 0
        assert tail != "drop" or batch <= n_samples
        self._n, self._batch, self._key, self._tail = n_samples, batch, key, tail
        self.steps_per_epoch = n_samples // batch if tail == "drop" else -(-n_samples // batch)

    def n_steps(self, epochs: int) -> int:
        """Steps that `epochs` epochs take."""
        if self._tail == "wrap":
            return -(-epochs * self._n // self._batch)
        return epochs * self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        if self._tail == "wrap":
            return step * self._batch // self._n
        return step // self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Sample numbers of a step."""
        if self._tail == "wrap":
            places = np.arange(step * self._batch, (step + 1) * self._batch, dtype=np.int64)
            first, last = int(places[0]) // self._n, int(places[-1]) // self._n
            return np.concatenate(
                [
                    self._at(places[places // self._n == epoch] % self._n, epoch)
                    for epoch in range(first, last + 1)
                ]
            )
        epoch, number = divmod(step, self.steps_per_epoch)
        end = min(self._n, (number + 1) * self._batch)
        return self._at(np.arange(number * self._batch, end, dtype=np.int64), epoch)

    def _at(self, places: np.ndarray, epoch: int) -> np.ndarray:
        return shuffle.at(places, self._n, shuffle.key(self._key, epoch))


class Order:
    """One global order that all workers share: each takes its part of the global batch."""

    def __init__(self, *, n_samples: int, global_batch: int, seed: int, tail: Tail) -> None:
        if n_samples == 0:
            rule, legal = "has no training samples", "data with at least one sample"
            raise ConfigError([Violation(path="data", value=0, rule=rule, legal=legal)])
        if tail == "drop" and n_samples < global_batch:
            raise ConfigError(
                [
                    Violation(
                        path="train.global_batch",
                        value=global_batch,
                        rule=f'is more than the {n_samples} training samples, and tail "drop" '
                        "would drop them all",
                        legal=f'1 to {n_samples}, or train.tail "short" or "wrap"',
                    )
                ]
            )
        self._stream = Stream(
            n_samples=n_samples, batch=global_batch, key=shuffle.key(seed), tail=tail
        )
        # One process asks for the parts of many workers of the same step.
        self._recent = functools.lru_cache(maxsize=4)(self._stream.batch)
        self.steps_per_epoch = self._stream.steps_per_epoch

    def n_steps(self, epochs: int) -> int:
        """Steps that `epochs` epochs take."""
        return self._stream.n_steps(epochs)

    def batch(self, step: int) -> np.ndarray:
        """Sample numbers (int64) of the global batch of a step."""
        return self._recent(step).copy()

    def local(self, step: int, worker: int, n_workers: int) -> np.ndarray:
        """A worker's contiguous part of the global batch; empty if a short batch has too few."""
        return share(self.batch(step), worker, n_workers)

    def epoch(self, step: int, worker: int = 0, n_workers: int = 1) -> int:
        """The epoch in which a step begins, the same for all workers."""
        return self._stream.epoch(step)

    def n_own(self, worker: int) -> int:
        """None: all samples are everybody's."""
        return 0


class Partitioned:
    """Workers own their samples: `parts` holds the sample numbers of each.

    A worker's step is a function of (seed, worker, step) alone, whatever the others do. Its
    samples are shuffled anew for each of its own epochs, whose last batch `tail` treats. All take
    the same number of steps, so one with fewer samples sees them more often; an epoch of the run
    is the number of steps that one global order over all samples would need.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], *, global_batch: int, seed: int, tail: Tail
    ) -> None:
        self._parts = tuple(parts)
        n_workers = len(parts)
        if global_batch < n_workers:
            rule = f"leaves some of {n_workers} workers without a sample"
            legal = f"{n_workers} or more"
            raise ConfigError(
                [Violation(path="train.global_batch", value=global_batch, rule=rule, legal=legal)]
            )
        batches = [len(share(np.arange(global_batch), w, n_workers)) for w in range(n_workers)]
        if tail == "drop":
            _refuse_small(self._parts, batches, global_batch)
        self._streams = tuple(
            Stream(n_samples=len(part), batch=batch, key=shuffle.key(seed, worker), tail=tail)
            for worker, (part, batch) in enumerate(zip(parts, batches, strict=True))
        )
        self._whole = Order(
            n_samples=sum(map(len, parts)), global_batch=global_batch, seed=seed, tail=tail
        )
        self.steps_per_epoch = self._whole.steps_per_epoch

    def n_steps(self, epochs: int) -> int:
        """Steps that `epochs` epochs over all workers' samples take."""
        return self._whole.n_steps(epochs)

    def local(self, step: int, worker: int, n_workers: int) -> np.ndarray:
        """Sample numbers (int64) of a worker's own step."""
        assert n_workers == len(self._parts)
        own: np.ndarray = self._parts[worker][self._streams[worker].batch(step)]
        return own

    def epoch(self, step: int, worker: int, n_workers: int) -> int:
        """The worker's own epoch in which its step begins."""
        assert n_workers == len(self._parts)
        return self._streams[worker].epoch(step)

    def n_own(self, worker: int) -> int:
        """Samples that the worker was dealt."""
        return len(self._parts[worker])


def _refuse_small(parts: Sequence[np.ndarray], batches: list[int], global_batch: int) -> None:
    small = [
        f"{worker} ({len(part)} of {batch})"
        for worker, (part, batch) in enumerate(zip(parts, batches, strict=True))
        if len(part) < batch
    ]
    if small:
        raise ConfigError(
            [
                Violation(
                    path="train.global_batch",
                    value=global_batch,
                    rule=f'with tail "drop" asks more than is there of worker {", ".join(small)}',
                    legal='a smaller batch, or train.tail "short" or "wrap"',
                )
            ]
        )


def arrange(
    source: Source,
    partition: Partition | None,
    *,
    n_workers: int,
    global_batch: int,
    seed: int,
    tail: Tail,
) -> Order | Partitioned:
    """The order of a run: shared without a partition, else each worker's own.

    Raises ConfigError if the batch does not suit the data, or a worker would be without data.
    """
    if partition is None:
        return Order(n_samples=source.n_train, global_batch=global_batch, seed=seed, tail=tail)
    from .deal import deal

    parts = deal(partition, source, n_workers, seed)
    return Partitioned(parts, global_batch=global_batch, seed=seed, tail=tail)
