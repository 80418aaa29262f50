"""Bytes that autograd keeps for the backward pass, found by playing layers without data.

Layers run on fake tensors of the host (recurrent ones on real ones), where attention keeps what
the fused kernels of accelerators keep (inputs, output, one number a row), not the square matrix of
the plain formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ..cluster.accelerator import HOST_TYPE
from ..graph.layer import Layer, LayerGraph
from ..sample import TensorSpec

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
_TRACED = (2, 3)  # samples; one sample would let shapes of 1 pass for views


class SavedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per sample of a layer kind: kept for backward, and kept when it is recomputed."""

    saved: int
    recompute: int


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """What one layer saves by itself (bytes), and which of its ends it saves too."""

    inside: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    passed: tuple[int | None, ...]  # for each output, the input whose storage it is
    learns: tuple[bool, ...]  # which outputs carry a gradient


def saved_bytes(graph: LayerGraph, precision: str) -> Mapping[str, SavedBytes]:
    """Saved bytes of each kind, parameters and buffers apart, every storage counted once.

    A tensor that several layers save (one's output, the next one's input; an encoder's output) is
    counted at the first; kinds get the mean over their layers, so that the whole model's sum is
    right. Memory that does not grow with the batch (masks) is counted as if it did.
    """
    traces: dict[tuple[object, ...], _Trace] = {}
    specs = tensor_specs(graph)
    owner: dict[str, str] = {}
    saved_once: set[str] = set()
    kept_once: set[str] = set()
    learned: set[str] = set()
    sums: dict[str, list[tuple[int, int]]] = {}
    for layer in graph.layers:
        learns = tuple(name in learned for name in layer.inputs)
        key = (layer.kind, learns, *(specs[name].shape for name in layer.inputs))
        if key not in traces:
            traces[key] = _trace(
                graph, layer, [specs[name] for name in layer.inputs], learns, precision
            )
        trace = traces[key]
        sources = [owner.get(name, name) for name in layer.inputs]
        results = [f"{layer.name}.{output}" for output in layer.outputs]
        learned.update(name for name, grad in zip(results, trace.learns, strict=True) if grad)
        for result, source in zip(results, trace.passed, strict=True):
            owner[result] = result if source is None else sources[source]
        ends = [name for name, kept in zip(sources, trace.inputs, strict=True) if kept]
        ends += [owner[name] for name, kept in zip(results, trace.outputs, strict=True) if kept]
        fresh = _bytes(set(ends) - saved_once, specs, precision)
        again = _bytes(set(sources) - kept_once, specs, precision)
        saved_once.update(ends)
        kept_once.update(sources)
        sums.setdefault(layer.kind, []).append((trace.inside + fresh, again))
    return {
        kind: SavedBytes(
            saved=math.ceil(sum(pair[0] for pair in pairs) / len(pairs)),
            recompute=math.ceil(sum(pair[1] for pair in pairs) / len(pairs)),
        )
        for kind, pairs in sums.items()
    }


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that layers compute in."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[precision])
    return dtype


def tensor_dtype(spec: TensorSpec, precision: str) -> torch.dtype:
    """The dtype of a layer's input or output at a precision."""
    import torch

    if spec.dtype == "compute":
        return compute_dtype(precision)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def tensor_specs(graph: LayerGraph) -> dict[str, TensorSpec]:
    """Every tensor of the graph by the name under which layers read it.

    Floating fields of a batch are cast to the dtype that layers compute in.
    """
    specs = {
        f"batch:{name}": TensorSpec(spec.shape) if "float" in spec.dtype else spec
        for name, spec in graph.inputs.items()
    }
    for layer in graph.layers:
        specs.update({f"{layer.name}.{name}": spec for name, spec in layer.outputs.items()})
    return specs


def _bytes(names: set[str], specs: Mapping[str, TensorSpec], precision: str) -> int:
    """Bytes of one sample of these tensors."""
    return sum(
        math.prod(specs[name].shape) * tensor_dtype(specs[name], precision).itemsize
        for name in names
    )


def _trace(
    graph: LayerGraph,
    layer: Layer,
    specs: Sequence[TensorSpec],
    learns: Sequence[bool],
    precision: str,
) -> _Trace:
    """One layer's trace, `inside` per sample; `learns` says which inputs carry a gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn import RNNBase

    module = graph.build(layer.name)
    # Fused recurrences save a workspace whose size fake tensors do not tell.
    real = any(isinstance(part, RNNBase) for part in module.modules())
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        small, large = (_play(module, specs, learns, precision, batch) for batch in _TRACED)
    slope = (large.inside - small.inside) / (_TRACED[1] - _TRACED[0])
    fixed = max(0.0, small.inside - slope * _TRACED[0])
    return replace(large, inside=math.ceil(slope + fixed))


def _play(
    module: torch.nn.Module,
    specs: Sequence[TensorSpec],
    learns: Sequence[bool],
    precision: str,
    batch: int,
) -> _Trace:
    """One forward pass of a batch, its weights stood in for by fake ones of the host."""
    import torch

    weights: dict[str, torch.Tensor] = {}
    for name, weight in module.named_parameters():
        dtype = compute_dtype(precision) if weight.is_floating_point() else weight.dtype
        weights[name] = torch.empty(weight.shape, dtype=dtype, device=HOST_TYPE)
        weights[name].requires_grad_(weight.requires_grad)
    for name, buffer in module.named_buffers():
        weights[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=HOST_TYPE)
    arguments = [
        torch.zeros((batch, *spec.shape), dtype=tensor_dtype(spec, precision), device=HOST_TYPE)
        for spec in specs
    ]
    for argument, grad in zip(arguments, learns, strict=True):
        argument.requires_grad_(grad)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = torch.func.functional_call(module, weights, tuple(arguments))
    outputs = out if isinstance(out, tuple) else (out,)
    ins = [_storage(argument) for argument in arguments]
    outs = [_storage(output) for output in outputs]
    inside = set(kept) - {_storage(weight) for weight in weights.values()} - set(ins) - set(outs)
    return _Trace(
        inside=sum(kept[storage].untyped_storage().nbytes() for storage in inside),
        inputs=tuple(storage in kept for storage in ins),
        outputs=tuple(storage in kept for storage in outs),
        passed=tuple(ins.index(storage) if storage in ins else None for storage in outs),
        learns=tuple(output.requires_grad for output in outputs),
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
