"""Bytes that autograd keeps for the backward pass, found by playing layers without data.

Layers run on fake tensors of the host (recurrent ones on real ones), where attention keeps what
the fused kernels of accelerators keep (inputs, output, one number a row), not the square matrix of
the plain formula. With dropout the host takes the plain formula, and accelerators do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..cluster.accelerator import HOST_TYPE
from ..graph.layer import Layer, LayerGraph
from ..sample import TensorSpec
from .record import FixedBytes, PartBytes
from .regions import Regions, storage

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
_TRACED = (2, 3)  # samples; one sample would let shapes of 1 pass for views


class SavedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per sample of a layer kind: kept for backward, and kept when it is recomputed.

    `again` is what it keeps beside its inputs while it is computed again; `fixed` what of the
    three does not grow with the batch (masks, positions), which they are without; `parts` how
    tensor parts share what is saved.
    """

    saved: int
    recompute: int
    again: int
    fixed: FixedBytes = FixedBytes()
    parts: PartBytes | None = None


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """What one layer saves by itself (bytes), and which of its ends it saves too."""

    inside: int
    fixed: int  # of what is inside, whatever the batch
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    passed: tuple[int | None, ...]  # for each output, the input whose storage it is
    learns: tuple[bool, ...]  # which outputs carry a gradient
    output_bytes: tuple[int, ...]  # of their storages
    in_regions: int  # bytes of what is inside that tensor parts divide
    read: int  # bytes of what is inside that regions read
    reads: tuple[bool, ...]  # which of the inputs regions read
    still: tuple[bool, ...] = ()  # which outputs take no more memory for a larger batch


class _Size(NamedTuple):
    """Bytes of a sample, and bytes whatever the number of samples."""

    sample: int
    fixed: int


def saved_bytes(
    graph: LayerGraph, precision: str, *, fused: bool = True
) -> Mapping[str, SavedBytes]:
    """Saved bytes of each kind, parameters and buffers apart, every storage counted once.

    `fused` says that attention with dropout runs in fused kernels, as it does on accelerators.

    A tensor that several layers save (one's output, the next one's input; an encoder's output) is
    counted at the first; kinds get the mean over their layers, so that the whole model's sum is
    right. Each microbatch is taken to have its own of what does not grow with it.
    """
    traces: dict[tuple[object, ...], _Trace] = {}
    specs = tensor_specs(graph)
    owner: dict[str, str] = {}
    saved_once: set[str] = set()
    kept_once: set[str] = set()
    learned: set[str] = set()
    still: set[str] = set()
    sums: dict[str, list[tuple[_Size, _Size, _Size, PartBytes]]] = {}
    for layer in graph.layers:
        learns = tuple(name in learned for name in layer.inputs)
        key = (layer.kind, learns, *(specs[name].shape for name in layer.inputs))
        if key not in traces:
            with _without_attention_dropout() if fused else nullcontext():
                traces[key] = _trace(
                    graph, layer, [specs[name] for name in layer.inputs], learns, precision
                )
        trace = traces[key]
        sources = [owner.get(name, name) for name in layer.inputs]
        results = [f"{layer.name}.{output}" for output in layer.outputs]
        learned.update(name for name, grad in zip(results, trace.learns, strict=True) if grad)
        for result, source in zip(results, trace.passed, strict=True):
            owner[result] = result if source is None else sources[source]
        still.update(owner[name] for name, same in zip(results, trace.still, strict=True) if same)
        ends = [name for name, kept in zip(sources, trace.inputs, strict=True) if kept]
        read = {name for name, kept in zip(sources, trace.reads, strict=True) if kept} & {*ends}
        ends += [owner[name] for name, kept in zip(results, trace.outputs, strict=True) if kept]
        fresh, again, beside, seen, own = (
            _bytes(names, still, specs, precision)
            for names in (
                {*ends} - saved_once,
                {*sources} - kept_once,
                {*ends} - {*sources},
                read,
                {*ends} - saved_once - read,
            )
        )
        saved_once.update(ends)
        kept_once.update(sources)
        inside = _Size(trace.inside, trace.fixed)
        saved, plan = _sum(inside, fresh), graph.tensor_plan(layer.name)
        parts = PartBytes(
            inside=trace.in_regions,
            between=trace.inside - trace.in_regions - trace.read + own.sample,
            read=trace.read + seen.sample,
        )
        if plan is None or plan.whole is not None:  # every part computes all of it
            parts = PartBytes(read=saved.sample)
        sums.setdefault(layer.kind, []).append((saved, again, _sum(inside, beside), parts))
    return {kind: _of_kind(found) for kind, found in sums.items()}


