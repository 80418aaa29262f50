"""The data axes of a stage: replicas, and shards of its state by level.

Layers are made one after another (on meta, then on the device, filled, wrapped, sharded), so that
no more than one of them is whole at a time; their values do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...errors import ConfigError, Violation
from ...graph.layer import LayerGraph
from ...plan.ir import DataLayout, Leaf, Level, Plan, data_layout
from ..buckets import Buckets, Replicated
from ..mesh import World
from ..reduction import reduce_unused, sum_gradients, watch
from ..stage import Body, Slot, Stage
from ..timing import TimedAllGather, TimedReduceScatter, Traffic

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


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
    parameters: tuple[Sharded, ...]
    reduce_scatter: TimedReduceScatter


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A stage laid over the data axes.

    `parameters` and `buffers` (those that belong to the model's weights) are in graph order, by
    whole-model name. `masters` gives the float32 (float64) tensor behind each parameter, a
    DTensor where it is sharded; `buckets` holds the trainable ones that are not.
    """

    stage: Stage
    layout: DataLayout
    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    buckets: Buckets
    units: tuple[Unit, ...]
    frozen: dict[str, torch.Tensor]
    traffic: Traffic
    dtype: torch.dtype

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """Master tensor of each parameter by name, in graph order."""
        known = dict(self.frozen)
        known |= {parameter.name: parameter.master for parameter in self.buckets.parameters}
        return {slot.name: known.get(slot.name, slot.tensor) for slot in self.parameters}

    @property
    def trainable(self) -> list[Replicated | Sharded]:
        """Trainable parameters, replicated ones first."""
        sharded = [parameter for unit in self.units for parameter in unit.parameters]
        return [*self.buckets.parameters, *sharded]

    def copy_masters(self) -> None:
        """Bring the working copies of replicated parameters up to date with their masters."""
        stale = [p for p in self.buckets.parameters if p.working is not p.master]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([p.working for p in stale], [p.master for p in stale])

    def begin_microbatch(self, *, last: bool) -> None:
        """Say whether the next backward pass is the last of the step."""
        if last:
            self.buckets.expect_last()
        for unit in self.units:
            if unit.level == "optimizer":
                unit.module.set_requires_gradient_sync(last, recurse=False)
            elif self.layout.replica > 1:
                unit.module.set_requires_all_reduce(last, recurse=False)
                unit.reduce_scatter.replicas_follow = last
            if unit.level != "params":
                unit.module.set_reshard_after_backward(last, recurse=False)

    def reshard(self) -> None:
        """Give up gathered parameters; needed after passes without a backward."""
        for unit in self.units:
            unit.module.reshard()


def layout_of(plan: Plan) -> DataLayout:
    """Replicas and shards of a plan whose layers all agree on them.

    Raises ConfigError for a plan that this runtime cannot play: other axes, uneven parts, layers
    that differ in their devices, or more than one stage.
    """
    layouts = {name: data_layout(layer.split) for name, layer in plan.layer_plans.items()}
    first = next(iter(layouts.values()))
    violations = [
        Violation(
            path=f"layer_plans.{name}.split",
            value=str(plan.layer_plans[name].split),
            rule="must split over replicas and shards alone, as every other layer",
            legal="an even split over replica and shard, the same for all layers",
        )
        for name, layout in layouts.items()
        if layout is None or layout != first
    ]
    if len(plan.stages) != 1:
        violations.append(
            Violation(
                path="stages", value=len(plan.stages), rule="must be one stage", legal="1 stage"
            )
        )
    if violations or first is None:
        raise ConfigError(violations)
    return first


def alone(plan: Plan) -> Plan:
    """The same on one device: what a worker computes of an algorithm whose workers are replicas.

    Raises ConfigError where replicas are split: a worker's parameters are one vector.
    """
    layout = layout_of(plan)
    if layout.shard > 1:
        rule = "splits replicas, and this algorithm takes each replica's parameters as one vector"
        legal = "1 (or plain training: every step, mean, dense)"
        raise ConfigError(
            [Violation(path="parallel.shard", value=layout.shard, rule=rule, legal=legal)]
        )
    layers = {
        name: msgspec.structs.replace(layer, split=Leaf(0), level="none")
        for name, layer in plan.layer_plans.items()
    }
    return msgspec.structs.replace(plan, layer_plans=layers)


