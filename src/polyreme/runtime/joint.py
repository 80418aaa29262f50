"""Gradients that several parts of a replica have a share in, summed once a step.

They are of tied weights that lie in several stages, of stages with two copies, and of parameters
that all tensor parts hold whole and use for their own heads or tokens. All who hold one get the
same bits, and so stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .bucket import Replicated
from .timing import Traffic


class Joint:
    """Sums over groups, each in one flat vector, in the order given; the same on all who sum."""

    def __init__(self, parts: Iterable[tuple[Any, Sequence[Any]]], traffic: Traffic) -> None:
        """`parts` holds (group, its parameters in the order of the model)."""
        self._parts = [(group, tuple(members)) for group, members in parts if members]
        self._traffic = traffic

    def __call__(self) -> None:
        """Sum what is there; a parameter that nothing used here gives zeros."""
        for group, members in self._parts:
            gradients = [_gradient(member) for member in members]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._traffic.all_reduce(flat, group, alike=False)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _gradient(member: Any) -> torch.Tensor:
    """The local gradient, which is made where there is none."""
    from torch.distributed.tensor import DTensor

    master = member.master
    if isinstance(member, Replicated):
        if not member.has_grad:
            member.grad = torch.zeros_like(master)
        return member.grad.detach()
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    assert isinstance(master.grad, DTensor)
    return master.grad.to_local()
