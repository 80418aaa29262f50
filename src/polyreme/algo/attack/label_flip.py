"""Wrong labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .kind import AttackKind

if TYPE_CHECKING:
    import torch


class LabelFlip(AttackKind, frozen=True, kw_only=True, tag="LabelFlip", tag_field="kind"):
    """Hostile workers train on label C - 1 - y where it is y, of C classes; all else is honest.

    Labels that carry no loss stay so; held-out samples keep their labels.

    Source: Fang et al. 2020, "Local Model Poisoning Attacks to Byzantine-Robust Federated
    Learning".

    Attributes:
        workers: Who is hostile, counted from 0.
    """

    of_batches: ClassVar[bool] = True

    def labelled(self, labels: torch.Tensor, n_classes: int) -> torch.Tensor:
        """The other end of the classes."""
        import torch

        return torch.where(labels < 0, labels, n_classes - 1 - labels)
