"""What all layers of a draft share: how devices are cut, and the batch, before layers choose."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from .draft import Strategy
from .space import Space


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """Strategies that are offered to each layer, in so many microbatches.

    The first of `strategies` stands for the layout: replica, shard, tp and sp are the same in all,
    unless the space is `unlike`.
    """

    space: Space
    strategies: tuple[Strategy, ...]
    microbatches: int

    @property
    def microbatch(self) -> int:
        """Samples of the largest microbatch."""
        samples = math.ceil(self.space.workload.global_batch / self.layout.data)
        return math.ceil(samples / self.microbatches)

    @property
    def takes_turns(self) -> bool:
        """See `Draft.takes_turns`."""
        return self.microbatches == 1 and not self.space.order

    @property
    def layout(self) -> Strategy:
        """One strategy of the layout."""
        return self.strategies[0]


def outlines(space: Space) -> Iterator[Outline]:
    """All of a space, those of the fewest microbatches first."""
    if space.unlike:
        batch = space.workload.global_batch
        counts = {each.data: space.counts(each.data) for each in space.strategies}
        for microbatches in sorted({n for each in counts.values() for n in each}):
            strategies = tuple(
                each
                for each in space.strategies
                if microbatches in counts[each.data]
                or (space.microbatch is None and each.data * microbatches <= batch)
            )
            widths = {each.n_devices for each in strategies}
            if len({each.layout for each in strategies}) > 1 and widths >= {*space.rows}:
                yield Outline(space=space, strategies=strategies, microbatches=microbatches)
        return
    layouts: dict[Strategy, list[Strategy]] = {}
    for strategy in space.strategies:
        layouts.setdefault(strategy.layout, []).append(strategy)
    for alike in layouts.values():
        for microbatches in space.counts(alike[0].data):
            yield Outline(space=space, strategies=tuple(alike), microbatches=microbatches)
