"""Everything of a run that survives it, as named global tensors: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from ..algo.optimizer import RuleOptimizer
from .applied import Applied
from .mesh import World
from .parted import Parted, parted
from .pieces import Index, Reader

_AT_ONCE_BYTES = 64 * 2**20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come: steps tried, samples and tokens seen, steps skipped in a row.

    The data position is `step`, and random numbers of a step follow from the seed, the step and
    the data rank; so there is no more to them than this.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_in_row: int = 0


class State:
    """Parameters, buffers, optimizer state and progress, whatever the layout.

    `tensors` gives live tensors under names that do not depend on the layout: ``param/NAME``
    (float32 or float64 masters), ``buffer/NAME``, ``optimizer/NAME/KEY``. A sharded one is a
    DTensor, any other is the same on all ranks. All are there from the start, so a checkpoint is
    loaded into them in place; call `restored` afterwards.
    """

    def __init__(
        self, applied: Applied, optimizers: Sequence[torch.optim.Optimizer], world: World
    ) -> None:
        self.applied = applied
        self.world = world
        self.progress = Progress()
        self._as: dict[str, tuple[str, bool]] = {}  # whose entry it is, and whether of its shape
        self._optimizers = tuple(optimizers)
        # Of how many processes that hold all this alike, beside those that it is laid over.
        self.team = (0, 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors by name; averages diverged buffers first, so all ranks call it together."""
        average_buffers(self.applied, self.world)
        masters = self.applied.masters
        names = {id(tensor): name for name, tensor in masters.items()}
        shapes = {name: tensor.shape for name, tensor in masters.items()}
        tensors = {f"param/{name}": tensor.detach() for name, tensor in masters.items()}
        tensors |= {f"buffer/{slot.name}": slot.tensor for slot in self.applied.buffers}
        for optimizer in self._optimizers:
            for parameter, entries in optimizer.state.items():
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        name = names[id(parameter)]
                        tensors[f"optimizer/{name}/{key}"] = value
                        self._as[f"optimizer/{name}/{key}"] = name, value.shape == shapes[name]
        return tensors

    def parted(self) -> dict[str, Parted]:
        """The same with how each lies in the whole model; all ranks call it together."""
        applied = self.applied
        found = {}
        for name, tensor in self.tensors().items():
            of, alike = self._as.get(name, (name.partition("/")[2], True))
            where = applied.where[of]
            each = parted(tensor, where.cut if alike else None, where.pipes, applied.places)
            found[name] = each.among(*self.team)
        return found

    def own(self) -> dict[str, torch.Tensor]:
        """Tensors that this rank alone has, by names of its own; it writes them itself."""
        return {}

    def lacking(self, index: Index) -> list[str]:
        """What of `own` a checkpoint does not have, in words."""
        return []

    def take(self, reader: Reader, index: Index) -> None:
        """Read `own`, once `tensors` are filled."""

    def restored(self, progress: Progress) -> None:
        """Take over tensors that were loaded in place, and go on from there."""
        self.applied.copy_masters()
        self.progress = progress


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state as it is before the first step, all zero.

    A step of rate 0 of one of torch's on gradients of 1 makes every tensor and moves no parameter;
    a few parameters at a time, since all these gradients would lie beside the real ones.
    """
    if isinstance(optimizer, RuleOptimizer):
        optimizer.begin()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    given: list[torch.Tensor] = []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        given.append(parameter)
        if parameter is parameters[-1] or sum(each.nbytes for each in given) >= _AT_ONCE_BYTES:
            optimizer.step()
            for each in given:
                each.grad = None
            given.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def average_buffers(applied: Applied, world: World) -> None:
    """Make the weights' buffers equal on all ranks: the mean of float ones, the maximum of ints."""
    places = applied.places
    if world.group is None:
        return
    by_pipes: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for slot in sorted(applied.buffers, key=lambda slot: slot.name):
        by_pipes.setdefault(applied.where[slot.name].pipes, []).append(slot.tensor)
    for pipes, tensors in sorted(by_pipes.items(), key=lambda each: each[0]):
        groups = [places.data, places.shared.get(pipes)]
        held_by = applied.grid.degrees.data * len(pipes)
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        others = [tensor for tensor in tensors if not tensor.is_floating_point()]
        for members, dtype, op in (
            (floats, torch.float64, dist.ReduceOp.SUM),
            (others, torch.int64, dist.ReduceOp.MAX),
        ):
            if not members or held_by == 1:
                continue
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in members])
            for group in groups:
                if group is not None:
                    applied.traffic.all_reduce(flat, group, op)
            if op == dist.ReduceOp.SUM:
                flat /= held_by
            parts = torch.split(flat, [tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
