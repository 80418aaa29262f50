"""The training loss: a sum and the weight it stands for, so that any split adds up to one mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_LABEL = -100


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy in nats and the number of labels that carry loss.

    `logits` [..., classes], `labels` [...] int64 with -100 where there is no loss. Computed in
    float32 or the logits' own wider dtype. The mean over any set of microbatches and replicas is
    (sum of sums) / (sum of weights).
    """
    import torch
    from torch.nn import functional as F

    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat_labels = labels.reshape(-1)
    total = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]), flat_labels, ignore_index=IGNORE_LABEL, reduction="sum"
    )
    return total, (flat_labels != IGNORE_LABEL).sum()
