"""What is held out: always the same part of the same data, whatever the seed of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError, Violation
from . import shuffle


def whole_files(names: Sequence[str], sizes: Sequence[int], share: float) -> list[int]:
    """Numbers of the files to hold out, together at most `share` of all bytes.

    Taken in the order of their names' hashes, so any first part of them is a mixture; at least
    the smallest file if `share` is not 0.
    """
    if not share:
        return []
    budget = share * sum(sizes)
    hashed = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    taken: list[int] = []
    for number in hashed:
        if sizes[number] <= budget:
            taken.append(number)
            budget -= sizes[number]
    return taken or [min(hashed, key=lambda i: sizes[i])]


def stratified(labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Sample numbers to train on and to hold out, `share` of each class (rounded), ascending."""
    heldout = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        n = len(members)
        place = shuffle.at(np.arange(round(share * n)), n, shuffle.key(int(label)))
        heldout.append(members[place])
    out = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *heldout]))
    if share and not len(out):
        rule, legal = "holds out nothing, as no class has enough samples", "a larger share, or 0"
        raise ConfigError([Violation(path="data.heldout", value=share, rule=rule, legal=legal)])
    return np.setdiff1d(np.arange(len(labels)), out), out


def numbered(*labels: np.ndarray) -> tuple[list[np.ndarray], int]:
    """Labels of any kind as 0, 1, ... in their sorted order, and how many classes there are.

    Raises ConfigError if they are fractions, or not one per sample.
    """
    flat = [
        label.reshape(-1) if label.ndim == 2 and label.shape[1] == 1 else label for label in labels
    ]
    for label in flat:
        if label.ndim != 1:
            raise _no_classes(f"have shape {label.shape}")
        if label.dtype.kind == "f" and not np.array_equal(label, np.rint(label)):
            raise _no_classes("hold fractions or NaN")
    values = np.unique(np.concatenate(flat))
    return [np.searchsorted(values, label).astype(np.int64) for label in flat], len(values)


def _no_classes(why: str) -> ConfigError:
    rule, legal = f"are no classes: they {why}", "one whole number or name per sample"
    return ConfigError([Violation(path="data", value="labels", rule=rule, legal=legal)])
