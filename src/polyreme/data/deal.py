"""Deals every training sample to exactly one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, Violation
from . import shuffle
from .order import share
from .partition import Classes, Dirichlet, Feature, Partition

if TYPE_CHECKING:
    from .source import Source

# Told apart from the streams of the workers, which are keyed by (seed, worker).
_DEAL = 2**32


def deal(partition: Partition, source: Source, n_workers: int, seed: int) -> tuple[np.ndarray, ...]:
    """Sample numbers of each worker, ascending; the same for the same seed on every machine.

    Raises ConfigError naming the workers that would be left without samples.
    """
    if isinstance(partition, Dirichlet):
        parts = dirichlet(source.labels(), n_workers, partition.alpha, seed)
    elif isinstance(partition, Feature):
        parts = sorted_by(_column(partition.feature, source), n_workers)
    elif isinstance(partition, Classes):
        parts = classes(source.labels(), n_workers, partition.per_worker, seed)
    else:
        parts = iid(source.n_train, n_workers, seed)
    empty = [str(worker) for worker, part in enumerate(parts) if not len(part)]
    if empty:
        raise ConfigError(
            [
                Violation(
                    path="data.partition",
                    value=partition if isinstance(partition, str) else repr(partition),
                    rule=f"leaves worker {_some(empty)} of {n_workers} without samples",
                    legal="fewer workers, a more even partition, or another train.seed",
                )
            ]
        )
    return tuple(np.sort(part) for part in parts)


def _some(names: list[str], most: int = 8) -> str:
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def sorted_by(values: np.ndarray, n_workers: int) -> list[np.ndarray]:
    """Equal shares of the samples sorted by their values; those alike stay in order."""
    order = np.argsort(values, kind="stable")
    return [share(order, worker, n_workers) for worker in range(n_workers)]


def _column(feature: int, source: Source) -> np.ndarray:
    """A feature of all samples."""
    shape = source.sample.fields["features"].shape if "features" in source.sample.fields else ()
    if len(shape) != 1 or feature >= shape[0]:
        rule = "is of features, and samples have none" if len(shape) != 1 else "is no feature"
        legal = f"0 to {shape[0] - 1}" if len(shape) == 1 else '"iid", or data of features'
        raise ConfigError(
            [Violation(path="data.partition.feature", value=feature, rule=rule, legal=legal)]
        )
    rows = getattr(source, "rows", None)
    if rows is not None:
        return np.asarray(rows.column(feature))
    column: np.ndarray = source.train(np.arange(source.n_train))["features"][:, feature].numpy()
    return column


def iid(n_samples: int, n_workers: int, seed: int) -> list[np.ndarray]:
    """Contiguous shares of one shuffle; amounts differ by at most one."""
    shuffled = shuffle.at(np.arange(n_samples), n_samples, shuffle.key(seed, _DEAL))
    return [share(shuffled, worker, n_workers) for worker in range(n_workers)]


def dirichlet(labels: np.ndarray, n_workers: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Each class cut by shares from Dirichlet(alpha). Source: Yurochkin et al. 2019, section 4.

    Differs: shares are drawn as logarithms of gamma variates, so that a tiny alpha cannot
    underflow to 0/0.
    """
    # RandomState's stream is frozen across NumPy versions; Generator's is not.
    random = np.random.RandomState(shuffle.key(seed, _DEAL + 1) & 0xFFFFFFFF)
    parts: list[list[np.ndarray]] = [[] for _ in range(n_workers)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place = shuffle.at(
            np.arange(len(members)), len(members), shuffle.key(seed, _DEAL + 2, int(label))
        )
        uniform = 1 - random.random_sample(n_workers)
        # Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha)
        logs = np.log(random.standard_gamma(alpha + 1, n_workers)) + np.log(uniform) / alpha
        weights = np.exp(logs - logs.max())
        cuts = np.rint(np.cumsum(weights / weights.sum()) * len(members)).astype(np.int64)
        for worker, part in enumerate(np.split(members[place], cuts[:-1])):
            parts[worker].append(part)
    return [np.concatenate(part) for part in parts]


def classes(labels: np.ndarray, n_workers: int, per_worker: int, seed: int) -> list[np.ndarray]:
    """`per_worker` shards of the samples sorted by class. Source: McMahan et al. 2017, sec. 3."""
    by_class = np.argsort(labels, kind="stable")
    n_shards = n_workers * per_worker
    drawn = shuffle.at(np.arange(n_shards), n_shards, shuffle.key(seed, _DEAL + 3))
    return [
        np.concatenate([share(by_class, int(shard), n_shards) for shard in own])
        for own in drawn.reshape(n_workers, per_worker)
    ]