def apply(
    graph: LayerGraph,
    plan: Plan,
    world: World,
    *,
    seed: int = 0,
    compile_layers: bool = False,
) -> Applied:
    """Make the plan's stage on this process. All processes call it together."""
    return _Maker(graph, plan, world, seed, compile_layers).make()


class _Maker:
    """What the making of a stage gathers on its way."""

    def __init__(
        self, graph: LayerGraph, plan: Plan, world: World, seed: int, compile_layers: bool
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.world = world
        self.seed = seed
        self.compile_layers = compile_layers
        self.layout = layout_of(plan)
        assert len(self.layout.devices) == world.n_ranks, "one process per device of the plan"
        self.dtype = _DTYPES[plan.precision]
        self.traffic = Traffic(world.record)
        self.mesh: Any = None
        if self.layout.shard > 1:
            mesh = world.mesh(self.layout)
            self.mesh = mesh if self.layout.replica > 1 else mesh["shard"]
        self.bodies: dict[str, Body] = {}
        self.parameters: dict[str, Slot] = {}
        self.buffers: dict[str, Slot] = {}
        self.replicated: dict[str, Replicated] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self.units: list[Unit] = []

    def make(self) -> Applied:
        for names in tied_groups(self.graph):
            for name in names:
                self._make_layer(name)
            slots = [slot for slot in self.parameters.values() if slot.layer in names]
            level = self.plan.layer_plans[names[0]].level
            if level == "none" or self.mesh is None:
                self._replicate(slots)
            else:
                self._shard(names, slots, level)
        order = [layer.name for layer in self.graph.layers]
        stage = Stage(self.graph, {name: self.bodies[name] for name in order}, self.dtype)
        position = {name: index for index, name in enumerate(order)}
        parameters = sorted(self.parameters.values(), key=lambda slot: position[slot.layer])
        buckets = Buckets(
            [self.replicated[slot.name] for slot in parameters if slot.name in self.replicated],
            bucket_bytes=self.plan.bucket_bytes,
            overlap=self.plan.overlap,
            world=self.world,
            traffic=self.traffic,
        )
        if self.units:
            # The root's own unit is empty: it runs FSDP2's hooks over the layers' units.
            kept = {p for p in stage.parameters() if not isinstance(p.data, DTensor)}
            fully_shard(stage, mesh=self.mesh, reshard_after_forward=False, ignored_params=kept)
        return Applied(
            stage=stage,
            layout=self.layout,
            parameters=tuple(parameters),
            buffers=tuple(sorted(self.buffers.values(), key=lambda slot: position[slot.layer])),
            buckets=buckets,
            units=tuple(self.units),
            frozen=self.frozen,
            traffic=self.traffic,
            dtype=self.dtype,
        )

    def _make_layer(self, name: str) -> None:
        layer = self.graph.layer(name)
        module = self.graph.build(name)
        module.to_empty(device=self.world.device)
        self.graph.initialise(name, module, self.seed)
        if self.dtype == torch.float64:
            module.to(torch.float64)
        for own, parameter in _by_identity(module.named_parameters(remove_duplicate=False)):
            whole = layer.params[own[0]]
            places = tuple(_place(module, each) for each in own)
            if whole in self.parameters:
                assert whole in layer.ties, f"{whole} is in two layers but not tied"
                owner = self.parameters[whole]
                tied = Slot(name=whole, layer=owner.layer, places=(*owner.places, *places))
                tied.put(owner.tensor)  # type: ignore[arg-type]
                self.parameters[whole] = tied
            else:
                self.parameters[whole] = Slot(name=whole, layer=name, places=places)
                assert isinstance(parameter, nn.Parameter)
        for own_name, _ in module.named_buffers():
            if own_name in layer.params:
                whole = layer.params[own_name]
                place = _place(module, own_name)
                self.buffers[whole] = Slot(name=whole, layer=name, places=(place,))
        if self.compile_layers:
            module.compile()
        self.bodies[name] = Body(module, recompute=self.plan.layer_plans[name].recompute)

    def _replicate(self, slots: Iterable[Slot]) -> None:
        """Keep whole parameters; under bfloat16 compute with copies of them."""
        for slot in slots:
            master = slot.tensor
            assert isinstance(master, nn.Parameter)
            working = master
            if self.dtype == torch.bfloat16 and not _stays_wide(slot):
                working = nn.Parameter(master.to(self.dtype), requires_grad=master.requires_grad)
                slot.put(working)
            if master.requires_grad:
                self.replicated[slot.name] = Replicated(
                    name=slot.name, master=master, working=working
                )
            else:
                self.frozen[slot.name] = master

    def _shard(self, names: list[str], slots: list[Slot], level: Level) -> None:
        bodies = [self.bodies[name] for name in names]
        wide = [slot for slot in slots if _stays_wide(slot)]
        self._replicate(wide)
        sharded = [slot for slot in slots if not _stays_wide(slot)]
        if not sharded:
            return
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if self.dtype == torch.bfloat16
            else MixedPrecisionPolicy()
        )
        # The last layer's parameters are needed again as soon as its forward pass is over.
        ends = names[-1] == self.graph.layers[-1].name
        whole: Any = bodies if len(bodies) > 1 else bodies[0]
        fully_shard(
            whole,
            mesh=self.mesh,
            reshard_after_forward=level == "params" and not ends,
            mp_policy=policy,
            ignored_params={slot.tensor for slot in wide},  # type: ignore[misc]
        )
        module: Any = bodies[0]
        sum_gradients(module)
        reduce_unused(module)
        if all(_only_looks_up(self.bodies[name], slots) for name in names):
            module.set_unshard_in_backward(False)
        module.set_custom_all_gather(TimedAllGather(self.traffic))
        reduce_scatter = TimedReduceScatter(self.traffic, self.layout.replica)
        module.set_custom_reduce_scatter(reduce_scatter)
        if self.layout.replica > 1:
            module.set_all_reduce_hook(reduce_scatter.after_all_reduce)
        trainable = tuple(Sharded(slot=slot) for slot in sharded if slot.tensor.requires_grad)
        for parameter in trainable:
            self.bodies[parameter.slot.layer].call_before_first(watch(parameter))
        self.units.append(
            Unit(module=module, level=level, parameters=trainable, reduce_scatter=reduce_scatter)
        )


