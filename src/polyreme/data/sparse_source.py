"""Sparse samples, each with a number to predict, whatever they are read from.

Axes: N samples, D features, K numbers of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, Violation
from ..sample import SampleSpec, TensorSpec
from . import split
from .labelled import LabelledSource, Part
from .rows import Rows
from .signed import signed

if TYPE_CHECKING:
    import torch

_MOST_CLASSES = 20  # with more labels than these, labels are numbers to predict


@dataclass(frozen=True, kw_only=True)
class Targeted:
    """Rows, and a label for each: float64 [N]."""

    rows: Rows
    targets: np.ndarray

    def take(self, numbers: np.ndarray) -> Targeted:
        """Only the rows of these numbers; copied, unless they are a range."""
        return Targeted(rows=self.rows.take(numbers), targets=self.targets[numbers])

    def cut(self, share: float) -> tuple[Targeted, Targeted]:
        """All rows but the last `share` of them, and those; nothing is copied."""
        n = len(self.targets)
        kept = n - round(share * n)
        if share and kept == n:
            rule, legal = f"holds out none of {n} rows", "a larger share, or 0"
            raise ConfigError([Violation(path="data.heldout", value=share, rule=rule, legal=legal)])
        return (
            Targeted(rows=self.rows.between(0, kept), targets=self.targets[:kept]),
            Targeted(rows=self.rows.between(kept, n), targets=self.targets[kept:]),
        )


class SparseSource:
    """A source of sparse samples.

    `rows`, `targets`, `heldout_rows` and `heldout_targets` are all there is of both parts, with
    labels as they were read; `classes` are their distinct labels, ascending. `predicted` and
    `heldout_predicted` are the labels of batches: -1 and 1 where there are two classes or
    `positive` names one, else as they were read.
    """

    def __init__(
        self,
        train: Targeted,
        heldout: Targeted,
        *,
        positive: float | None = None,
        fingerprint: str,
        where: Callable[[], str | None] | None = None,
    ) -> None:
        if not len(train.targets):
            rule, legal = "leaves no training sample", "more data, or a smaller data.heldout"
            raise ConfigError([Violation(path="data", value=0, rule=rule, legal=legal)])
        self.rows, self.targets = train.rows, train.targets
        self.heldout_rows, self.heldout_targets = heldout.rows, heldout.targets
        self.n_train, self.n_heldout = len(train.targets), len(heldout.targets)
        self.classes = np.union1d(train.targets, heldout.targets)
        self._positive, self._where = positive, where
        self._is_signed = positive is not None or len(self.classes) == 2
        raw = (self.targets, self.heldout_targets)
        self.predicted, self.heldout_predicted = self.signs() if self._is_signed else raw
        self.metric = "test_accuracy" if self._is_signed else "heldout_loss"
        self.fingerprint = fingerprint
        self._width = max(1, self.rows.longest, self.heldout_rows.longest)
        self.sample = SampleSpec(
            fields={
                "features": TensorSpec((self.rows.n_features,), self.rows.values.dtype.name),
                "labels": TensorSpec((), "float64"),
            },
            n_classes=2 if self._is_signed else len(self.classes) if self._is_classed else 1,
            stored=self._width,
        )

    @property
    def _is_classed(self) -> bool:
        whole = np.array_equal(self.classes, np.rint(self.classes))
        return whole and len(self.classes) <= _MOST_CLASSES

    def signs(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels of both parts as -1 and 1. Raises ConfigError as `signed` does."""
        parts = (self.targets, self.heldout_targets)
        first, second = (
            signed(part, self._positive, classes=self.classes, where=self._where) for part in parts
        )
        return first, second

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Training samples by index."""
        return self._batch(self.rows, self.predicted, indices)

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Held-out samples by index."""
        return self._batch(self.heldout_rows, self.heldout_predicted, indices)

    def _batch(self, rows: Rows, labels: np.ndarray, which: np.ndarray) -> dict[str, torch.Tensor]:
        import torch

        features, values = rows.take(which).padded(self._width)
        return {
            "indices": torch.from_numpy(features),
            "values": torch.from_numpy(values),
            "labels": torch.from_numpy(np.array(labels[which], np.float64)),
        }

    def labels(self) -> np.ndarray:
        """The class of each training sample. Raises ConfigError if labels are no classes."""
        if self._is_signed:
            return (self.predicted > 0).astype(np.int64)
        if not self._is_classed:
            rule = "deals samples by their class, and labels are numbers to predict"
            legal = '"iid", or none'
            raise ConfigError(
                [Violation(path="data.partition", value=None, rule=rule, legal=legal)]
            )
        return np.searchsorted(self.classes, self.targets).astype(np.int64)

    def baselines(self, n_heldout: int | None = None) -> dict[str, float]:
        """``majority_accuracy``: that of always naming the commoner of two training classes."""
        asked = self.heldout_predicted[:n_heldout]
        if not self._is_signed or not len(asked):
            return {}
        commoner = 1.0 if 2 * np.count_nonzero(self.predicted > 0) > self.n_train else -1.0
        return {"majority_accuracy": float((asked == commoner).mean())}


def strata(targets: np.ndarray) -> np.ndarray:
    """What a share is held out of (0, 1, ...): each class, or all where labels are many."""
    values, classes = np.unique(targets, return_inverse=True)
    return classes if len(values) <= _MOST_CLASSES else np.zeros(len(targets), np.int64)


def dense(
    train: Targeted, heldout: Targeted, *, positive: float | None = None, fingerprint: str
) -> LabelledSource:
    """The same samples as dense features (float32), with classes 0, 1, ... in their order."""
    targets = [train.targets, heldout.targets]
    if positive is not None:
        every = np.union1d(*targets)
        targets = [signed(part, positive, classes=every) for part in targets]
    classes, n_classes = split.numbered(*targets)
    parts = zip((train.rows, heldout.rows), classes, strict=True)
    return LabelledSource(
        *(_part(rows, own) for rows, own in parts),
        field="features",
        shape=(train.rows.n_features,),
        n_classes=n_classes,
        fingerprint=fingerprint,
    )


def _part(rows: Rows, classes: np.ndarray) -> Part:
    def read(indices: np.ndarray) -> np.ndarray:
        return rows.take(indices).dense().astype(np.float32, copy=False)

    return Part(read=read, classes=classes)
