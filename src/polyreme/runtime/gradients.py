"""Gradients of workers' batches at any parameters: one model, whose weights are set each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..algo.effects import Computed
from ..data.prefetch import Prefetcher
from .applied import Applied
from .batched import Batched
from .executor import Executor
from .feed import Feed
from .passes import Microbatch, seed_of, set_seed
from .replica import Replica

Read = list[dict[str, torch.Tensor] | None]
_NO_END = 2**62


@dataclass(frozen=True, kw_only=True)
class _Asked:
    rank: int
    params: torch.Tensor
    batch: int
    read: Read
    microbatches: Mapping[int, Microbatch]


class Gradients:
    """Mean gradients as flat vectors, of the workers that `feeds` has.

    A worker is a replica, on however many processes; they exchange nothing with others. The vector
    of a process holds the parameters that it counts (see `Applied.counts_in_replica`), so that all
    vectors of a replica together hold each entry once. Each worker has buffers (batch norm)
    of its own; those of a batch that is not finite stay as they were. `reads` is what a worker's
    last batch was made of, by its number; `bad` the last that was not finite. `maps` says whether
    those of several workers are computed in one pass.
    """

    def __init__(self, applied: Applied, feeds: Mapping[int, Feed], *, seed: int) -> None:
        self.applied, self.feeds = applied, feeds
        self._executor = Executor(applied)
        self._seed = seed
        self._replica = Replica(applied)
        self.layout = self._replica.layout
        self.buffers = {
            worker: [slot.tensor.clone() for slot in applied.buffers] for worker in feeds
        }
        self.reads: dict[int, tuple[int, Read]] = {}
        self.bad: dict[int, tuple[int, Read]] = {}
        self._ahead: dict[int, tuple[int, Prefetcher[Read]]] = {}
        self._device = applied.device
        self._batched: Batched | None = None
        self.maps = self._device.type != "cpu"

    def start(self) -> torch.Tensor:
        """The parameters as they are, as a new vector."""
        return self._replica.start()

    def put(self, params: torch.Tensor) -> None:
        """Give the model these parameters."""
        self._replica.put(params)

    def put_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give the model these buffers."""
        live = [slot.tensor for slot in self.applied.buffers]
        if live:
            torch._foreach_copy_(live, list(buffers))

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch; zero where the batch carries no loss."""
        feed = self.feeds[rank]
        read = self._next(rank, batch)
        self.reads[rank] = batch, read
        microbatches = feed.to_device(read, with_fillers=self.applied.fills)
        n_samples = feed.n_own(batch)
        self.put(params)
        with self._buffers_of(rank) as keep:
            set_seed(self._device, seed_of(self._seed, batch, self._seed_rank(rank)))
            nominal = float(max(1, n_samples * feed.labels_per_sample))
            self.applied.traffic.begin()
            loss_sum, counted = self._executor(microbatches, nominal)
            total, weight, finite = self._replica.agree(loss_sum, counted)
            computed = Computed(
                gradient=self._replica.gradient(nominal / weight if weight else 0.0),
                loss=total / weight if weight else 0.0,
                weight=weight,
                n_samples=n_samples,
                known_finite=finite,
            )
            if not computed.is_finite:
                self.bad[rank] = batch, read
            elif microbatches:
                keep()
        return computed

    def together(self, asked: Sequence[tuple[int, torch.Tensor, int]]) -> list[Computed]:
        """The same for several workers, their parameters and batches, in few passes.

        On processors one after another, and wherever batches differ in shape.
        """
        if not self.maps:
            return [self(*each) for each in asked]
        found: dict[int, Computed] = {}
        for part in self._alike(asked):
            found |= self._mapped(part)
        return [found[rank] for rank, _, _ in asked]

    def _alike(self, asked: Sequence[tuple[int, torch.Tensor, int]]) -> Iterator[list[_Asked]]:
        """What can be computed in one pass; those of other shapes, or of more parts, alone."""
        parts: dict[Any, list[_Asked]] = {}
        for rank, params, batch in asked:
            read = self._next(rank, batch)
            self.reads[rank] = batch, read
            each = self.feeds[rank].to_device(read, with_fillers=False)
            one = _Asked(rank=rank, params=params, batch=batch, read=read, microbatches=each)
            first = next(iter(each.values()))
            shapes = [(n, f.shape) for n, f in first.fields.items()] if len(each) == 1 else rank
            parts.setdefault(str(shapes), []).append(one)
        yield from parts.values()

    def _mapped(self, asked: list[_Asked]) -> dict[int, Computed]:
        if len(asked) == 1 or len(asked[0].microbatches) != 1:
            return {each.rank: self(each.rank, each.params, each.batch) for each in asked}
        if self._batched is None:
            self._batched = Batched(self.applied, self.layout)
        own = [self.buffers[each.rank] for each in asked]
        set_seed(self._device, seed_of(self._seed, asked[0].batch, asked[0].rank))
        sums, losses, weights, after = self._batched(
            [each.params for each in asked],
            [next(iter(each.microbatches.values())) for each in asked],
            own,
        )
        finite = torch.isfinite(sums).all(1) & torch.isfinite(losses)
        told = torch.stack([losses.double(), weights.double(), finite.double()]).tolist()
        found = {}
        for number, each in enumerate(asked):
            loss, weight, is_finite = (row[number] for row in told)
            if not is_finite:
                self.bad[each.rank] = each.batch, each.read
            elif own[number]:
                torch._foreach_copy_(own[number], after[number])
            found[each.rank] = Computed(
                gradient=sums[number] / max(1.0, weight),
                loss=loss / weight if weight else 0.0,
                weight=weight,
                n_samples=next(iter(each.microbatches.values())).n_samples,
                known_finite=bool(is_finite),
            )
        return found

    def close(self) -> None:
        """End what reads ahead."""
        for _, ahead in self._ahead.values():
            ahead.close()
        self._ahead.clear()

    def _next(self, worker: int, batch: int) -> Read:
        """What a batch is read from; the one after it is read meanwhile where one worker is fed."""
        if len(self.feeds) > 1:
            return self.feeds[worker].read(batch)
        number, ahead = self._ahead.get(worker, (None, None))
        if ahead is None or number != batch:
            if ahead is not None:
                ahead.close()
            ahead = self.feeds[worker].steps(batch, _NO_END)
        self._ahead[worker] = batch + 1, ahead
        return next(ahead)

    def _seed_rank(self, worker: int) -> int:
        """Of whose random numbers these are: tensor parts of one shard have the same."""
        cell, grid = self.applied.places.cell, self.applied.grid
        return worker + self.applied.places.team[1] * (cell.shard + grid.shard * cell.pipe)

    @contextmanager
    def _buffers_of(self, worker: int) -> Iterator[Callable[[], object]]:
        """The model with a worker's buffers; gives a function that keeps what became of them."""
        live = [slot.tensor for slot in self.applied.buffers]
        own = self.buffers[worker]
        if not live:
            yield lambda: None
            return
        self.put_buffers(own)
        yield lambda: torch._foreach_copy_(own, live)
