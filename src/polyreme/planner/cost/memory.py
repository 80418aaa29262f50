"""Memory of a device by cause. Storage is exact; what lives during a step is predicted.

Exact, as storage sizes just before gradients are cleared: parameters, gradients, optimizer.
Predicted for the backward pass, where a step peaks: activations, logits, buffers, slack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from itertools import pairwise

import msgspec

from ...graph.layer import LayerGraph
from ...plan.ir import LayerPlan, Precision, Workload, data_layout
from ...profile.record import Profile
from ..draft import Draft, Strategy
from ..shapes import LayerShapes, read_shapes

SCALAR_BYTES = 4  # a step count is float32 whatever the precision
SLACK_SHARE = 0.05  # of what is allocated anew in each step; assumed: rounding, fragments


class Widths(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per element: master weights (also gradients and states) and what layers compute in."""

    master: int
    compute: int


WIDTHS: Mapping[Precision, Widths] = {
    "fp32": Widths(master=4, compute=4),
    "bf16": Widths(master=4, compute=2),
    "fp64": Widths(master=8, compute=8),
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


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of parameters that are gathered and reduced together.

    `gathered` whole with padding; of the trainable ones `reduced` with padding, `trained` without,
    `largest` is the largest. `loose` counts trainable elements that stay whole on every device.
    """

    gathered: int
    reduced: int
    trained: int
    largest: int
    loose: int
    parts: int


def storage(
    graph: LayerGraph,
    layer_plans: Mapping[str, LayerPlan],
    workload: Workload,
    device: int,
) -> Storage:
    """Parameters, gradients and optimizer states of a device, to the byte."""
    memory = Memory(graph, workload)
    total = Storage()
    for layer in graph.layers:
        layer_plan = layer_plans[layer.name]
        layout = data_layout(layer_plan.split)
        assert layout is not None, "only data splits can be priced"
        strategy = Strategy(replica=layout.replica, shard=layout.shard, level=layer_plan.level)
        total += memory.layer_storage(layer.name, strategy, layout.coordinates(device)[1])
    return total


class Memory:
    """Memory of one model under any draft; remembers what equal layers need."""

    def __init__(self, graph: LayerGraph, workload: Workload) -> None:
        self.graph = graph
        self.workload = workload
        self.shapes = read_shapes(graph)
        self.widths = WIDTHS[workload.precision]
        self._units = _tied_units(graph)
        self._buffer_bytes = sum(shapes.buffer_bytes for shapes in self.shapes.values())
        self._store = functools.cache(self._stored)
        self._unit = functools.cache(_count)

    def layer_storage(self, name: str, strategy: Strategy, shard_index: int) -> Storage:
        """Bytes of one layer on the devices at an index of the shard axis."""
        return self._store(self.shapes[name], strategy.parts, min(shard_index, strategy.parts - 1))

    def storage(self, draft: Draft, shard_index: int) -> Storage:
        """Parameters, gradients and optimizer states of a device, to the byte."""
        total = Storage()
        for name, strategy in draft.strategies.items():
            total += self.layer_storage(name, strategy, shard_index)
        return total

    def units(self, draft: Draft) -> tuple[tuple[Strategy, Unit], ...]:
        """What is gathered and reduced together, in the graph's order."""
        return tuple(
            (strategy := draft.strategies[names[0]], self._unit(shapes, strategy.parts))
            for names, shapes in self._shaped_units
        )

    @functools.cached_property
    def _shaped_units(self) -> tuple[tuple[tuple[str, ...], tuple[LayerShapes, ...]], ...]:
        return tuple((names, tuple(self.shapes[name] for name in names)) for names in self._units)

    def _stored(self, shapes: LayerShapes, parts: int, index: int) -> Storage:
        wide = self.widths
        copy = wide.compute if wide.compute != wide.master else 0
        parameters = gradients = optimizer = 0
        for param in shapes.params:
            if parts > 1 and not param.special:
                held, local = param.padded_elements(parts), param.local_elements(parts, index)
                parameters += held * wide.master
            else:
                held = local = param.n_elements
                parameters += held * (wide.master + (0 if param.special else copy))
            if param.trainable:
                gradients += held * wide.master
                optimizer += local * wide.master * self.workload.optimizer_states
                optimizer += SCALAR_BYTES * self.workload.optimizer_scalars
        return Storage(parameters=parameters, gradients=gradients, optimizer=optimizer)

    def causes(self, draft: Draft, profile: Profile, shard_index: int) -> dict[str, int]:
        """Peak bytes by cause of the devices at an index of the shard axis."""
        held = self.storage(draft, shard_index)
        activations = self._activation_bytes(draft, profile)
        logits = self._logits_bytes(draft.microbatch)
        buffers = self._moving_bytes(draft) + self._buffer_bytes
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

    def layer_bytes(self, name: str, draft: Draft, profile: Profile) -> int:
        """What one layer alone takes on the fullest device: states and saved tensors."""
        held = self.layer_storage(name, draft.strategies[name], 0)
        times = profile.layers[self.graph.layer(name).kind]
        recompute = draft.strategies[name].recompute
        saved = times.recompute_bytes_per_sample if recompute else times.saved_bytes_per_sample
        states = held.parameters + held.gradients + held.optimizer
        return states + saved * draft.microbatch

    def _activation_bytes(self, draft: Draft, profile: Profile) -> int:
        """Saved tensors of all layers, and of the one that is being recomputed."""
        kept = again = 0
        for layer in self.graph.layers:
            times = profile.layers[layer.kind]
            if draft.strategies[layer.name].recompute:
                kept += times.recompute_bytes_per_sample
                again = max(again, times.saved_bytes_per_sample)
            else:
                kept += times.saved_bytes_per_sample
        return (kept + again) * draft.microbatch

    def _logits_bytes(self, microbatch: int) -> int:
        """Logits and what the loss makes of them: log-probabilities and two gradients, wide."""
        name, _, output = self.graph.output.rpartition(".")
        elements = math.prod(self.graph.layer(name).outputs[output].shape) * microbatch
        return elements * (self.widths.compute + 3 * self.widths.master)

    def _moving_bytes(self, draft: Draft) -> int:
        """Gathered parameters, and gradients that are not yet reduced or added."""
        wide = self.widths
        kept = accumulated = fresh = reducing = 0
        gathered = []
        passing = [0]
        for strategy, unit in self.units(draft):
            fresh = max(fresh, unit.largest * wide.compute)
            if strategy.parts == 1:
                continue
            gathered.append(unit.gathered * wide.compute)
            out = unit.reduced // unit.parts
            backward = unit.trained * wide.compute + (unit.reduced + out) * wide.master
            reducing = max(reducing, backward)
            if strategy.level == "params":
                passing.append(gathered[-1])
            else:
                kept += gathered[-1]
            if strategy.level == "optimizer" and draft.microbatches > 1:
                accumulated += unit.trained * wide.master
        two_passing = max(first + second for first, second in pairwise([*passing, 0]))
        return kept + two_passing + max(gathered, default=0) + accumulated + max(reducing, fresh)


def _count(shapes: tuple[LayerShapes, ...], parts: int) -> Unit:
    gathered = reduced = trained = largest = loose = 0
    for param in (param for layer in shapes for param in layer.params):
        if param.trainable:
            largest = max(largest, param.n_elements)
        if parts == 1 or param.special:
            loose += param.n_elements * param.trainable
            continue
        padded = param.padded_elements(parts) * parts
        gathered += padded
        if param.trainable:
            reduced += padded
            trained += param.n_elements
    return Unit(
        gathered=gathered,
        reduced=reduced,
        trained=trained,
        largest=largest,
        loose=loose,
        parts=parts,
    )


def _tied_units(graph: LayerGraph) -> tuple[tuple[str, ...], ...]:
    """Names of layers that share parameters, else each alone; in the order of their first."""
    owner = {
        whole: layer.name
        for layer in graph.layers
        for whole in layer.params.values()
        if whole not in layer.ties
    }
    home: dict[str, str] = {}
    units: dict[str, list[str]] = {}
    for layer in graph.layers:
        homes = {home[owner[whole]] for whole in layer.ties if owner.get(whole) in home}
        first, *others = [name for name in units if name in homes] or [layer.name]
        units.setdefault(first, []).append(layer.name)
        for other in others:
            units[first] += units.pop(other)
        home.update(dict.fromkeys(units[first], first))
    return tuple(tuple(names) for names in units.values())
