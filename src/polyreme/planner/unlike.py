"""Layers laid out unlike each other: what is offered, in numbers, and whether it fits.

Numbers of a layer are those of outlines in which all layers are laid out as it is; beside these
stand what moves between layouts (`cost.unlike`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, groupby, pairwise

import msgspec
import numpy as np

from ..cluster.types import Cluster
from ..graph.layer import LayerGraph
from ..profile.record import Profile
from .cost.layers import LayerCosts, evenly_s
from .cost.memory import Memory
from .cost.unlike import UnlikeCost
from .draft import Draft, Strategy
from .outline import Outline
from .room import Fitting, Room
from .solve.instance import Array, Instance
from .space import ALL_COUNTS_UP_TO, Space


def unlike_spaces(spaces: Iterable[Space], alone: Iterable[Space] = ()) -> Iterator[Space]:
    """For each number of pipeline ranks, and of devices of each, all layouts of `spaces` together.

    None where there is one layout only, or where layers take statistics over their microbatch.
    Ranks of unlike numbers of devices have one stage each, and all devices together; their layouts
    are those of `alone` too, spaces of one rank.
    """
    found: dict[tuple[int, int], list[Space]] = {}
    for space in spaces:
        for n in sorted({strategy.n_devices for strategy in space.strategies}):
            found.setdefault((space.pp, n), []).append(space)
    by_number: dict[int, dict[Strategy, None]] = {}
    for each in (each for space in alone for each in space.strategies):
        by_number.setdefault(each.n_devices, {})[each] = None
    for (_, n), members in found.items():
        offered = dict.fromkeys(
            strategy
            for space in members
            for strategy in space.strategies
            if strategy.n_devices == n
        )
        strategies = sorted(offered, key=_layout)
        by_number.setdefault(n, {}).update(dict.fromkeys(strategies))
        if len(set(map(_layout, strategies))) > 1 and not members[0].normed:
            yield msgspec.structs.replace(members[0], strategies=tuple(strategies), unlike=True)
    yield from _in_unlike_rows([members[0] for members in found.values()], by_number)


def _in_unlike_rows(
    spaces: Iterable[Space], strategies: Mapping[int, Iterable[Strategy]]
) -> Iterator[Space]:
    """Spaces whose pipeline ranks have other numbers of devices than each other."""
    first_of = {space.pp: space for space in reversed([*spaces]) if not space.normed}
    for pp, space in sorted(first_of.items()):
        if pp == 1 or len(space.sizes) != pp:
            continue
        for rows in _rows(space.n_devices, pp):
            if all(n in strategies for n in rows):
                offered = [each for n in sorted(set(rows)) for each in strategies[n]]
                yield msgspec.structs.replace(
                    space, strategies=tuple(sorted(offered, key=_layout)), unlike=True, rows=rows
                )


def _rows(n: int, pp: int) -> Iterator[tuple[int, ...]]:
    """Numbers of devices that make up all, not all alike; of many devices, so many together.

    >>> list(_rows(4, 2))
    [(1, 3), (3, 1)]
    """
    step = -(-n // ALL_COUNTS_UP_TO)
    if n % step or pp > n // step:
        return
    for ends in combinations(range(step, n, step), pp - 1):
        rows = tuple(end - first for first, end in pairwise((0, *ends, n)))
        if len(set(rows)) > 1:
            yield rows


class UnlikeCosts:
    """Instances of outlines of several layouts; `costs_of` gives those of so many tensor parts."""

    def __init__(
        self,
        graph: LayerGraph,
        profile: Profile,
        cluster: Cluster,
        costs_of: Callable[[int], LayerCosts],
    ) -> None:
        self._of, self._n_cuts = costs_of, len(graph.layers) - 1
        self.cost = UnlikeCost(graph, profile, costs_of)
        self.fitting = UnlikeFitting(self.cost, costs_of(1).fitting.memory, profile, cluster)
        self.tied = costs_of(1).tied

    def instance(self, outline: Outline) -> Instance:
        """The numbers of an outline, its strategies layout by layout."""
        alike = [(self._of(each.layout.tp), each) for each in _alike(outline)]
        found = [costs.instance(each) for costs, each in alike]
        inside = self._moved([each for _, each in alike])
        between = np.concatenate([each.between[:, :, :1] for each in found], axis=1) + inside
        time = np.concatenate([each.time for each in found], axis=2)
        widths = np.array([each.n_devices for each in outline.strategies])
        for stage, n in enumerate(outline.space.rows):
            time[stage][:, widths != n] = np.inf
        return Instance(
            time=time,
            memory=np.concatenate([each.memory for each in found], axis=2),
            capacity=found[0].capacity,
            inside=inside,
            between=between,
            alpha=found[0].alpha,
            beta=found[0].beta,
        )

    def moments(self, outline: Outline) -> tuple[Array, Array, Array]:
        """Bytes (L, K) of each layer while its gradients are reduced, it is gathered, fetched."""
        found = [self._of(each.layout.tp).moments(each) for each in _alike(outline)]
        reducing, passing, fetched = (np.concatenate(each, 1) for each in zip(*found, strict=True))
        return reducing, passing, fetched

    def least_s(self, outline: Outline) -> float:
        """A time that no assignment goes below: each layer in the layout that is fastest for it."""
        each_s = [self._of(each.layout.tp).alone_s(each) for each in _alike(outline)]
        return evenly_s(outline, float(np.min(each_s, axis=0).sum()))

    def _moved(self, alike: Sequence[Outline]) -> Array:
        """Seconds a microbatch from each strategy to each (L - 1, K, K)."""
        of = np.repeat(np.arange(len(alike)), [len(each.strategies) for each in alike])
        moved = np.zeros((self._n_cuts, len(alike), len(alike)))
        for cut in range(self._n_cuts):
            for row, before in enumerate(alike):
                for column, after in enumerate(alike):
                    whole = after.microbatch * after.layout.data
                    each = before.layout, after.layout, cut, whole, after.space.pp
                    moved[cut, row, column] = sum(self.cost.moved_s(*each))
        return moved[:, of[:, None], of[None, :]]


class UnlikeFitting(Fitting):
    """Rooms of drafts whose layers are laid out unlike each other, all shards alike."""

    def __init__(
        self, cost: UnlikeCost, memory: Memory, profile: Profile, cluster: Cluster
    ) -> None:
        super().__init__(memory, profile, cluster)
        self._cost = cost

    def _memory_of(self, strategy: Strategy) -> Memory:
        return self._cost.memory(strategy)

    def tightest(self, draft: Draft) -> Room:
        """Of the tightest device."""
        rooms = []
        for pipe, (first, end) in enumerate(pairwise(accumulate((0, *draft.rows)))):
            have = self.have_bytes[first:end]
            device = first + have.index(min(have))
            need = self._cost.causes(draft, pipe)
            rooms.append(Room(device=device, have_bytes=min(have), need_bytes=need))
        return max(rooms, key=lambda room: room.over_bytes)

    def _place(self, draft: Draft, device: int) -> tuple[int, int]:
        """Pipeline rank, and the index of the shard that stands for all."""
        ends = list(accumulate(draft.rows))
        return next(pipe for pipe, end in enumerate(ends) if device < end), 0

    def shortfalls(self, draft: Draft) -> tuple[int, ...]:
        """Bytes that the fullest device of each pipeline rank lacks; below 0: has left."""
        rows = pairwise(accumulate((0, *draft.rows)))
        return tuple(
            sum(self._cost.causes(draft, pipe).values()) - min(self.have_bytes[first:end])
            for pipe, (first, end) in enumerate(rows)
        )

    def by_device(self, draft: Draft) -> tuple[Mapping[str, int], ...]:
        """Peak bytes by cause of every device of a draft; equal devices share one mapping."""
        causes = [self._cost.causes(draft, pipe) for pipe in range(draft.pp)]
        return tuple(each for each, n in zip(causes, draft.rows, strict=True) for _ in range(n))


def _layout(strategy: Strategy) -> tuple[int, bool, int, int, int]:
    return strategy.tp, strategy.sp, strategy.cp, strategy.shard, strategy.replica


def _alike(outline: Outline) -> Iterator[Outline]:
    """Its parts of one layout each, in the order of its strategies."""
    for _, strategies in groupby(outline.strategies, key=_layout):
        yield msgspec.structs.replace(outline, strategies=tuple(strategies))
