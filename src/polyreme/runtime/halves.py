"""Backward passes in two halves: of inputs, and of the weights of matrix products and tables.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_OF_EMBEDDING = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_Later = tuple[torch.Tensor, Callable[[], torch.Tensor]]  # a weight, and how to get its gradient


class Halves:
    """Keeps gradients of weights for later; `may_wait` are the ids of those that can."""

    def __init__(self, may_wait: Container[int]) -> None:
        self._mode = _Watching(self, may_wait)
        self._kept: dict[Any, list[_Later]] = {}
        self._leaving: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forward passes in here can be halved on their way back."""
        with self._mode:
            yield

    @contextmanager
    def leaving(self, key: Any) -> Iterator[None]:
        """Backward passes in here leave weights under this key (None: they do them at once)."""
        self._leaving = key
        if key is not None:
            self._kept[key] = []
        yield
        self._leaving = None

    def later(self, weight: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> Any:
        """The gradient of a weight, or None where it is left for later."""
        if self._leaving is None:
            return gradient()
        self._kept[self._leaving].append((weight, gradient))
        return None

    def play(self, key: Any) -> None:
        """The weight half that was left under this key."""
        sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for weight, gradient in self._kept.pop(key):
            before = sums.get(id(weight))
            found = gradient()
            sums[id(weight)] = weight, found if before is None else before[1] + found
        if sums:
            weights, gradients = zip(*sums.values(), strict=True)
            torch.autograd.backward(weights, gradients)


class _Watching(TorchFunctionMode):
    """Puts functions that can be halved in the place of torch's."""

    def __init__(self, halves: Halves, may_wait: Container[int]) -> None:
        super().__init__()
        self._halves, self._may_wait = halves, may_wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func is F.linear and self._waits(_argument(args, kwargs, 1, "weight")):
                bias = _argument(args, kwargs, 2, "bias")
                x, weight = (
                    _argument(args, kwargs, 0, "input"),
                    _argument(args, kwargs, 1, "weight"),
                )
                return _apply(_Linear, x, weight, bias, self._halves)
            if func is torch.addmm and len(args) == 3 and not kwargs and self._waits(args[2]):
                return _apply(_Addmm, *args, self._halves)
            if func is F.embedding and self._waits(_argument(args, kwargs, 1, "weight")):
                ids, weight, padding, max_norm, _, by_frequency, sparse = (
                    _argument(args, kwargs, at, name) for at, name in enumerate(_OF_EMBEDDING)
                )
                if max_norm is None and not by_frequency and not sparse:
                    return _apply(_Embedding, ids, weight, padding, self._halves)
        return func(*args, **kwargs)

    def _waits(self, weight: Any) -> bool:
        return id(weight) in self._may_wait and weight.requires_grad


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


class _Linear(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, halves: Halves) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.halves = halves
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        (dy,) = gradients
        rows, columns = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dw = ctx.halves.later(weight, lambda: rows.T @ columns)
        db = None
        if bias is not None and bias.requires_grad:
            db = ctx.halves.later(bias, lambda: rows.sum(0))
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, dw, db, None


class _Addmm(torch.autograd.Function):
    """b + x W."""

    @staticmethod
    def forward(ctx: Any, bias: Any, x: Any, weight: Any, halves: Halves) -> Any:
        ctx.save_for_backward(bias, x, weight)
        ctx.halves = halves
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        bias, x, weight = ctx.saved_tensors
        (dy,) = gradients
        dw = ctx.halves.later(weight, lambda: x.T @ dy)
        db = None
        if bias.requires_grad:
            db = ctx.halves.later(bias, lambda: dy.sum(0))
        dx = dy @ weight.T if ctx.needs_input_grad[1] else None
        return db, dx, dw, None


class _Embedding(torch.autograd.Function):
    """Rows of a table; that of `padding` gets no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Any, weight: Any, padding: int | None, halves: Halves) -> Any:
        ctx.save_for_backward(ids, weight)
        ctx.halves, ctx.padding = halves, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ids, weight = ctx.saved_tensors
        (dy,) = gradients

        def gradient() -> torch.Tensor:
            rows = dy.reshape(-1, dy.shape[-1])
            found = torch.zeros_like(weight).index_add_(0, ids.reshape(-1), rows)
            if ctx.padding is not None:
                found[ctx.padding] = 0
            return found

        return None, ctx.halves.later(weight, gradient), None, None
