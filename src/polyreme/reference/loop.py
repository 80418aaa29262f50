"""The plain loop: every microbatch of a step one after another, torch's loss and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from ..data.order import Order

if TYPE_CHECKING:
    from ..algo.rule import Rule
    from ..algo.train import Train
    from ..data.order import Ordering
    from ..data.source import Source
    from .model import Plain

_NO_LOSS = -100


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Into how many parts a plan cuts the samples of a step: replicas, shards, microbatches."""

    replica: int
    shard: int
    microbatches: int


class Reference:
    """Trains a plain model in this process, a step at a time.

    `gradients` and then `update` make a step; between the two, `grad` holds the mean gradients
    over all labels that carry loss, before clipping.
    """

    def __init__(
        self,
        model: Plain,
        *,
        source: Source,
        order: Ordering,
        cut: Cut,
        train: Train,
        rule: Rule,
        labels: str,
        fields: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model.to(device=device, dtype=dtype)
        self._source, self._order, self._cut = source, order, cut
        self._labels, self._fields = labels, fields
        self._dtype, self._device = dtype, device
        self._clip_norm = train.clip_norm
        self._schedule = train.schedule
        self._n_steps = train.steps if train.steps is not None else order.n_steps(train.epochs or 0)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = rule.optimizer(self._parameters)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters, and nothing else, by whole-model name; a tied one under each of its names."""
        return {
            name: tensor
            for name, tensor in self._model.named().items()
            if isinstance(tensor, torch.nn.Parameter)
        }

    def gradients(self, step: int) -> tuple[float, float]:
        """Set the gradients of a step counted from 0; its mean loss and the labels that carry it.

        The samples of the step are run microbatch by microbatch as the plan cuts them.
        """
        self._optimizer.zero_grad(set_to_none=True)
        batches = list(self._microbatches(step))
        weight = sum(int((labels != _NO_LOSS).sum()) for _, labels in batches)
        n_labels = sum(labels.numel() for _, labels in batches)
        loss = 0.0
        for fields, labels in batches:
            logits = self._model(fields)
            total = F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                labels.reshape(-1),
                ignore_index=_NO_LOSS,
                reduction="sum",
            )
            # Norms of the library round to float32 in a float64 model too, on the way back as
            # well: only gradients of the same scale round alike. The mean is taken afterwards.
            (total / n_labels).backward()  # type: ignore[no-untyped-call]
            loss += total.item() / weight
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= n_labels / weight
        return loss, float(weight)

    def update(self, step: int) -> None:
        """Clip the gradients of the step and update the parameters by them."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        factor = self._schedule.factor(step, self._n_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()

    def _microbatches(self, step: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for worker, indices in enumerate(self._by_worker(step)):
            epoch = self._order.epoch(step, worker, self._cut.replica)
            for own in np.array_split(indices, self._cut.shard):
                for part in np.array_split(own, self._cut.microbatches):
                    if len(part):
                        read = self._source.train(part, epoch)
                        fields = {name: self._moved(read[name]) for name in self._fields}
                        yield fields, read[self._labels].to(self._device)

    def _by_worker(self, step: int) -> list[np.ndarray]:
        """Sample numbers of the step: a worker's own, or its part of the global batch."""
        n = self._cut.replica
        if isinstance(self._order, Order):
            return np.array_split(self._order.batch(step), n)
        return [self._order.local(step, worker, n) for worker in range(n)]

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(device=self._device, dtype=dtype)
