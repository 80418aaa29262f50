"""The loss and the best class of scores whose classes lie on several parts.

Axes: N labels, C classes of all parts, L classes of this part with padding. Source: Shoeybi et
al. 2019 (Megatron-LM), section 3: only sums of N numbers travel, never the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from ....graph.cut import vocabulary_interval
from ....graph.loss import IGNORE_LABEL
from ....graph.loss import cross_entropy as whole_loss
from .part import Tp


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, n_classes: int, tp: Tp
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy in nats and the number of labels that carry loss, on every part.

    `logits` [..., L] of this part; the rest as in `graph.loss.cross_entropy`. Padding takes no
    part and has no gradient. A label that is no class makes the sum NaN.
    """
    if tp.degree == 1:
        return whole_loss(logits, labels)
    flat = labels.reshape(-1)
    function: Any = _CrossEntropy
    total = function.apply(logits.reshape(-1, logits.shape[-1]), flat, n_classes, tp)
    return total, (flat != IGNORE_LABEL).sum()


@dataclass(frozen=True, kw_only=True)
class SplitLoss:
    """Scores logits of a vocabulary of `n_classes` whose classes lie on several parts."""

    n_classes: int
    tp: Tp

    @property
    def classifies(self) -> bool:
        """Classes have scores."""
        return True

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss, and how many labels carry it."""
        return cross_entropy(logits, labels, self.n_classes, self.tp)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The class of the largest score."""
        return argmax(logits, self.n_classes, self.tp)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NL: torch.Tensor, labels_N: torch.Tensor, n_classes: int, tp: Tp
    ) -> torch.Tensor:
        start, stop, _ = vocabulary_interval(n_classes, tp.degree, tp.rank)
        n_own = stop - start
        wide = _widened(logits_NL[:, :n_own])
        largest_N = _largest(wide)
        tp.traffic.all_reduce(largest_N, tp.group, dist.ReduceOp.MAX, alike=False)
        own_N, at_N = _places(labels_N, start, stop)
        exponents = (wide - largest_N[:, None]).exp().sum(1)
        aimed = wide.new_zeros(labels_N.shape)
        if n_own:
            aimed = wide.gather(1, at_N[:, None])[:, 0].masked_fill(~own_N, 0)
        sums_2N = torch.stack([exponents, aimed])
        tp.traffic.all_reduce(sums_2N, tp.group, alike=False)
        log_sum_N = sums_2N[0].log() + largest_N
        ctx.save_for_backward(logits_NL, labels_N, log_sum_N)
        ctx.interval = (start, stop)
        losses_N = log_sum_N - sums_2N[1]
        known = (labels_N >= 0) & (labels_N < n_classes)
        losses_N = losses_N.masked_fill(~known, torch.nan)
        return losses_N.masked_fill(labels_N == IGNORE_LABEL, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NL, labels_N, log_sum_N = ctx.saved_tensors
        start, stop = ctx.interval
        n_own = stop - start
        grad_NL = torch.zeros_like(logits_NL)
        if n_own:
            own_N, at_N = _places(labels_N, start, stop)
            wide = (_widened(logits_NL[:, :n_own]) - log_sum_N[:, None]).exp()
            wide.scatter_add_(1, at_N[:, None], -own_N.to(wide.dtype)[:, None])
            wide.mul_((grad * (labels_N != IGNORE_LABEL))[:, None])
            grad_NL[:, :n_own] = wide
        return grad_NL, None, None, None


def argmax(logits: torch.Tensor, n_classes: int, tp: Tp) -> torch.Tensor:
    """The class of the largest score (the first of equals) [...], on every part.

    `logits` [..., L] of this part; a row that holds NaN gives `n_classes`, which is no class.
    """
    if tp.degree == 1:
        return logits.argmax(-1)
    start, stop, _ = vocabulary_interval(n_classes, tp.degree, tp.rank)
    own = _widened(logits[..., : stop - start])
    largest = _largest(own)
    everywhere = largest.clone()
    tp.traffic.all_reduce(everywhere, tp.group, dist.ReduceOp.MAX, alike=False)
    # The smallest index is found as the largest of negative ones.
    found = torch.full_like(largest, -n_classes, dtype=torch.int64)
    if stop > start:
        first = -(own.argmax(-1) + start)
        found = torch.where(largest == everywhere, first, found)
    tp.traffic.all_reduce(found, tp.group, dist.ReduceOp.MAX, alike=False)
    return -found


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _largest(wide: torch.Tensor) -> torch.Tensor:
    """Over the last dim; -inf where a part has padding alone."""
    if wide.shape[-1] == 0:
        return wide.new_full(wide.shape[:-1], -torch.inf)
    return wide.amax(-1)


def _places(labels_N: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a label is of this part, and where (0 if it is not)."""
    own_N = (labels_N >= start) & (labels_N < stop)
    return own_N, (labels_N - start).masked_fill(~own_N, 0)
