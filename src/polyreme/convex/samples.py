"""Training samples of a linear model: rows and their labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..data.rows import Rows
from ..data.source import Source
from ..data.sparse_source import SparseSource
from . import kernels
from .problem import Objective
from .shard import Shard
from .task import LinearTask


@dataclass(frozen=True, kw_only=True)
class LinearSamples:
    """See `sums.Samples`; labels are -1 and 1, or numbers."""

    objective: Objective
    rows: Rows
    y: np.ndarray

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """None."""
        return {}

    def task(self, which: np.ndarray, batch: int) -> LinearTask:
        """Of these rows."""
        return LinearTask(shard=self._shard(which), batch=batch)

    def gradient(self, which: np.ndarray, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """With that of l2; zero of no row."""
        found, _, loss = kernels.gradient(*self._shard(which).given, w.numpy())
        gradient, n = torch.from_numpy(found), len(which)
        if n:
            gradient.div_(n).add_(w, alpha=self.objective.penalty.l2)
        return gradient, float(loss)

    def _shard(self, which: np.ndarray) -> Shard:
        return Shard(objective=self.objective, rows=self.rows.take(which), y=self.y[which])


def samples(source: Source, objective: Objective) -> LinearSamples:
    """All training samples as rows. Raises ConfigError where labels are not two classes."""
    if isinstance(source, SparseSource):
        y = source.signs()[0] if objective.classifies else source.predicted
        return LinearSamples(objective=objective, rows=source.rows, y=y)
    y = source.train(np.arange(source.n_train))["labels"].double().numpy()
    if source.sample.n_classes == 2:
        y = 2 * y - 1
    return LinearSamples(objective=objective, rows=rows_of(source), y=y)


def rows_of(source: Source) -> Rows:
    """The features of all training samples."""
    if isinstance(source, SparseSource):
        return source.rows
    return Rows.of(source.train(np.arange(source.n_train))["features"].flatten(1).double().numpy())
