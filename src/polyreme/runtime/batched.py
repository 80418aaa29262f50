"""Gradients of several workers in one pass: one small batch leaves an accelerator idle.

Results are those of one worker after another within rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call, grad_and_value, vmap

from ..algo.vector import Layout
from ..graph.loss import cross_entropy
from .applied import Applied
from .passes import Microbatch


class Batched:
    """The stage as a function of parameters and buffers, mapped over workers.

    Labels, fields and buffers of all workers have the same shapes.
    """

    def __init__(self, applied: Applied, layout: Layout) -> None:
        stage = applied.stage
        self._stage, self._layout = stage, layout
        live = {id(tensor): name for name, tensor in stage.named_parameters()}
        self._parameters = {
            parameter.name: (live[id(parameter.working)], parameter.working.dtype)
            for parameter in applied.buckets.parameters
        }
        buffers = {id(tensor): name for name, tensor in stage.named_buffers()}
        self._buffers = [buffers[id(slot.tensor)] for slot in applied.buffers]
        self._one: Any = grad_and_value(self._loss, has_aux=True)

    def __call__(
        self,
        params: Sequence[torch.Tensor],
        microbatches: Sequence[Microbatch],
        buffers: Sequence[Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
        """Gradients of summed losses, these losses, labels that carry them, buffers after it."""
        stacked = [torch.stack(list(each)) for each in zip(*buffers, strict=True)]
        names = microbatches[0].fields
        fields = {n: torch.stack([each.fields[n] for each in microbatches]) for n in names}
        labels = torch.stack([each.labels for each in microbatches])
        at = torch.stack(list(params))
        # Weights that all workers hold alike multiply all batches at once.
        alike = bool((at == at[0]).all())
        mapped = vmap(self._one, in_dims=(None if alike else 0, 0, 0, 0), randomness="different")
        gradients, (losses, weights) = mapped(
            at[0] if alike else at, dict(zip(self._buffers, stacked, strict=True)), fields, labels
        )
        after = [list(each) for each in zip(*stacked, strict=True)] if stacked else []
        return gradients, losses, weights, after or [[] for _ in params]

    def _loss(
        self,
        params: torch.Tensor,
        buffers: Mapping[str, torch.Tensor],
        fields: Mapping[str, torch.Tensor],
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(buffers)
        for name, tensor in self._layout.views(params).items():
            place, dtype = self._parameters[name]
            given[place] = tensor.to(dtype)
        return cross_entropy(functional_call(self._stage, given, (fields,)), labels)
