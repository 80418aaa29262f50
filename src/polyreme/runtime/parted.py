"""How a tensor of this process lies in the whole model, and who else holds the same of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..graph.cut import Cut
from .pieces import Part
from .places import Places

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Parted:
    """A live tensor, its part of the whole, and its place among those that hold the same part.

    `holders` names them by what is the same for all of them; this process is the `index`-th of
    `count`.
    """

    tensor: torch.Tensor
    cut: Cut | None
    holders: tuple[Any, ...]
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape) if self.cut is None else self.cut.shape

    @property
    def n_bytes(self) -> int:
        """Of what all shards of this part take together."""
        return math.prod(self.tensor.shape) * self.tensor.element_size()

    def among(self, which: int, count: int) -> Parted:
        """The same where so many teams of processes hold it, of which this is one."""
        index = which * self.count + self.index
        return dataclasses.replace(self, index=index, count=count * self.count)

    def parts(self, name: str) -> list[Part]:
        """The rectangles of the whole tensor that are here; padding belongs to none."""
        offset, local = _local(self.tensor)
        cut = self.cut
        if cut is None or cut.dim is None:
            return [Part(name=name, shape=self.shape, offset=offset, local=local)]
        dim, before, found = cut.dim, 0, []
        first, end = offset[dim], offset[dim] + local.shape[dim]
        for start, stop in cut.intervals:
            low, high = max(first, before), min(end, before + stop - start)
            if low < high:
                at = (*offset[:dim], start + low - before, *offset[dim + 1 :])
                here = local.narrow(dim, low - first, high - low)
                found.append(Part(name=name, shape=cut.shape, offset=at, local=here))
            before += stop - start
        return found


def parted(tensor: torch.Tensor, cut: Cut | None, pipes: tuple[int, ...], places: Places) -> Parted:
    """A tensor that these pipeline ranks hold; without a cut all tensor parts have it whole."""
    from torch.distributed.tensor import DTensor

    cell, grid = places.cell, places.grid
    sharded = isinstance(tensor, DTensor)
    copies = grid.tp if cut is None else cut.copies
    copy = cell.tp if cut is None else cut.copy
    n_data = grid.replica if sharded else grid.degrees.data
    data = cell.replica if sharded else places.data_rank
    return Parted(
        tensor=tensor,
        cut=cut,
        holders=(sharded, copies, pipes),
        index=(pipes.index(cell.pipe) * copies + copy) * n_data + data,
        count=len(pipes) * copies * n_data,
    )


def _local(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Where the local shard begins, and it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor
    placed: Any = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(placed[0]), "the local part is as the layout says"
    return tuple(placed[1]), local


def dealt(tensors: dict[str, Parted]) -> list[Part]:
    """The parts that this process writes: together all write each element once.

    What several hold is dealt out among them by size.
    """
    loads: dict[tuple[Any, ...], list[int]] = {}
    mine = set()
    for name, each in sorted(tensors.items(), key=lambda item: (-item[1].n_bytes, item[0])):
        load = loads.setdefault(each.holders, [0] * each.count)
        least = load.index(min(load))
        load[least] += each.n_bytes
        if least == each.index:
            mine.add(name)
    return [
        part
        for name, each in tensors.items()
        if name in mine
        for part in each.parts(name)
        if part.local.numel() or not math.prod(each.shape)
    ]
