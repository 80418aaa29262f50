"""From a plan to the stages of this process: made, split, sharded.

Layers are made one after another (on meta, then on the device, filled, split, wrapped, sharded),
so that no more than one of them is whole at a time; their values do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, Violation
from ..graph.cut import Cut
from ..graph.layer import LayerGraph, Loss
from ..graph.loss import cross_entropy
from ..graph.tensor import token_interval
from ..plan.grid import Grid, grid_of
from ..plan.ir import Action, Leaf, Plan, accumulation_order, axes
from ..plan.ir import Stage as StagePlan
from .applied import Applied, Form, Trainable, Unit, Where
from .apply import data, pipeline
from .apply.tensor import SplitLoss, Tp, split
from .bucket import Replicated
from .buckets import Buckets
from .compiled import Score, compile_layer, compile_loss
from .joint import Joint
from .mesh import World
from .places import Places, take_places
from .stage import Body, Chunk, Slot, Stage, cut
from .timing import Traffic

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def grid_for(plan: Plan) -> Grid:
    """The grid of a plan. Raises ConfigError for one that this runtime cannot play."""
    grid = grid_of(plan)
    dealt = any("ep" in axes(layer.split) for layer in plan.layer_plans.values())
    if grid is None or grid.cp > 1 or dealt:
        rule = "must split all layers alike, over replicas, shards and tensor parts in this order"
        if dealt:
            rule = "deal out experts to several devices, which is planned, but not executable yet"
        legal = "the same degrees for all layers, stages on the same devices or on others"
        if dealt:
            legal = "each layer's experts on every device (parallel.ep = 1)"
        raise ConfigError(
            [Violation(path="layer_plans", value=len(plan.layer_plans), rule=rule, legal=legal)]
        )
    return grid


def alone(plan: Plan) -> Plan:
    """The same on one device: what one process computes that plays all workers."""
    layers = {
        name: msgspec.structs.replace(layer, split=Leaf(0), level="none")
        for name, layer in plan.layer_plans.items()
    }
    stage = StagePlan(layers=tuple(layers), placements=((0,),))
    order = (accumulation_order(plan.microbatches),)
    return msgspec.structs.replace(plan, stages=(stage,), layer_plans=layers, order=order)


def apply(
    graph: LayerGraph,
    plan: Plan,
    world: World,
    *,
    seed: int = 0,
    compile_layers: bool = False,
    apart: bool = False,
) -> Applied:
    """Make the plan's stages on this process. All processes call it together.

    With `apart` replicas have nothing to do with each other.
    """
    return _Maker(graph, plan, world, seed, compile_layers, apart).make()


class _Maker:
    """What the making of stages gathers on its way."""

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        world: World,
        seed: int,
        compile_layers: bool,
        apart: bool,
    ) -> None:
        self.graph, self.plan, self.world = graph, plan, world
        self.seed, self.compile_layers = seed, compile_layers
        grid = grid_for(plan)
        self.holders = pipeline.holders(graph, plan, grid)
        shared = {pipes for pipes in self.holders.values() if len(pipes) > 1}
        self.places = take_places(world, grid, shared, apart=apart)
        grid = self.places.grid
        world.record.lies(self.places.cell.pipe)
        self.dtype = _DTYPES[plan.precision]
        self.traffic = Traffic(world.record)
        self.tp = Tp(
            rank=self.places.cell.tp,
            degree=grid.tp,
            group=self.places.tp,
            traffic=self.traffic,
            sp=any(layer.sp for layer in plan.layer_plans.values()),
        )
        self.stages = cut(graph, [stage.layers for stage in plan.stages])
        self.chunks = {at: self.stages[at] for at in grid.stages_of(self.places.cell.pipe)}
        self.layers = [name for chunk in self.chunks.values() for name in chunk.layers]
        self.bodies: dict[str, Body] = {}
        self.parameters: dict[str, Slot] = {}
        self.buffers: dict[str, Slot] = {}
        self.cuts: dict[str, Cut] = {}
        self.replicated: dict[str, Replicated] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self.units: list[Unit] = []

    def make(self) -> Applied:
        for names in tied_groups(self.graph, self.layers):
            for name in names:
                self._make_layer(name)
            slots = [slot for slot in self.parameters.values() if slot.layer in names]
            level = self.plan.layer_plans[names[0]].level
            mesh = None if level == "none" else self.places.mesh
            sharded = [] if mesh is None else [s for s in slots if not data.stays_wide(s)]
            self._replicate([slot for slot in slots if slot not in sharded])
            if mesh is not None and sharded:
                self.units.append(
                    data.shard(
                        {name: self.bodies[name] for name in names},
                        sharded,
                        level,
                        mesh,
                        dtype=self.dtype,
                        # Those of the last layer are needed again at once.
                        stays=names[-1] == self.graph.layers[-1].name,
                        traffic=self.traffic,
                    )
                )
        bodies = {name: self.bodies[name] for name in self.layers}
        stage = Stage(self.graph, bodies, self.dtype, self.chunks)
        position = {layer.name: at for at, layer in enumerate(self.graph.layers)}
        parameters = sorted(self.parameters.values(), key=lambda slot: position[slot.layer])
        buffers = sorted(self.buffers.values(), key=lambda slot: position[slot.layer])
        where = {
            slot.name: Where(cut=self.cuts.get(slot.name), pipes=self.holders[slot.name])
            for slot in (*parameters, *buffers)
        }
        trainable: dict[str, Trainable] = {p.name: p for u in self.units for p in u.parameters}
        trainable |= self.replicated
        ordered = [trainable[slot.name] for slot in parameters if slot.name in trainable]
        joint = joint_parts(ordered, where, self.places)
        buckets = Buckets(
            [self.replicated[slot.name] for slot in parameters if slot.name in self.replicated],
            bucket_bytes=self.plan.bucket_bytes,
            overlap=self.plan.overlap,
            group=self.places.data,
            traffic=self.traffic,
            decouple=self.plan.decouple,
            joint={parameter.name for _, members in joint for parameter in members},
            brief=self.plan.microbatches == 1 and self.places.grid.pp == 1,
        )
        layers_of = {
            slot.name: tuple(
                name for name in self.layers if slot.name in self.graph.layer(name).params.values()
            )
            for slot in parameters
        }
        stages = [chunk.layers for chunk in self.chunks.values()]
        data.prefetch(self.units, stages, ahead=self.plan.prefetch)
        if self.units:
            # The root's own unit is empty: it runs FSDP2's hooks over the layers' units.
            kept = {p for p in stage.parameters() if not isinstance(p.data, DTensor)}
            fully_shard(
                stage, mesh=self.places.mesh, reshard_after_forward=False, ignored_params=kept
            )
        levels = {self.plan.layer_plans[name].level for name in self.plan.layer_plans}
        loss = self._loss()
        applied = Applied(
            stage=stage,
            places=self.places,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            where=where,
            layers_of=layers_of,
            names=self._names(ordered),
            buckets=buckets,
            units=tuple(self.units),
            joint=Joint(joint, self.traffic),
            frozen=self.frozen,
            orders=self._orders(),
            slices=self._slices(),
            forms=tuple(self._forms(chunk) for chunk in self.stages),
            traffic=self.traffic,
            dtype=self.dtype,
            device=self.world.device,
            score=self._score(loss),
            loss=loss,
            gathers=self._gathers(buckets, layers_of),
            prefetch=self.plan.prefetch,
            fills=(self.places.mesh is not None and bool(levels - {"none"}))
            or (self.tp.degree > 1 and self.places.grid.degrees.data > 1),
        )
        self._share_ties(applied)
        self._settle_before(applied)
        return applied

    def _gathers(
        self, buckets: Buckets, layers_of: Mapping[str, tuple[str, ...]]
    ) -> tuple[int, ...]:
        """By number, what the next forward pass needs first; else as they were reduced."""
        numbers = range(len(buckets.scattered))
        if not self.plan.priority:
            return tuple(numbers)

        def first(number: int) -> int:
            members = buckets.scattered[number].members
            return min(self.layers.index(name) for m in members for name in layers_of[m.name])

        return tuple(sorted(numbers, key=first))

    def _settle_before(self, applied: Applied) -> None:
        """Have layers called when all that they compute with is up to date."""
        for bucket in applied.buckets.scattered:
            users = {layer for member in bucket.members for layer in applied.layers_of[member.name]}
            for name in users:
                self.bodies[name].call_before(bucket.settle)

    def _share_ties(self, applied: Applied) -> None:
        """Give tied weights that lie in several stages the values that they have in the first."""
        tied = {name for layer in self.graph.layers for name in layer.ties}
        for name, master in sorted(applied.masters.items()):
            pipes = applied.where[name].pipes
            if name in tied and len(pipes) > 1:
                local = master.to_local() if isinstance(master, DTensor) else master.detach()
                source = self.places.rank_at(pipe=pipes[0])
                with self.world.record.inside("broadcast", n_ranks=len(pipes)):
                    dist.broadcast(local, source, group=self.places.shared[pipes])
        applied.copy_masters()

    def _slices(self) -> tuple[tuple[int, int], ...]:
        """Where slices of tokens begin and end; none where passes are over all tokens."""
        n = 1 + max(action.token_slice for own in self.plan.order for action in own)
        if n == 1:
            return ()
        n_tokens = self.graph.inputs["input_ids"].shape[0]
        lengths = self.plan.token_slices
        if not lengths:
            return tuple(token_interval(n_tokens, n, at) for at in range(n))
        return tuple(pairwise(accumulate((0, *lengths))))

    def _forms(self, chunk: Chunk) -> tuple[Form, ...]:
        """Of what a stage gives, as this tensor part holds it."""
        found = []
        for value in chunk.gives:
            name, _, output = value.rpartition(".")
            spec, plan = self.graph.layer(name).outputs[output], self.graph.tensor_plan(name)
            shape, tp = tuple(spec.shape), self.tp
            if plan is not None:
                shape = plan.output_shape(output, shape, tp.degree, tp.rank, sp=tp.sp)
            dtype = self.dtype if spec.dtype == "compute" else getattr(torch, spec.dtype)
            found.append((dtype, shape))
        return tuple(found)

    def _loss(self) -> Loss | None:
        """The model's own, or how logits of which each tensor part holds some are scored."""
        if self.tp.degree == 1:
            return self.graph.loss
        plan = self.graph.tensor_plan(self.graph.output.rpartition(".")[0])
        assert plan is not None, "the plan was checked"
        n_classes = plan.vocabulary
        return None if n_classes is None else SplitLoss(n_classes=n_classes, tp=self.tp)

    def _score(self, loss: Loss | None) -> Score:
        """The loss in training; what tensor parts exchange in it is not compiled."""
        score: Score = cross_entropy if loss is None else loss
        return compile_loss(score) if self.compile_layers and self.tp.degree == 1 else score

    def _orders(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of each pipeline rank, of its device at this process's place."""
        ranks = [self.places.rank_at(pipe=pipe) for pipe in range(self.places.grid.pp)]
        return tuple(self.plan.order[rank] for rank in ranks)

    def _names(self, ours: Sequence[Trainable]) -> tuple[str, ...]:
        """Trainable parameters of the whole model in its order."""
        if self.places.grid.pp == 1:
            return tuple(parameter.name for parameter in ours)
        known = {parameter.name: None for parameter in ours}
        found: dict[str, None] = {}
        for layer in self.graph.layers:
            if layer.name in self.bodies:
                found |= {n: None for n in layer.params.values() if n in known}
                continue
            for own, parameter in self.graph.build(layer.name).named_parameters():
                if parameter.requires_grad:
                    found[layer.params[own]] = None
        return tuple(found)

    def _make_layer(self, name: str) -> None:
        layer = self.graph.layer(name)
        module = self.graph.build(name)
        module.to_empty(device=self.world.device)
        self.graph.initialise(name, module, self.seed)
        if self.dtype == torch.float64:
            module.to(torch.float64)
        if self.tp.degree > 1:
            plan = self.graph.tensor_plan(name)
            assert plan is not None, "the plan was checked"
            cuts = split(module, plan, self.tp)
            self.cuts |= {layer.params[own]: found for own, found in cuts.items()}
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
            compile_layer(module)
        self.bodies[name] = Body(module, recompute=self.plan.layer_plans[name].recompute)

    def _replicate(self, slots: Iterable[Slot]) -> None:
        trainable, frozen = data.replicate(slots, self.dtype)
        self.replicated |= trainable
        self.frozen |= frozen


def joint_parts(
    parameters: Sequence[Trainable], where: Mapping[str, Where], places: Places
) -> list[tuple[Any, list[Trainable]]]:
    """Who is summed with whom: tensor parts that hold the same first, then holders of ties."""
    by_copies: dict[int, list[Trainable]] = {}
    by_pipes: dict[tuple[int, ...], list[Trainable]] = {}
    for parameter in sorted(parameters, key=lambda each: each.name):
        found = where[parameter.name]
        if found.cut is not None and found.cut.partial and found.cut.copies > 1:
            by_copies.setdefault(found.cut.copies, []).append(parameter)
        if len(found.pipes) > 1:
            by_pipes.setdefault(found.pipes, []).append(parameter)
    groups = {**places.copies, places.grid.tp: places.tp}
    return [
        *((groups[copies], by_copies[copies]) for copies in sorted(by_copies)),
        *((places.shared[pipes], by_pipes[pipes]) for pipes in sorted(by_pipes)),
    ]


def tied_groups(graph: LayerGraph, held: Iterable[str]) -> list[list[str]]:
    """Layers that are held here in graph order, each with the later ones that share parameters."""
    here = set(held)
    owner: dict[str, int] = {}
    groups: list[list[str]] = []
    for layer in (layer for layer in graph.layers if layer.name in here):
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
