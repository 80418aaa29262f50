"""Where tensor parts meet: autograd functions over their group.

Axes: B samples, T tokens, D hidden. Names say what the forward pass does; its gradient does the
opposite: a sum becomes a copy, a gathering a dealing out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd import Function

from ....graph.tensor import token_interval
from .part import Tp

if TYPE_CHECKING:
    from torch.distributed import Work

_F = TypeVar("_F", bound=Callable[..., Any])


class Enter(Function):
    """Hand a tensor that all parts hold to a region; sums its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        """As it is."""
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum over parts."""
        total = grad.clone(memory_format=torch.contiguous_format)  # others may read this gradient
        ctx.tp.traffic.all_reduce(total, ctx.tp.group, alike=False)
        return total, None


class Leave(Function):
    """Sum what a region's parts give, in place: the tensor must be new, and no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        """The sum over parts."""
        ctx.mark_dirty(x)
        tp.traffic.all_reduce(x, tp.group, alike=False)
        return x

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it is."""
        return grad, None


class Gather(Function):
    """Hand all parts' tokens [B, T / parts, D] to a region as [B, T, D]; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_tokens: int, tp: Tp) -> torch.Tensor:
        """All tokens."""
        ctx.tp = tp
        return gather_tokens(x, n_tokens, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """This part's tokens of the sum."""
        return sum_tokens(grad, ctx.tp), None, None


class LeaveTokens(Function):
    """Sum what a region's parts give [B, T, D]; each keeps its tokens [B, T / parts, D]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        """This part's tokens of the sum."""
        ctx.tp, ctx.n_tokens = tp, x.shape[1]
        return sum_tokens(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """All tokens."""
        return gather_tokens(grad, ctx.n_tokens, ctx.tp), None


class Whole(Function):
    """All parts' tokens, for what every part computes alike: nothing is to be summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_tokens: int, tp: Tp) -> torch.Tensor:
        """All tokens."""
        ctx.tp = tp
        return gather_tokens(x, n_tokens, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """This part's tokens."""
        return own_tokens(grad, ctx.tp).contiguous(), None, None


class Deal(Function):
    """This part's tokens of what every part computed alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        """This part's tokens."""
        ctx.tp, ctx.n_tokens = tp, x.shape[1]
        # Of one sample they lie in a row: as a view they would keep all tokens alive.
        return own_tokens(x, tp).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """All tokens."""
        return gather_tokens(grad, ctx.n_tokens, ctx.tp), None


def uncompiled(function: _F) -> _F:
    """The function, which a compiler calls as it is: it sees no collectives."""
    disable: Any = torch.compiler.disable
    return cast("_F", disable(function))


def enter(x: torch.Tensor, n_tokens: int | None, tp: Tp) -> torch.Tensor:
    """What a region reads of a hidden; `n_tokens` is the whole's length."""
    if not tp.sp:
        return _apply(Enter, x, tp)
    assert n_tokens is not None, "a region that splits tokens must know how many there are"
    return _apply(Gather, x, n_tokens, tp)


def leave(x: torch.Tensor, tp: Tp) -> torch.Tensor:
    """The hidden that a region's parts give together; `x` must be new, and no view."""
    return _apply(LeaveTokens if tp.sp else Leave, x, tp)


def whole(x: torch.Tensor, n_tokens: int, tp: Tp) -> torch.Tensor:
    """All tokens, for what every part computes alike."""
    return _apply(Whole, x, n_tokens, tp)


def deal(x: torch.Tensor, tp: Tp) -> torch.Tensor:
    """This part's tokens of what every part computed alike."""
    return _apply(Deal, x, tp)


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """Where parts of split tokens meet in a layer that arranges all of them in its own way."""

    n_tokens: int
    tp: Tp

    @uncompiled
    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens [B, T, D]; sums their gradient over parts."""
        return enter(own, self.n_tokens, self.tp)

    @uncompiled
    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """This part's tokens of the sum over parts."""
        return leave(partial, self.tp)


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    out: torch.Tensor = function.apply(*arguments)
    return out


def own_tokens(x: torch.Tensor, tp: Tp) -> torch.Tensor:
    """A view of this part's tokens, along dim 1."""
    start, stop = token_interval(x.shape[1], tp.degree, tp.rank)
    return x[:, start:stop]


def gather_tokens(x: torch.Tensor, n_tokens: int, tp: Tp) -> torch.Tensor:
    """All parts' tokens; shorter parts travel as long as the longest."""
    spans = [token_interval(n_tokens, tp.degree, rank) for rank in range(tp.degree)]
    n_each = [stop - start for start, stop in spans]
    own = n_each[tp.rank]
    assert x.shape[1] == own, f"{x.shape[1]} tokens, and this part's of {n_tokens} are {own}"
    sent = _lengthened(x, n_each[0])
    parts = sent.new_empty((tp.degree, *sent.shape))
    tp.traffic.all_gather(parts, sent, tp.group)
    if n_each[0] == n_each[-1]:
        return parts.transpose(0, 1).flatten(1, 2)
    return torch.cat([part[:, :n] for part, n in zip(parts, n_each, strict=True)], 1)


def sum_tokens(x: torch.Tensor, tp: Tp) -> torch.Tensor:
    """This part's tokens of the sum over parts."""
    total, parts, n_own = _dealt_out(x, tp)
    tp.traffic.reduce_scatter(total, parts, tp.group)
    return total[:, :n_own].contiguous()


def begin_sum_of_tokens(x: torch.Tensor, tp: Tp) -> tuple[torch.Tensor, Work]:
    """The same, which is there when the work has been waited for."""
    total, parts, n_own = _dealt_out(x, tp)
    return total[:, :n_own], tp.traffic.start_reduce_scatter(total, parts, tp.group)


def _dealt_out(x: torch.Tensor, tp: Tp) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Room for this part's tokens, all tokens by part, and how many this part has."""
    spans = [token_interval(x.shape[1], tp.degree, rank) for rank in range(tp.degree)]
    longest = spans[0][1]
    parts = torch.stack([_lengthened(x[:, start:stop], longest) for start, stop in spans])
    start, stop = spans[tp.rank]
    return parts.new_empty(parts.shape[1:]), parts, stop - start


def _lengthened(x: torch.Tensor, n_tokens: int) -> torch.Tensor:
    missing = n_tokens - x.shape[1]
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))], 1)
