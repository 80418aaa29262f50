"""Stages laid over devices: what a process holds of the model, and how it lies in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph.cut import Cut
from ..graph.layer import Loss
from ..plan.grid import Grid
from ..plan.ir import Action, Level
from .bucket import Replicated
from .buckets import Buckets
from .compiled import Score
from .joint import Joint
from .places import Places
from .stage import Body, Slot, Stage
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
    bodies: tuple[Body, ...]
    level: Level
    layers: tuple[str, ...]
    parameters: tuple[Sharded, ...]
    reduce_scatter: TimedReduceScatter

    @property
    def ran(self) -> bool:
        """Whether it was ever gathered."""
        return any(body.ran for body in self.bodies)


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


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The stages of one process, laid over its devices.

    `parameters` and `buffers` (those that belong to the model's weights) are in graph order, by
    whole-model name. `masters` gives the float32 (float64) tensor behind each parameter, a
    DTensor where it is sharded; `buckets` holds the trainable ones that are not. `layers_of` gives
    the layers here that use a parameter, `names` are those of all trainable parameters of the
    model, wherever they are. `orders` holds the actions of each pipeline rank, `forms` the
    forms of what each stage gives, `slices` where those of tokens begin and end, if there are.
    `gathers` are scattered buckets in the order in which they are gathered; with `prefetch`
    parameters of shards are gathered before they are needed.
    `score` gives the loss in training, maybe compiled; `loss` is set where logits are split, or are
    not scored by cross-entropy. With `fills` a data rank without samples must run fillers.
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
    score: Score
    loss: Loss | None = None
    fills: bool = False
    gathers: tuple[int, ...] = ()
    prefetch: bool = True

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

    def begin_backward(self, units: Sequence[Unit], last: Iterable[Unit]) -> None:
        """Say of which units the next backward pass is, and of which it is the last of the step.

        FSDP2 ends each pass for all units there are: the others must neither reduce zeros nor
        give up what their own pass will need. (One that never ran has nothing to reduce, and
        FSDP2 cannot be told to keep its gradients.)
        """
        present, ending = {id(unit) for unit in units}, {id(unit) for unit in last}
        for unit in self.units:
            is_here, is_last = id(unit) in present, id(unit) in ending
            reduces = is_last if unit.level == "optimizer" else is_here
            reduces = reduces or not unit.ran
            unit.module.set_requires_gradient_sync(reduces, recurse=False)
            if reduces and self.grid.replica > 1:
                unit.module.set_requires_all_reduce(is_last, recurse=False)
                unit.reduce_scatter.replicas_follow = is_last
            reshards = is_here if unit.level == "params" else is_last
            unit.module.set_reshard_after_backward(reshards, recurse=False)
        if self.grid.pp > 1 and self.prefetch:
            self._gather_ahead(units)

    @staticmethod
    def _gather_ahead(units: Sequence[Unit]) -> None:
        """While a unit's backward pass runs, the one before it in the stage is gathered.

        FSDP2 goes by the order of forward passes, and so gathers in vain what is behind where
        several of them come before a backward pass.
        """
        before = [units[0], *units] if units else []  # the first one has nothing before it
        for unit, target in zip(units, before, strict=False):
            unit.module.set_modules_to_backward_prefetch([target.module])

    def finish(self) -> None:
        """Reduce what is left of the gradients; then those that several parts have a share in."""
        self.buckets.finish()
        self.joint()

    def reshard(self) -> None:
        """Give up gathered parameters; needed after passes without a backward."""
        for unit in self.units:
            unit.module.reshard()
