"""What is minimised over all samples, whatever the model: it makes tasks of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch

    from ..algo.task import Sum
    from ..data.source import Source


class Samples(Protocol):
    """All training samples as an objective's kernels read them; `which` are numbers of some."""

    @property
    def constants(self) -> Mapping[str, np.ndarray]:
        """What the model has of them beside parameters: values of its buffers by name."""

    def task(self, which: np.ndarray, batch: int) -> Sum:
        """What a worker can be asked of these samples; its batches are of so many."""

    def gradient(self, which: np.ndarray, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """At w: the gradient [D] of their mean loss and the penalty, and their summed loss."""


class Objective(Protocol):
    """What a model minimises that is trained on all samples of a sum.

    `figures` are those of a certificate that are told with an evaluation.
    """

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of a `Certificate`'s fields."""

    def samples(self, source: Source) -> Samples:
        """The training samples. Raises ConfigError where they are not of the form it is of."""


class Unbounded:
    """What a task answers of an objective whose optimum nothing bounds."""

    @property
    def shrinks(self) -> bool:
        """There are no dual points."""
        return False

    @property
    def number(self) -> int:
        """Of no use."""
        return 0

    def mixtures(self, w: torch.Tensor, z: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """Of no use."""
        return z.new_zeros(0, 1 + len(earlier))

    def conjugates(self, slopes: torch.Tensor, c: float) -> float:
        """Of no use."""
        return 0.0

    def shrink(self, z: torch.Tensor) -> float:
        """Of no use."""
        return 1.0