def _of_kind(found: Sequence[tuple[_Size, _Size, _Size, PartBytes]]) -> SavedBytes:
    """Means over the layers of a kind, and the most that one takes while it is recomputed."""
    saved, recompute = (
        _Size(*(math.ceil(sum(column) / len(found)) for column in zip(*sizes, strict=True)))
        for sizes in ([each[0] for each in found], [each[1] for each in found])
    )
    again = max((each[2] for each in found), key=sum)
    parts = (msgspec.structs.astuple(each[3]) for each in found)
    inside, between, read = (
        math.ceil(sum(column) / len(found)) for column in zip(*parts, strict=True)
    )
    return SavedBytes(
        saved=saved.sample,
        recompute=recompute.sample,
        again=again.sample,
        fixed=FixedBytes(saved=saved.fixed, recompute=recompute.fixed, again=again.fixed),
        parts=PartBytes(inside=inside, between=between, read=read),
    )


def _sum(one: _Size, other: _Size) -> _Size:
    return _Size(one.sample + other.sample, one.fixed + other.fixed)


def _without_attention_dropout() -> AbstractContextManager[Any]:
    """Attention without dropout: all that fused kernels keep of it is a seed."""
    import torch
    from torch.overrides import TorchFunctionMode

    attention = torch.nn.functional.scaled_dot_product_attention

    class Fused(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is attention and "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            return func(*args, **kwargs)

    return Fused()


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


def _bytes(
    names: set[str], still: set[str], specs: Mapping[str, TensorSpec], precision: str
) -> _Size:
    """Bytes of these tensors; of those that stand still, all samples share one."""
    sizes = {
        name: math.prod(specs[name].shape) * tensor_dtype(specs[name], precision).itemsize
        for name in names
    }
    fixed = sum(size for name, size in sizes.items() if name in still)
    return _Size(sum(sizes.values()) - fixed, fixed)


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
    plan = graph.tensor_plan(layer.name)
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        small, large = (
            _play(module, Regions(plan), specs, learns, precision, batch) for batch in _TRACED
        )
    more = _TRACED[1] - _TRACED[0]
    slope = (large.inside - small.inside) / more
    still = zip(small.output_bytes, large.output_bytes, strict=True)
    return replace(
        large,
        inside=math.ceil(slope),
        in_regions=math.ceil((large.in_regions - small.in_regions) / more),
        read=math.ceil((large.read - small.read) / more),
        fixed=max(0, math.ceil(small.inside - slope * _TRACED[0])),
        still=tuple(before == after for before, after in still),
    )


def _play(
    module: torch.nn.Module,
    regions: Regions,
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
        if storage(tensor) not in kept:
            kept[storage(tensor)] = tensor
            regions.saved(tensor)
        return tensor

    with (
        regions.watching(module),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = torch.func.functional_call(module, weights, tuple(arguments))
    outputs = out if isinstance(out, tuple) else (out,)
    ins = [storage(argument) for argument in arguments]
    outs = [storage(output) for output in outputs]
    inside = set(kept) - {storage(weight) for weight in weights.values()} - set(ins) - set(outs)

    def n_bytes(storages: set[int]) -> int:
        return sum(kept[each].untyped_storage().nbytes() for each in storages)

    return _Trace(
        inside=n_bytes(inside),
        fixed=0,
        inputs=tuple(each in kept for each in ins),
        outputs=tuple(each in kept for each in outs),
        passed=tuple(ins.index(each) if each in ins else None for each in outs),
        learns=tuple(output.requires_grad for output in outputs),
        output_bytes=tuple(output.untyped_storage().nbytes() for output in outputs),
        in_regions=n_bytes(inside & regions.inside),
        read=n_bytes(inside & regions.read),
        reads=tuple(each in regions.read for each in ins),
    )