def tied_groups(graph: LayerGraph) -> list[list[str]]:
    """Layer names in graph order, each with the later layers that share parameters with it."""
    owner: dict[str, int] = {}
    groups: list[list[str]] = []
    for layer in graph.layers:
        shared = sorted({owner[name] for name in layer.ties if name in owner})
        if shared:
            home = shared[0]
            for other in shared[1:]:
                groups[home] += groups[other]
                groups[other] = []
                owner |= {name: home for name, group in owner.items() if group == other}
            groups[home].append(layer.name)
        else:
            home = len(groups)
            groups.append([layer.name])
        owner |= {name: home for name in layer.params.values() if name not in owner}
    return [group for group in groups if group]


def _by_identity(named: Iterable[tuple[str, Any]]) -> Iterable[tuple[list[str], Any]]:
    names: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return names.values()


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _stays_wide(slot: Slot) -> bool:
    """Whether a parameter keeps float32 under bfloat16.

    Batch norm's statistics are float32 and its operators want weights of the same dtype; a
    parameter without dimensions costs nothing and does not widen its results.
    """
    owner = slot.places[0][0]
    return isinstance(owner, nn.modules.batchnorm._BatchNorm) or slot.tensor.dim() == 0


def _only_looks_up(body: Body, slots: Iterable[Slot]) -> bool:
    """Whether the backward pass of the layer reads no parameter: all are tables of embeddings."""
    owners = [module for slot in slots for module, _ in slot.places]
    return not body.recompute and all(isinstance(owner, nn.Embedding) for owner in owners)
