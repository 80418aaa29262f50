"""Whole tensors from the parts that processes hold, one at a time, on the first process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .applied import Applied
from .mesh import World
from .parted import Parted, parted
from .state import State, average_buffers


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tensor: its shape and dtype, and the process that has it in hand to send it."""

    shape: tuple[int, ...]
    dtype: str
    rank: int

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


def forms(tensors: Mapping[str, Parted], applied: Applied, world: World) -> dict[str, Form]:
    """Forms of all tensors of the model, in one order on all processes; all call it together."""
    places = applied.places
    speaks = places.data_rank == 0 and places.cell.tp == 0 and places.team[0] == 0
    ours = [
        (name, each.shape, str(each.tensor.dtype).removeprefix("torch."))
        for name, each in tensors.items()
        if speaks and each.holders[-1][0] == places.cell.pipe
    ]
    said = world.gather((places.cell.pipe, ours))
    found: dict[str, Form] = {}
    for rank in sorted(range(len(said)), key=lambda rank: said[rank][0]):
        for name, shape, dtype in said[rank][1]:
            found[name] = Form(shape=tuple(shape), dtype=dtype, rank=rank)
    return found


def gathered(
    name: str, tensor: Parted | None, form: Form, applied: Applied, world: World
) -> torch.Tensor | None:
    """The whole tensor on the first process; all processes call it together."""
    places, record = applied.places, world.record
    whole: torch.Tensor | None = None
    if tensor is not None and places.cell.pipe == tensor.holders[-1][0]:
        whole = of_stage(name, tensor, applied)
    if form.rank == 0:
        return whole if world.is_first else None
    if world.rank == form.rank:
        assert whole is not None, "its stage has it"
        with record.message("send", 0, whole.nbytes):
            dist.send(whole.contiguous(), 0, group=world.group)
    if not world.is_first:
        return None
    whole = form.empty(world.device)
    with record.message("recv", form.rank, whole.nbytes):
        dist.recv(whole, form.rank, group=world.group)
    return whole


def of_stage(name: str, tensor: Parted, applied: Applied) -> torch.Tensor:
    """The whole tensor on all processes of its stage, which call it together."""
    live = tensor.tensor.detach()
    if isinstance(live, DTensor):
        with applied.traffic.record.inside("all_gather", live, applied.grid.shard):
            live = live.full_tensor()
    cut = tensor.cut
    if cut is None or cut.dim is None:
        return live
    whole = torch.zeros(cut.shape, dtype=live.dtype, device=live.device)
    if cut.copy == 0:
        mine = Parted(tensor=live, cut=cut, holders=(), index=0, count=1)
        for part in mine.parts(name):
            whole[part.place] = part.local
    # As bytes: all but one are zero, and so the sum has the bits of that one.
    applied.traffic.all_reduce(whole.view(torch.uint8), applied.places.tp)
    return whole


def full_parameters(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model's weights and buffers on rank 0, gathered one at a time, on the CPU.

    All ranks must run through it; only rank 0 is given anything. Tied weights come once.
    """
    applied, world = state.applied, state.world
    average_buffers(applied, world)
    tensors = weights(applied)
    for name, form in forms(tensors, applied, world).items():
        whole = gathered(name, tensors.get(name), form, applied, world)
        if whole is not None:
            yield name, whole.cpu()


def weights(applied: Applied) -> dict[str, Parted]:
    """This process's masters and buffers by whole-model name."""
    tensors = dict(applied.masters)
    tensors |= {slot.name: slot.tensor for slot in applied.buffers}
    return {
        name: parted(tensor, applied.where[name].cut, applied.where[name].pipes, applied.places)
        for name, tensor in tensors.items()
    }
