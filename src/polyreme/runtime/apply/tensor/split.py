"""A whole layer's module made into one tensor part of it, in place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....graph.cut import Cut
from ....graph.cut_module import cut_module
from ....graph.tensor import Region, TensorPlan
from .beside import enter_beside, products
from .meet import Arranged, deal, enter, leave, own_tokens, uncompiled, whole
from .part import Tp
from .stream import Stream, drops


def split(module: nn.Module, plan: TensorPlan, tp: Tp) -> dict[str, Cut]:
    """Cut a layer's module to this part; the cut of each parameter and weight buffer by name.

    The module is whole, with its values (or on meta). Parameters stay `nn.Parameter`s, and one
    object where they were one. Parts must be given the same host generator state (see `Stream`).
    """
    cuts = cut_module(module, plan, tp, functools.partial(_left, tp=tp, stream=None))
    if tp.degree == 1:
        return cuts
    for region in plan.regions:
        _meet(module, plan, region, tp)
    if tp.sp:
        _split_tokens(module, plan, tp)
    return cuts


def _meet(module: nn.Module, plan: TensorPlan, region: Region, tp: Tp) -> None:
    entry = module.get_submodule(region.entry)
    linears = [] if region.arranged and tp.sp else products(module, plan, region.entry)
    # With tokens split the whole layer has numbers of its own already.
    stream = Stream(tp.rank) if region.exit and not tp.sp and drops(entry) else None
    names = list(inspect.signature(entry.forward).parameters)
    reads = [
        (names[0] if read.argument is None else read.argument, read.n_tokens)
        for read in region.reads
    ]

    def before(entry: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = list(args), dict(kwargs)
        for name, n_tokens in reads:
            at = names.index(name)
            given = kwargs[name] if name in kwargs else args[at]
            entered = enter_beside(given, n_tokens, tp, linears)
            if entered is None:
                entered = enter(given, n_tokens, tp)
            if name in kwargs:
                kwargs[name] = entered
            else:
                args[at] = entered
        if stream is not None:
            (stream.enter(_device(args, kwargs)) if entry.training else stream.skip())
        return tuple(args), kwargs

    arranged = region.arranged and tp.sp
    if not arranged:
        entry.register_forward_pre_hook(uncompiled(before), with_kwargs=True)
    if region.exit is not None:
        row: Any = module.get_submodule(region.exit)
        part = _product if arranged else functools.partial(_row, tp=tp, stream=stream)
        row.forward = functools.partial(part, row)


def _row(row: Any, x: torch.Tensor, *, tp: Tp, stream: Stream | None) -> torch.Tensor:
    """What all parts' features give together, the bias added once."""
    total = _left(_product(row, x), tp, stream)
    return total if row.bias is None else total + row.bias


def _product(row: Any, x: torch.Tensor) -> torch.Tensor:
    """What this part's features give."""
    weight = row.weight
    return F.linear(x, weight) if isinstance(row, nn.Linear) else torch.matmul(x, weight)


@uncompiled
def _left(x: torch.Tensor, tp: Tp, stream: Stream | None) -> torch.Tensor:
    total = leave(x, tp)
    if stream is not None:
        stream.leave()
    return total


def _split_tokens(module: nn.Module, plan: TensorPlan, tp: Tp) -> None:
    for path in plan.sequence:
        module.get_submodule(path).n_tokens = plan.n_tokens  # type: ignore[assignment]
    for path in plan.positions:
        module.get_submodule(path).register_forward_pre_hook(_own_positions(tp))
    if any(region.arranged for region in plan.regions):
        assert plan.n_tokens is not None
        module.meeting = Arranged(n_tokens=plan.n_tokens, tp=tp)  # type: ignore[assignment]
    if plan.whole in ("in", "both"):
        assert plan.n_tokens is not None
        module.register_forward_pre_hook(_gathered(plan.n_tokens, tp))
    if plan.whole in ("out", "both"):
        module.register_forward_hook(_dealt(tp))
    if plan.whole is None and drops(module):
        stream = Stream(tp.rank)
        module.register_forward_pre_hook(_own_numbers(stream))
        module.register_forward_hook(_all_numbers(stream))
        for path in plan.alike:
            child = module.get_submodule(path)
            child.register_forward_pre_hook(_other_numbers(stream))
            child.register_forward_hook(_other_numbers(stream))


def _own_positions(tp: Tp) -> Callable[..., Any]:
    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (own_tokens(args[0], tp), *args[1:])

    return before


def _gathered(n_tokens: int, tp: Tp) -> Callable[..., Any]:
    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (whole(args[0], n_tokens, tp), *args[1:])

    return uncompiled(before)


def _dealt(tp: Tp) -> Callable[..., Any]:
    def after(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return deal(out, tp)

    return uncompiled(after)


def _own_numbers(stream: Stream) -> Callable[..., Any]:
    def before(module: nn.Module, args: Any) -> None:
        (stream.enter(_device(args, {})) if module.training else stream.skip())

    return uncompiled(before)


def _all_numbers(stream: Stream) -> Callable[..., Any]:
    def after(_: nn.Module, __: Any, ___: Any) -> None:
        stream.leave()

    return uncompiled(after)


def _other_numbers(stream: Stream) -> Callable[..., Any]:
    def at(*_: Any) -> None:
        stream.swap()

    return uncompiled(at)


def _device(args: Any, kwargs: Any) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next(tensors).device
