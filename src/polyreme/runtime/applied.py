"""Stages laid over devices: what a process holds of the model, and how it lies in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..plan.grid import Grid
from ..plan.ir import Action, Level
from .apply.tensor import Cut
from .buckets import Buckets, Replicated
from .joint import Joint
from .places import Places
from .stage import Slot, Stage
from .timing import TimedReduceScatter, Traffic


@dataclass(kw_only=True)
class Sharded:
    """A trainable parameter that FSDP2 splits over the shard axis."""

    slot: Slot
    used: bool = False

    @property
    def name(self) -> str:
        """Its name in the whole model."""
        return self.slot.name

    @property
    def master(self) -> torch.Tensor:
        """The local part, a DTensor (valid outside forward and backward passes)."""
        return self.slot.tensor


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What FSDP2 gathers and reduces at once: a layer, or layers tied to each other."""

    module: Any  # FSDPModule
    level: Level
    layers: tuple[str, ...]
    parameters: tuple[Sharded, ...]
    reduce_scatter: TimedReduceScatter


Form = tuple[torch.dtype, tuple[int, ...]]  # of a sample
Trainable = Replicated | Sharded


@dataclass(frozen=True, kw_only=True)
class Where:
    """How a tensor of this process lies in the whole model.

    `cut` is its part of a tensor that is split (None: whole); `pipes` the pipeline ranks that hold
    it.
    """

    cut: Cut | None
    pipes: tuple[int, ...]


class Loss(Protocol):
    """Scores logits of which each tensor part holds some."""

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss, and how many labels carry it."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The highest of all."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The stages of one process, laid over its devices.

    `parameters` and `buffers` (those that belong to the model's weights) are in graph order, by
    whole-model name. `masters` gives the float32 (float64) tensor behind each parameter, a
    DTensor where it is sharded; `buckets` holds the trainable ones that are not. `layers_of` gives
    the layers here that use a parameter, `names` are those of all trainable parameters of the
    model, wherever they are. `orders` holds the actions of each pipeline rank, `forms` the
    forms of what each stage gives, `slices` where those of tokens begin and end, if there are.
    `gathers` are scattered buckets in the order in which they are gathered.
    `loss` is set where logits are split. With `fills` a data rank without samples must run fillers.
    """

    stage: Stage
    places: Places
    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    where: Mapping[str, Where]
    layers_of: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]
    buckets: Buckets
    units: tuple[Unit, ...]
    joint: Joint
    frozen: dict[str, torch.Tensor]
    orders: tuple[tuple[Action, ...], ...]
    forms: tuple[tuple[Form, ...], ...]
    slices: tuple[tuple[int, int], ...]
    traffic: Traffic
    dtype: torch.dtype
    device: torch.device
    loss: Loss | None = None
    fills: bool = False
    gathers: tuple[int, ...] = ()

    @property
    def grid(self) -> Grid:
        """The plan's devices."""
        return self.places.grid

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """Master tensor of each parameter by name, in graph order, up to date."""
        self.buckets.settle()
        known = dict(self.frozen)
        known |= {parameter.name: parameter.master for parameter in self.buckets.parameters}
        return {slot.name: known.get(slot.name, slot.tensor) for slot in self.parameters}

    @property
    def trainable(self) -> list[Trainable]:
        """Trainable parameters, replicated ones first."""
        sharded = [parameter for unit in self.units for parameter in unit.parameters]
        return [*self.buckets.parameters, *sharded]

    def counts(self, parameter: Trainable) -> bool:
        """Whether this process's part enters sums over all processes."""
        return self.places.cell.replica == 0 and self.counts_in_replica(parameter)

    def counts_in_replica(self, parameter: Trainable, *, in_stage: bool = False) -> bool:
        """Whether this process's part enters sums over a replica, or over one stage of it.

        What several devices hold is counted on the first of them.
        """
        where, cell = self.where[parameter.name], self.places.cell
        if where.cut is not None and where.cut.copy:
            return False
        if not isinstance(parameter, Sharded) and cell.shard:
            return False
        return in_stage or where.pipes[0] == cell.pipe

    def counts_part(self, parameter: Replicated) -> bool:
        """The same where each data rank has a part of what all of them hold."""
        where = self.where[parameter.name]
        return not (where.cut is not None and where.cut.copy) and (
            where.pipes[0] == self.places.cell.pipe
        )

    def copy_masters(self, which: Iterable[Replicated] | None = None) -> None:
        """Bring the working copies of replicated parameters up to date with their masters."""
        among = self.buckets.parameters if which is None else which
        stale = [p for p in among if p.working is not p.master]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([p.working for p in stale], [p.master for p in stale])

    def begin_backward(self, units: Iterable[Unit], last: Iterable[Unit]) -> None:
        """Say of which units the next backward pass is the last of the step."""
        ending = {id(unit) for unit in last}
        for unit in units:
            is_last = id(unit) in ending
            if unit.level == "optimizer":
                unit.module.set_requires_gradient_sync(is_last, recurse=False)
            elif self.grid.replica > 1:
                unit.module.set_requires_all_reduce(is_last, recurse=False)
                unit.reduce_scatter.replicas_follow = is_last
            if unit.level != "params":
                unit.module.set_reshard_after_backward(is_last, recurse=False)

    def finish(self) -> None:
        """Reduce what is left of the gradients; then those that several parts have a share in."""
        self.buckets.finish()
        self.joint()

    def reshard(self) -> None:
        """Give up gathered parameters; needed after passes without a backward."""
        for unit in self.units:
            unit.module.reshard()
