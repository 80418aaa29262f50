"""Memory of a device by cause. Storage is exact; what lives during a step is predicted.

Exact, as storage sizes just before gradients are cleared: parameters, gradients, optimizer.
Predicted for the backward pass, where a step peaks: activations, logits, buffers, slack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

from ...graph.layer import LayerGraph
from ...plan.grid import even_degrees
from ...plan.ir import OFFLOADED, LayerPlan, Precision, Workload, degree, devices
from ...profile.record import Profile
from ..draft import Draft, Strategy
from ..groups import Classes, Groups
from ..shapes import ParamShape
from .activations import Activations, fixed_bytes, waiting_bytes
from .expert import dealt, shared
from .offload import Fetched, fetched
from .unit import Unit, count_unit, count_units

SCALAR_BYTES = 4  # a step count is float32 whatever the precision
SLACK_SHARE = 0.05  # of what is allocated anew in each step; assumed: rounding, fragments


class Widths(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per element: master weights (also states), what layers compute in, gradients.

    `resident` is what a shard of parameters keeps beside its master to be gathered from; at 0, as
    the runtime has it, the master is cast each time.
    """

    master: int
    compute: int
    gradient: int
    resident: int = 0


WIDTHS: Mapping[Precision, Widths] = {
    "fp32": Widths(master=4, compute=4, gradient=4),
    "bf16": Widths(master=4, compute=2, gradient=4),
    "fp64": Widths(master=8, compute=8, gradient=8),
}


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a device stores between steps, gradients included."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def storage(
    graph: LayerGraph,
    layer_plans: Mapping[str, LayerPlan],
    workload: Workload,
    device: int,
) -> Storage:
    """Parameters, gradients and optimizer states of a device, to the byte."""
    tp = max((degree(each.split, "tp") for each in layer_plans.values()), default=1)
    memory = Memory(graph, workload, tp)
    total = Storage()
    for layer in graph.layers:
        layer_plan = layer_plans[layer.name]
        found = even_degrees(layer_plan.split)
        assert found is not None, "only even splits can be priced"
        place = devices(layer_plan.split).index(device) // (found.tp * found.cp)
        strategy = Strategy(
            replica=found.replica,
            shard=found.shard,
            cp=found.cp,
            tp=found.tp,
            ep=found.ep,
            level=layer_plan.level,
        )
        total += memory.layer_storage(layer.name, strategy, place % found.shard)
    return total


