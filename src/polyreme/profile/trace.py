"""What autograd keeps of one layer's pass, found by playing it without data.

Layers run on fake tensors of the host (recurrent ones on real ones), where attention keeps what
the fused kernels of accelerators keep (inputs, output, one number a row), not the square matrix of
the plain formula. With dropout the host takes the plain formula, and accelerators do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cluster.accelerator import HOST_TYPE
from ..graph.layer import Layer, LayerGraph
from ..sample import TensorSpec
from .regions import Regions, storage

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one layer saves by itself (bytes), and which of its ends it saves too."""

    inside: int
    in_regions: int  # bytes of what is inside that tensor parts divide
    read: int  # bytes of what is inside that regions read
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    reads: tuple[bool, ...]  # which of the inputs regions read
    passed: tuple[int | None, ...]  # for each output, the input whose storage it is
    learns: tuple[bool, ...]  # which outputs carry a gradient
    output_bytes: tuple[int, ...]  # of their storages
    strides: tuple[tuple[int, ...], ...]  # of outputs


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An input of a layer: of a sample, how it lies in memory, whether it carries a gradient."""

    spec: TensorSpec
    strides: tuple[int, ...] | None  # with that of the batch; None: contiguous
    learns: bool


@dataclass(frozen=True, kw_only=True)
class Played:
    """How layers are played: samples, precision, fused attention."""

    batch: int
    precision: str
    fused: bool


class Stand:
    """The first of so many parts of a layer, ready to be played."""

    def __init__(self, graph: LayerGraph, layer: Layer, degree: int) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.nn import RNNBase

        from ..graph.cut import OnePart
        from ..graph.cut_module import cut_module

        self._module = graph.build(layer.name)
        self._plan = graph.tensor_plan(layer.name)
        if self._plan is not None:
            cut_module(self._module, self._plan, OnePart(degree=degree))
        # Fused recurrences save a workspace whose size fake tensors do not tell.
        real = any(isinstance(part, RNNBase) for part in self._module.modules())
        self._mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)

    def trace(self, inputs: Sequence[Argument], how: Played) -> Trace:
        """One forward pass."""
        with (
            self._mode or nullcontext(),
            _fused_attention() if how.fused else nullcontext(),
        ):
            return _play(self._module, Regions(self._plan), inputs, how)


def _play(
    module: torch.nn.Module, regions: Regions, inputs: Sequence[Argument], how: Played
) -> Trace:
    """One forward pass of a batch, its weights stood in for by fake ones of the host."""
    import torch

    weights: dict[str, torch.Tensor] = {}
    for name, weight in module.named_parameters():
        dtype = _weight_dtype(module.get_submodule(name.rpartition(".")[0]), weight, how.precision)
        weights[name] = torch.empty(weight.shape, dtype=dtype, device=HOST_TYPE)
        weights[name].requires_grad_(weight.requires_grad)
    for name, buffer in module.named_buffers():
        weights[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=HOST_TYPE)
    arguments = [_filled(each, how) for each in inputs]
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

    return Trace(
        inside=n_bytes(inside),
        in_regions=n_bytes(inside & regions.inside),
        read=n_bytes(inside & regions.read),
        inputs=tuple(each in kept for each in ins),
        outputs=tuple(each in kept for each in outs),
        reads=tuple(each in regions.read for each in ins),
        passed=tuple(ins.index(each) if each in ins else None for each in outs),
        learns=tuple(output.requires_grad for output in outputs),
        output_bytes=tuple(output.untyped_storage().nbytes() for output in outputs),
        strides=tuple(output.stride() for output in outputs),
    )


def _filled(argument: Argument, how: Played) -> torch.Tensor:
    """A tensor of zeros that lies as the argument does: what is a view of it depends on that."""
    import torch

    shape, dtype = (how.batch, *argument.spec.shape), tensor_dtype(argument.spec, how.precision)
    if argument.strides is None:
        filled = torch.zeros(shape, dtype=dtype, device=HOST_TYPE)
    else:
        filled = torch.empty_strided(shape, argument.strides, dtype=dtype, device=HOST_TYPE)
        filled.zero_()
    return filled.requires_grad_(argument.learns)


def _weight_dtype(owner: torch.nn.Module, weight: torch.Tensor, precision: str) -> torch.dtype:
    """The dtype of a weight as the runtime holds it: those of batch norms stay wide."""
    from torch.nn.modules.batchnorm import _BatchNorm

    wide = weight.dim() == 0 or isinstance(owner, _BatchNorm)
    if not weight.is_floating_point() or (precision == "bf16" and wide):
        return weight.dtype
    return compute_dtype(precision)


def _fused_attention() -> AbstractContextManager[Any]:
    """Attention as fused kernels keep it: of dropout a seed, of a learned bias the bias.

    With either the host takes the plain formula.
    """
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
            if func is attention and isinstance(kwargs.get("attn_mask"), torch.Tensor):
                kwargs["attn_mask"] = kwargs["attn_mask"].detach()
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
