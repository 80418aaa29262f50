"""Samples that have a class, whatever they are read from.

Axes: N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import ConfigError, Violation
from ..sample import SampleSpec, TensorSpec
from . import augment
from .class_options import Augment

if TYPE_CHECKING:
    import torch

    from .pixels import Moves

Read = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Samples by index as float32 [N, ...], and the class of each (0, 1, ...).

    `read_moved` reads images that are moved meanwhile, where that saves a pass over them.
    """

    read: Read
    classes: np.ndarray
    read_moved: Callable[[np.ndarray, Moves], np.ndarray] | None = None

    def take(self, numbers: np.ndarray) -> Part:
        """Only the samples of these numbers."""
        read_moved = self.read_moved
        return Part(
            read=lambda indices: self.read(numbers[indices]),
            classes=self.classes[numbers],
            read_moved=None
            if read_moved is None
            else lambda indices, moves: read_moved(numbers[indices], moves),
        )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How training images are changed, and the seed that the changes are drawn from."""

    options: Augment
    seed: int


class LabelledSource:
    """A source of samples with one class each."""

    metric = "test_accuracy"

    def __init__(
        self,
        train: Part,
        heldout: Part,
        *,
        field: Literal["features", "pixel_values"],
        shape: tuple[int, ...],
        n_classes: int,
        fingerprint: str,
        drawn: Drawn | None = None,
    ) -> None:
        if not len(train.classes):
            rule, legal = "leaves no training sample", "more data, or a smaller data.heldout"
            raise ConfigError([Violation(path="data", value=0, rule=rule, legal=legal)])
        self._train, self._heldout, self._field, self._drawn = train, heldout, field, drawn
        self.n_train, self.n_heldout = len(train.classes), len(heldout.classes)
        self.sample = SampleSpec(
            fields={field: TensorSpec(shape, "float32"), "labels": TensorSpec((), "int64")},
            n_classes=n_classes,
        )
        self.fingerprint = fingerprint

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Training samples by index, augmented anew in each epoch if so asked."""
        train, drawn = self._train, self._drawn
        if drawn is None:
            samples = train.read(indices)
        elif train.read_moved is not None:
            moves = augment.drawn(indices, epoch, drawn.seed, drawn.options)
            samples = train.read_moved(indices, moves)
        else:
            read = train.read(indices)
            samples = augment.augmented(read, indices, epoch, drawn.seed, drawn.options)
        return self._batch(samples, train.classes[indices])

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Held-out samples by index, never augmented."""
        return self._batch(self._heldout.read(indices), self._heldout.classes[indices])

    def _batch(self, samples: np.ndarray, classes: np.ndarray) -> dict[str, torch.Tensor]:
        import torch

        return {
            self._field: torch.from_numpy(np.ascontiguousarray(samples)),
            "labels": torch.from_numpy(classes),
        }

    def labels(self) -> np.ndarray:
        """The class of each training sample."""
        return self._train.classes

    def baselines(self, n_heldout: int | None = None) -> dict[str, float]:
        """``majority_accuracy``: that of always naming the commonest training class."""
        asked = self._heldout.classes[:n_heldout]
        if not len(asked):
            return {}
        commonest = int(np.bincount(self._train.classes).argmax())
        return {"majority_accuracy": float((asked == commonest).mean())}
