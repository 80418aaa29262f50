"""Tensors of any layout, as a checkpoint takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Replicate

from polyreme.runtime.parted import Parted

if TYPE_CHECKING:
    import torch

    from polyreme.runtime.mesh import World


def among(tensor: torch.Tensor, world: World) -> Parted:
    """The tensor, or its shard, among the processes that hold the same."""
    index, count, holders = world.rank, world.n_ranks, ("whole",)
    if isinstance(tensor, DTensor):
        mesh, index, count = tensor.device_mesh, 0, 1
        for dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                index = index * mesh.size(dim) + mesh.get_coordinate()[dim]
                count *= mesh.size(dim)
        holders = tuple(str(placement) for placement in tensor.placements)
    return Parted(tensor=tensor, cut=None, holders=holders, index=index, count=count)
