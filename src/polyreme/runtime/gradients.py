"""Gradients of workers' batches at any parameters: one model, whose weights are set each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..algo.effects import Computed
from ..algo.vector import Layout
from ..data.prefetch import Prefetcher
from .apply.data import Applied
from .feed import Feed
from .passes import accumulate, seed_of, set_seed

Read = list[dict[str, torch.Tensor] | None]
_NO_END = 2**62


class Gradients:
    """Mean gradients as flat vectors, of the workers that `feeds` has.

    The stage is that of one device which exchanges nothing. Each worker has buffers (batch norm)
    of its own; those of a batch that is not finite stay as they were. `reads` is what a worker's
    last batch was made of, by its number; `bad` the last that was not finite.
    """

    def __init__(self, applied: Applied, feeds: Mapping[int, Feed], *, seed: int) -> None:
        assert not applied.units, "a worker holds its parameters whole"
        self.applied, self.feeds = applied, feeds
        self._seed = seed
        self._parameters = applied.buckets.parameters
        self.layout = Layout.of({p.name: tuple(p.master.shape) for p in self._parameters})
        self._masters = [parameter.master.detach() for parameter in self._parameters]
        self.buffers = {
            worker: [slot.tensor.clone() for slot in applied.buffers] for worker in feeds
        }
        self.reads: dict[int, tuple[int, Read]] = {}
        self.bad: dict[int, tuple[int, Read]] = {}
        self._ahead: dict[int, tuple[int, Prefetcher[Read]]] = {}
        self._device = self._masters[0].device

    def start(self) -> torch.Tensor:
        """The parameters as they are, as a new vector."""
        return self.layout.flat({p.name: p.master.detach() for p in self._parameters})

    def put(self, params: torch.Tensor) -> None:
        """Give the model these parameters."""
        torch._foreach_copy_(self._masters, list(self.layout.views(params).values()))
        self.applied.copy_masters()

    def put_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give the model these buffers."""
        live = [slot.tensor for slot in self.applied.buffers]
        if live:
            torch._foreach_copy_(live, list(buffers))

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch; zero where the batch carries no loss."""
        feed, applied = self.feeds[rank], self.applied
        read = self._next(rank, batch)
        self.reads[rank] = batch, read
        microbatches = feed.to_device(read, with_fillers=False)
        n_samples = sum(microbatch.n_samples for microbatch in microbatches)
        self.put(params)
        with self._buffers_of(rank) as keep:
            set_seed(self._device, seed_of(self._seed, batch, rank))
            nominal = float(max(1, n_samples * feed.labels_per_sample))
            loss_sum, counted = accumulate(applied, microbatches, nominal, self._device)
            weight = float(counted)
            found = self._vector(nominal / weight if weight else 0.0)
            loss = float(loss_sum) / weight if weight else 0.0
            computed = Computed(gradient=found, loss=loss, weight=weight, n_samples=n_samples)
            if not computed.is_finite:
                self.bad[rank] = batch, read
            elif microbatches:
                keep()
        return computed

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

    def _vector(self, factor: float) -> torch.Tensor:
        """All gradients times a factor; those of parameters that nothing used are zero."""
        parts = [
            parameter.grad.reshape(-1)
            if parameter.used
            else torch.zeros_like(parameter.master.detach()).reshape(-1)
            for parameter in self._parameters
        ]
        for parameter in self._parameters:
            parameter.used = False
            parameter.master.grad = None
        return torch.cat(parts).mul_(factor)

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
