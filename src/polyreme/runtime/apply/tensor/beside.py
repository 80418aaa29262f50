"""Gradients of weights beside the sum of gradients over parts, where a region is entered.

Each product of a region that reads what was entered gives the gradient of that at once, and leaves
its weight's: the entry begins the sum over parts, makes the weights' gradients, then waits.

Axes: B samples, T tokens, D hidden. Source: Shoeybi et al. 2019 (Megatron-LM), whose code hides the
same sum behind the gradient of one weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from ....graph.tensor import TensorPlan
from .meet import begin_sum_of_tokens, gather_tokens
from .part import Tp


class Entry:
    """What was entered in one pass, and the products of it whose weights wait for gradients."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self._left: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def waits(self, weight: torch.Tensor) -> bool:
        """Whether it takes the gradient of that weight."""
        return any(each is weight for each in self.weights)

    def leave(self, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Have the gradient of a weight made later: of x times it, which has this gradient."""
        self._left.append((next(i for i, w in enumerate(self.weights) if w is weight), x, grad))

    def gradients(self) -> list[torch.Tensor | None]:
        """Of all weights; None for those that nothing left."""
        found: list[torch.Tensor | None] = [None] * len(self.weights)
        for index, x, grad in self._left:
            rows = grad.reshape(-1, grad.shape[-1])
            own = rows.T @ x.reshape(-1, x.shape[-1])
            before = found[index]
            found[index] = own if before is None else before + own
        self._left.clear()
        return found


class EnterBeside(Function):
    """As `Enter`, or `Gather` where tokens are split."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, n_tokens: int | None, tp: Tp, entry: Entry, *_: torch.Tensor
    ) -> torch.Tensor:
        """What the region reads."""
        ctx.tp, ctx.entry = tp, entry
        if not tp.sp:
            return x.view_as(x)
        assert n_tokens is not None, "a region that splits tokens must know how many there are"
        return gather_tokens(x, n_tokens, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The sum over parts, of this part's tokens where they are split; and of weights."""
        tp: Tp = ctx.tp
        if tp.sp:
            total, work = begin_sum_of_tokens(grad, tp)
        else:
            total = grad.clone(memory_format=torch.contiguous_format)  # others may read this one
            work = tp.traffic.start_sum(total, tp.group)
        of_weights = ctx.entry.gradients()
        work.wait()
        return total, None, None, None, *of_weights


class _Product(Function):
    """x W^T + b, of what was entered."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, entry: Entry
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.entry, ctx.has_bias = weight, entry, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.entry.leave(ctx.weight, x, grad)
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
        return grad @ weight, None, of_bias, None


def products(module: nn.Module, plan: TensorPlan, entry: str) -> list[nn.Linear]:
    """The products of a region that its parts cut by what comes out, made to leave their weights.

    Those that compute in a way of their own are left alone.
    """
    found = []
    inside = {path: child for path, child in module.named_modules() if _is_in(path, entry)}
    for cutting in plan.cuttings:
        child = inside.get(cutting.path)
        if cutting.side != "in" and type(child) is nn.Linear and "forward" not in vars(child):
            child.forward = functools.partial(_linear, child)  # type: ignore[method-assign]
            found.append(child)
    return found


def enter_beside(
    x: torch.Tensor, n_tokens: int | None, tp: Tp, linears: Sequence[nn.Linear]
) -> torch.Tensor | None:
    """As `enter`; None where gradients of weights cannot wait.

    Where nothing is to be learned, where halves of backward passes are told apart (who does that
    sees functions), and where what is entered has no gradient.
    """
    weights = [each.weight for each in linears if each.weight.requires_grad]
    if not (weights and x.requires_grad and torch.is_grad_enabled()) or _watched():
        return None
    function: Any = EnterBeside
    entered: torch.Tensor = function.apply(x, n_tokens, tp, Entry(weights), *weights)
    return entered


def _is_in(path: str, entry: str) -> bool:
    return path == entry or path.startswith(f"{entry}.")


def _linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    # A compiler makes all of a layer's gradients itself.
    if not torch.compiler.is_compiling():
        entry = getattr(x.grad_fn, "entry", None)
        if isinstance(entry, Entry) and entry.waits(linear.weight) and not _watched():
            function: Any = _Product
            out: torch.Tensor = function.apply(x, linear.weight, linear.bias, entry)
            return out
    return F.linear(x, linear.weight, linear.bias)


def _watched() -> bool:
    return bool(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
