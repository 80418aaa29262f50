"""Shapes of every parameter, read once for each kind of layer from its module on meta."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from ..graph.layer import LayerGraph

if TYPE_CHECKING:
    from torch import nn

    from ..graph.tensor import TensorPlan


class ParamShape(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter that a layer owns.

    A `special` one (without dimensions, or of a batch norm) stays whole on every device and in
    the master's dtype, whatever the level and precision. `own` is its name in the layer's module;
    a `tied` one belongs to an earlier layer. `copies` tensor parts hold the very same of it;
    their gradients are `partial` sums, or are if tokens are split (`partial_sp`). Dim 0 of an
    `expert` one counts experts.
    """

    shape: tuple[int, ...]
    trainable: bool
    special: bool
    own: str = ""
    tied: bool = False
    copies: int = 1
    partial: bool = False
    partial_sp: bool = False
    expert: bool = False

    @property
    def n_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded_rows(self, shard: int) -> int:
        """Rows of dim 0 in each of `shard` equal chunks; the last ones hold padding."""
        return math.ceil(self.shape[0] / shard)

    def padded_elements(self, shard: int) -> int:
        """Elements of one chunk with its padding."""
        return self.padded_rows(shard) * math.prod(self.shape[1:])

    def local_elements(self, shard: int, index: int) -> int:
        """Elements of chunk `index` without padding, as torch.chunk cuts dim 0."""
        rows = self.padded_rows(shard)
        left = max(0, min(rows, self.shape[0] - rows * index))
        return left * math.prod(self.shape[1:])


class LayerShapes(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a layer in the order of its module, `every` one, and its buffers.

    A layer that only `looks_up` has tables of embeddings alone, tied ones counted: unless it is
    recomputed, its backward pass reads no parameter.
    """

    every: tuple[ParamShape, ...]
    buffer_bytes: int
    looks_up: bool

    @property
    def params(self) -> tuple[ParamShape, ...]:
        """Those that the layer owns: tied copies belong to an earlier layer."""
        return tuple(param for param in self.every if not param.tied)


def read_shapes(graph: LayerGraph, tp: int = 1) -> Mapping[str, LayerShapes]:
    """Shapes by layer name, of the first of `tp` tensor parts, which has most.

    Layers of one kind with the same ties share one object.
    """
    known: dict[tuple[str, frozenset[str]], LayerShapes] = {}
    found = {}
    for layer in graph.layers:
        tied = frozenset(own for own, whole in layer.params.items() if whole in layer.ties)
        key = (layer.kind, tied)
        if key not in known:
            plan = graph.tensor_plan(layer.name) if tp > 1 else None
            experts = graph.expert_plan(layer.name)
            routed = () if experts is None else experts.params
            known[key] = _read(graph.build(layer.name), tied, plan, tp, routed)
        found[layer.name] = known[key]
    return found


def _read(
    module: nn.Module,
    tied: frozenset[str],
    plan: TensorPlan | None,
    tp: int,
    routed: Collection[str],
) -> LayerShapes:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    from ..graph.cut import Cut, OnePart, cuts_of

    whole = {own: Cut(shape=tuple(param.shape)) for own, param in module.named_parameters()}
    cuts = whole if plan is None else cuts_of(module, plan, OnePart(degree=tp))
    cuts_sp = whole if plan is None else cuts_of(module, plan, OnePart(degree=tp, sp=True))
    every = tuple(
        ParamShape(
            shape=cuts[own].local_shape,
            trainable=param.requires_grad,
            special=param.dim() == 0
            or isinstance(module.get_submodule(own.rpartition(".")[0]), _BatchNorm),
            own=own,
            tied=own in tied,
            copies=cuts[own].copies,
            partial=cuts[own].partial,
            partial_sp=cuts_sp[own].partial,
            expert=own in routed,
        )
        for own, param in module.named_parameters()
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    owners = [
        module.get_submodule(own.rpartition(".")[0])
        for own, _ in module.named_parameters(remove_duplicate=False)
    ]
    looks_up = all(isinstance(owner, nn.Embedding) for owner in owners)
    return LayerShapes(every=every, buffer_bytes=buffer_bytes, looks_up=looks_up)