class Memory:
    """Memory of one model under any draft of so many tensor parts.

    `widths` are those of the runtime at the workload's precision, unless others are given.
    """

    def __init__(
        self, graph: LayerGraph, workload: Workload, tp: int = 1, *, widths: Widths | None = None
    ) -> None:
        self.graph = graph
        self.workload = workload
        self.tp = tp
        self.widths = WIDTHS[workload.precision] if widths is None else widths
        self.classes = Classes(graph, tp)
        self.activations = Activations(graph, self.classes)
        self._store = functools.cache(self._stored)
        self.unit = functools.cache(self._unit)
        self._dealt = functools.cache(self._dealt_units)
        self._fetched = functools.cache(self._fetched_by)

    def layer_storage(self, name: str, strategy: Strategy, shard_index: int) -> Storage:
        """Bytes of one layer on the devices at an index of the shard axis."""
        return self._held(self.classes.layer_of[name], strategy, shard_index)

    def storage(self, draft: Draft, shard_index: int) -> Storage:
        """Parameters, gradients and optimizer states of a device, to the byte."""
        return self._storage(self.classes.groups(draft), shard_index)

    def _storage(self, groups: Groups, shard_index: int) -> Storage:
        parameters = gradients = optimizer = 0
        for index, strategy, count in groups.layers:
            held = self._held(index, strategy, shard_index)
            parameters += held.parameters * count
            gradients += held.gradients * count
            optimizer += held.optimizer * count
        return Storage(parameters=parameters, gradients=gradients, optimizer=optimizer)

    def _held(self, index: int, strategy: Strategy, shard_index: int) -> Storage:
        at = min(shard_index, strategy.parts - 1)
        held = self._store(index, strategy.parts, at, strategy.ep)
        if strategy.ep > 1:
            parts = strategy.of_experts.parts
            at = min(shard_index // strategy.degrees.ep_shards, parts - 1)
            held += self._store(index, parts, at, strategy.ep, experts=True)
        if strategy.offload == "none":
            return held
        return msgspec.structs.replace(held, **dict.fromkeys(OFFLOADED[strategy.offload], 0))

    def _stored(
        self, index: int, parts: int, shard_index: int, ep: int, *, experts: bool = False
    ) -> Storage:
        """Of a layer's class: all, or where experts are dealt out, those of a device, or the rest.

        One of so many parts of it.
        """
        wide, params = self.widths, self.classes.layers[index].shapes.params
        if ep > 1:
            params = dealt(params, ep) if experts else shared(params)
        copy = wide.compute if wide.compute != wide.master else 0
        parameters = gradients = optimizer = 0
        for param in params:
            if parts > 1 and not param.special:
                held = param.padded_elements(parts)
                local = param.local_elements(parts, shard_index)
                parameters += held * wide.master
            else:
                held = local = param.n_elements
                parameters += held * (wide.master + (0 if param.special else copy))
            if param.trainable:
                gradients += held * wide.gradient
                optimizer += local * wide.master * self.workload.optimizer_states
                optimizer += SCALAR_BYTES * self.workload.optimizer_scalars
        return Storage(parameters=parameters, gradients=gradients, optimizer=optimizer)

    def causes(
        self, draft: Draft, profile: Profile, shard_index: int, pipe: int = 0
    ) -> dict[str, int]:
        """Peak bytes by cause of the devices at an index of the shard axis, of a pipeline rank.

        The peak is in the last layer's loss or in the backward pass of a layer, whichever takes
        more; the bytes are those of that moment. In a pipeline all stages of the rank hold what
        its order lets them hold at once.
        """
        names = draft.layers_of(pipe)
        groups = self.classes.groups(draft, names if draft.stages else None)
        held = self._storage(groups, shard_index)
        size, cp = draft.microbatch, draft.strategy.cp
        kept, fullest = self.activations(draft, profile, pipe)
        if draft.takes_turns:
            gradients = {
                name: self.layer_storage(name, how, shard_index).gradients
                for name, how in draft.strategies.items()
            }
            kept, fullest = self.activations.in_turn(draft, profile, gradients)
        ends = self._last_in(names)
        logits, gradient = self._loss_bytes(draft.strategy, profile) if ends else (0, 0)
        waiting, moving = self._moving_bytes(groups, draft.microbatches, profile)
        buffer_bytes = sum(
            self.classes.layers[self.classes.layer_of[name]].shapes.buffer_bytes for name in names
        )
        visits = (
            self._fetched(index, how).n_bytes for index, how, _ in groups.layers if how.fetches
        )
        buffer_bytes += max(visits, default=0)
        # Less than nothing is kept where gradients, which come later, will take more.
        logits = max(0, math.ceil(logits * size / cp) + min(0, kept))
        activations, logits, buffers = max(
            (max(0, kept), logits, waiting + buffer_bytes),
            (fullest, math.ceil(gradient * size / cp), moving + buffer_bytes),
            key=sum,
        )
        return {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": activations,
            "logits": logits,
            "buffers": buffers,
            "context": profile.context_bytes,
            "slack": math.ceil(SLACK_SHARE * (activations + logits + buffers)),
        }

    def kept_bytes(self, name: str, strategy: Strategy, microbatches: int) -> int:
        """What a layer's unit holds gathered, or not yet reduced, all through a step."""
        units = self.layer_units(name, strategy)
        return sum(self._kept(unit, strategy, microbatches) for unit in units)

    def layer_units(self, name: str, strategy: Strategy) -> tuple[Unit, ...]:
        """A layer's own parameters; its experts by themselves where they are dealt out."""
        shapes = self.classes.layers[self.classes.layer_of[name]].shapes
        return count_units(shapes.params, strategy, looks_up=shapes.looks_up)

    def _kept(self, unit: Unit, strategy: Strategy, microbatches: int) -> int:
        """Whole gradients less the share of them that is stored: it takes their place."""
        if unit.parts == 1:
            return 0
        wide = self.widths
        if strategy.level == "params":
            return unit.gathered // unit.parts * wide.resident
        kept = unit.gathered * wide.compute
        if strategy.level == "optimizer" and microbatches > 1:
            stored = 0 if strategy.fetches else unit.reduced // unit.parts
            kept += (unit.trained - stored) * wide.gradient
        return kept

    def fetched(self, name: str, strategy: Strategy) -> Fetched:
        """What of a layer comes from its host's memory while it runs."""
        if not strategy.fetches:
            return Fetched()
        return self._fetched(self.classes.layer_of[name], strategy)

    def _fetched_by(self, index: int, strategy: Strategy) -> Fetched:
        return fetched(self.classes.layers[index].shapes, strategy, self.widths)

    def passing_bytes(self, name: str, strategy: Strategy) -> int:
        """What a layer's unit takes while it is gathered for its backward pass, and only then."""
        units = self.layer_units(name, strategy)
        return sum(unit.gathered for unit in units if unit.gathered_again(strategy)) * (
            self.widths.compute
        )

    def reducing_bytes(self, name: str, strategy: Strategy) -> int:
        """What a layer's gradients take when they are reduced, at least."""
        return max(map(self._reducing, self.layer_units(name, strategy)))

    def _reducing(self, unit: Unit) -> int:
        whole = unit.largest * self.widths.compute
        if unit.parts == 1:
            return whole
        both_ends = unit.reduced + unit.reduced // unit.parts
        return max(whole, unit.trained * self.widths.compute + both_ends * self.widths.gradient)

    def loss_bytes(self, strategy: Strategy) -> int:
        """What the backward pass holds of logits, a sample."""
        return self._logits_bytes(strategy)[1]

    def backward_bytes(self, strategy: Strategy, profile: Profile) -> int:
        """The same beside what passes are known to hold."""
        return self._loss_bytes(strategy, profile)[1]

    def _last_in(self, names: Sequence[str]) -> bool:
        return self.graph.output.rpartition(".")[0] in names

    def layer_bytes(self, name: str, draft: Draft, profile: Profile) -> int:
        """What one layer alone takes on the fullest device: states and saved tensors."""
        held = self.layer_storage(name, draft.strategies[name], 0)
        times = profile.layers[self.graph.layer(name).kind]
        saved = waiting_bytes(times, draft.strategies[name], draft.microbatch)
        states = held.parameters + held.gradients + held.optimizer
        return states + saved

    def _loss_bytes(self, strategy: Strategy, profile: Profile) -> tuple[int, int]:
        """Those of logits, where they are not measured: else layers' passes hold the gradient."""
        logits, gradient = self._logits_bytes(strategy)
        name = self.graph.output.rpartition(".")[0]
        times = profile.layers[self.graph.layer(name).kind]
        if times.loss_bytes is not None and strategy.tp == 1:
            logits = times.loss_bytes
        return logits, 0 if times.passing_bytes is not None else gradient

    def _logits_bytes(self, strategy: Strategy) -> tuple[int, int]:
        """In the loss, and in the layers' backward pass; a sample.

        In the loss: logits, log-probabilities and two gradients, the latter in the master's
        width. Afterwards: logits and their gradient.
        """
        name, _, output = self.graph.output.rpartition(".")
        shape = tuple(self.graph.layer(name).outputs[output].shape)
        plan, tp = self.graph.tensor_plan(name), strategy.tp
        if plan is not None:
            shape = plan.output_shape(output, shape, tp, 0, sp=strategy.sp)
        elements = math.prod(shape)
        wide = self.widths
        return elements * (wide.compute + 3 * wide.master), elements * 2 * wide.compute

    def _moving_bytes(self, groups: Groups, microbatches: int, profile: Profile) -> tuple[int, int]:
        """Gathered parameters and gradients not yet reduced or added: in the loss, and in backward.

        In the backward pass two neighbours are gathered, one more is on its way, and one reduced.
        """
        wide = self.widths
        kept = reducing = 0
        passing: dict[tuple[int, Strategy], int] = {}
        for index, strategy, count in groups.units:
            units = self.units(index, strategy)
            kinds = {self.classes.layers[each].kind for each in self.classes.units[index]}
            fixed = (fixed_bytes(profile.layers[kind]) for kind in kinds)
            reducing = max(reducing, *map(self._reducing, units), *fixed)
            if strategy.parts == 1:
                continue
            kept += sum(self._kept(unit, strategy, microbatches) for unit in units) * count
            if strategy.level == "params":
                gathered = (unit.gathered for unit in units if unit.gathered_again(strategy))
                passing[index, strategy] = sum(gathered) * wide.compute
        largest = max(passing.values(), default=0)
        tail = passing.get(groups.tail, 0)
        two_passing = max(
            (passing.get(first, 0) + passing.get(second, 0) for first, second in groups.neighbours),
            default=tail,
        )
        spanning = tail if groups.spans else 0
        return kept + tail, kept + spanning + two_passing + largest + reducing

    def units(self, index: int, strategy: Strategy) -> tuple[Unit, ...]:
        """What a unit of layers gathers and reduces together: all, or its experts apart."""
        if strategy.ep > 1:
            return self._dealt(index, strategy)
        return (self.unit(index, strategy.parts),)

    def _unit(self, index: int, parts: int) -> Unit:
        params, looks_up = self._unit_params(index)
        return count_unit(params, parts, looks_up=looks_up)

    def _dealt_units(self, index: int, strategy: Strategy) -> tuple[Unit, ...]:
        params, looks_up = self._unit_params(index)
        return count_units(params, strategy, looks_up=looks_up)

    def _unit_params(self, index: int) -> tuple[list[ParamShape], bool]:
        shapes = [self.classes.layers[member].shapes for member in self.classes.units[index]]
        params = [param for layer in shapes for param in layer.params]
        return params, all(layer.looks_up for layer in shapes)
