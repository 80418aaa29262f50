"""A replica that is one worker of an algorithm: its parameters as vectors, one a process.

Each process's vector holds what it counts; together they hold each entry of the model once. What
several processes hold is brought to the others when parameters are put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..algo.vector import Layout
from .applied import Applied, Sharded, Trainable


class Replica:
    """This process's part of a replica. `layout` names all its tensors; others' have no entries."""

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        self._all: Sequence[Trainable] = applied.trainable
        self._own = [parameter for parameter in self._all if applied.counts_in_replica(parameter)]
        counted = {parameter.name for parameter in self._own}
        self.layout = Layout.of(
            {
                p.name: tuple(_local(p.master).shape) if p.name in counted else (0,)
                for p in self._all
            }
        )
        self._spreads = _spreads(applied)

    def start(self) -> torch.Tensor:
        """The parameters as they are, as a new vector."""
        own = {parameter.name: _local(parameter.master) for parameter in self._own}
        nothing = torch.empty(0, dtype=next(iter(own.values())).dtype) if own else torch.empty(0)
        return self.layout.flat(
            {p.name: own.get(p.name, nothing.to(self._applied.device)) for p in self._all}
        )

    def put(self, params: torch.Tensor) -> None:
        """Give the model these parameters, on all processes of the replica together."""
        views = self.layout.views(params)
        masters = [_local(parameter.master) for parameter in self._own]
        if masters:
            torch._foreach_copy_(
                masters, [views[p.name].view_as(_local(p.master)) for p in self._own]
            )
        for group, source, parameters in self._spreads:
            _broadcast([_local(p.master) for p in parameters], group, source)
        self._applied.copy_masters()

    def agree(
        self, loss_sum: torch.Tensor, weight: torch.Tensor
    ) -> tuple[float, float, bool | None]:
        """Loss and labels of the whole replica, and whether all is finite (None: not looked at)."""
        places = self._applied.places
        group = places.replica
        if group is None:
            return float(loss_sum), float(weight), None
        if places.cell.tp:  # the first tensor part has said it
            loss_sum, weight = torch.zeros_like(loss_sum), torch.zeros_like(weight)
        gradients = [_gradient(parameter) for parameter in self._own]
        sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]
        finite = torch.isfinite(torch.stack([loss_sum, *sums])).all()
        said = torch.stack([loss_sum, weight, (~finite).double()])
        total, labels, bad = self._applied.traffic.sums(said, group)
        return total, labels, not bad

    def gradient(self, factor: float) -> torch.Tensor:
        """All gradients times a factor; those of parameters that nothing used are zero."""
        own = {parameter.name: _gradient(parameter) for parameter in self._own}
        device = self._applied.device
        parts = [own[p.name].reshape(-1) for p in self._all if p.name in own]
        for parameter in self._all:
            parameter.used = False
            parameter.master.grad = None
        return torch.cat(parts).mul_(factor) if parts else torch.empty(0, device=device)


def _spreads(applied: Applied) -> list[tuple[Any, int, list[Trainable]]]:
    """(group, process that has the values, parameters), in the order in which they are spread."""
    places, cell = applied.places, applied.places.cell
    whole = [p for p in applied.trainable if not isinstance(p, Sharded)]
    found: list[tuple[Any, int, list[Trainable]]] = []
    if places.data is not None and whole:
        found.append((places.data, places.rank(pipe=cell.pipe, shard=0, tp=cell.tp), [*whole]))
    copied: dict[int, list[Trainable]] = {}
    held: dict[tuple[int, ...], list[Trainable]] = {}
    for parameter in sorted(applied.trainable, key=lambda each: each.name):
        where = applied.where[parameter.name]
        if where.cut is not None and where.cut.copies > 1:
            copied.setdefault(where.cut.copies, []).append(parameter)
        if len(where.pipes) > 1:
            held.setdefault(where.pipes, []).append(parameter)
    groups = {**places.copies, applied.grid.tp: places.tp}
    for n, parameters in sorted(copied.items()):
        first = cell.tp // n * n
        source = places.rank(pipe=cell.pipe, shard=cell.shard, tp=first)
        found.append((groups[n], source, parameters))
    for pipes, parameters in sorted(held.items()):
        found.append((places.shared[pipes], places.rank_at(pipe=pipes[0]), parameters))
    return found


def _broadcast(tensors: Sequence[torch.Tensor], group: Any, source: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, source, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _gradient(parameter: Trainable) -> torch.Tensor:
    if isinstance(parameter, Sharded):
        found = parameter.master.grad
        return torch.zeros_like(_local(parameter.master)) if found is None else _local(found)
    if parameter.has_grad and parameter.grad.numel():
        return parameter.grad.detach()
    return torch.zeros_like(parameter.master.detach())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
