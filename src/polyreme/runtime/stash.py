"""Weights kept in versions, for orders that update a stage after each microbatch.

A forward pass reads the newest version, its backward pass the same one; the update is made on the
newest. Source: Narayanan et al. 2019 (PipeDream), section 3.3, weight stashing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ..plan.ir import Action
    from .applied import Applied

_Version = Mapping[str, nn.Parameter]


class Stash:
    """Versions of the weights of this process's stage; `step` updates masters by their `grad`.

    Gradients of a microbatch count as a batch of their own, as large as the mean of the step's.
    An update whose gradient is not finite is left out, by all who share it.
    """

    def __init__(self, applied: Applied) -> None:
        assert len(applied.stage.chunks) == 1, "one stage a process"
        assert not applied.units, "weights are whole"
        self._applied = applied
        self._slots = {slot.name: slot for slot in applied.parameters}
        self._newest: _Version = {}
        self._read: dict[int, _Version] = {}
        self._n_microbatches = 0
        self.step: Callable[[], None] = lambda: None

    def begin(self, n_microbatches: int) -> None:
        """Start a step with the weights as they are."""
        self._n_microbatches = n_microbatches
        self._renew()

    def forward(self, action: Action) -> None:
        """The stage holds the newest version: note that this microbatch reads it."""
        self._read[action.microbatch] = self._newest

    def update(self, action: Action) -> None:
        """Take the gradients of a microbatch, of all who share the batch, to the masters."""
        applied = self._applied
        version = self._read.pop(action.microbatch)
        for parameter in applied.buckets.parameters:
            leaf = version[parameter.name]
            master = parameter.master
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            parameter.grad, leaf.grad = gradient.to(master.dtype), None
            parameter.used = True
        self._sum()
        applied.joint()
        gradients = [parameter.grad for parameter in applied.buckets.parameters]
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if finite:
            for parameter in applied.buckets.parameters:
                parameter.master.grad = parameter.grad * self._n_microbatches
            self.step()
            for parameter in applied.buckets.parameters:
                parameter.master.grad = None
        self._renew()

    def rest(self) -> None:
        """Leave the stage with its own parameters, up to date."""
        applied = self._applied
        for parameter in applied.buckets.parameters:
            self._slots[parameter.name].put(parameter.working)
        applied.copy_masters()
        self._newest = {}
        assert not self._read, "each microbatch came back"

    def _sum(self) -> None:
        group = self._applied.places.data
        if group is None:
            return
        gradients = [parameter.grad for parameter in self._applied.buckets.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._applied.traffic.all_reduce(flat, group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _renew(self) -> None:
        """Make a version of the masters as they are, for forward passes to come."""
        newest = {}
        for parameter in self._applied.buckets.parameters:
            values = parameter.master.detach().to(parameter.working.dtype, copy=True)
            newest[parameter.name] = nn.Parameter(values)
            self._slots[parameter.name].put(newest[parameter.name])
        self._newest = newest
