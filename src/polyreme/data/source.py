"""What every reader of a data set gives: samples by index, and what is held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..sample import SampleSpec


class Source(Protocol):
    """An opened data set. Reading is by sample index, so order and split belong to the caller."""

    sample: SampleSpec
    n_train: int
    n_heldout: int
    metric: str  # "heldout_loss" or "test_accuracy"; accuracy is counted on the arg-max
    fingerprint: str  # changes whenever the samples do

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """The training samples of these indices (int64), each field stacked on dim 0, on CPU.

        Where samples are augmented, the change is drawn from (seed, epoch, index).
        """

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The same from the held-out part."""

    def labels(self) -> np.ndarray:
        """One class per training sample, for partitions by class; raises ConfigError for text."""

    def baselines(self, n_heldout: int | None = None) -> Mapping[str, float]:
        """Named figures to stand beside the metric, such as ``bigram_loss`` (nats per token).

        They are taken on the first `n_heldout` held-out samples (unset: on all), which must be
        those that the model is evaluated on. Empty where nothing is held out.
        """
