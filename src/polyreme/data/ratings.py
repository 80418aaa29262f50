"""Reads pairs of users and items with their values, and draws pairs that are not there.

Axes: N pairs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, Violation
from ..sample import SampleSpec, TensorSpec
from . import files, fingerprint, shuffle
from .rating_options import Ratings

if TYPE_CHECKING:
    import torch

_DRAW = 2**32 + 16  # told apart from the streams that deal samples


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Numbers of users and of items, int64 [N] each, and the pairs' values, float64 [N]."""

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)


class RatingSource:
    """A source of pairs; `pairs` are those to train on."""

    metric = "heldout_loss"

    def __init__(self, train: Pairs, heldout: Pairs, fingerprint: str) -> None:
        self.pairs, self._heldout = train, heldout
        self.n_train, self.n_heldout = len(train), len(heldout)
        counts = {
            name: 1 + max(int(getattr(part, name).max(initial=0)) for part in (train, heldout))
            for name in ("users", "items")
        }
        one = TensorSpec((), "int64")
        self.sample = SampleSpec(
            fields={"users": one, "items": one, "labels": TensorSpec((), "float64")},
            n_classes=1,
            numbered=counts,
        )
        self.fingerprint = fingerprint

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Training pairs by index."""
        return _fields(self.pairs, indices)

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Held-out pairs by index."""
        return _fields(self._heldout, indices)

    def labels(self) -> np.ndarray:
        """Raises ConfigError: pairs have no classes."""
        rule, legal = "deals samples by their class, and ratings have none", '"iid", or none'
        raise ConfigError([Violation(path="data.partition", value=None, rule=rule, legal=legal)])

    def baselines(self, n_heldout: int | None = None) -> Mapping[str, float]:
        """``mean_value_loss``: that of always naming the mean of the training values."""
        asked = self._heldout.values[:n_heldout]
        if not len(asked):
            return {}
        return {"mean_value_loss": float(((asked - self.pairs.values.mean()) ** 2).mean() / 2)}


def open_ratings(options: Ratings, seed: int) -> RatingSource:
    """Load the pairs, and draw those of no value. Raises ConfigError for the data's faults."""
    if found := options.check():
        raise ConfigError(found)
    path = Path(options.path).expanduser()
    try:
        with np.load(path, allow_pickle=False) as packed:
            there = [name for name in ("test", "valid") if name in packed.files]
            names = ["train", *([options.heldout] if options.heldout else there[:1])]
            parts = [_read(packed, name, path) for name in names]
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise files.unreadable(path, str(error)) from error
    train = parts[0]
    if not len(train):
        raise files.unreadable(path, "train holds no pair")
    nothing = Pairs(users=train.users[:0], items=train.items[:0], values=train.values[:0])
    heldout = parts[1] if len(parts) == 2 else nothing
    n_items = 1 + max(int(each.items.max(initial=0)) for each in (train, heldout))
    arrays = [a for each in (train, heldout) for a in (each.users, each.items, each.values)]
    negatives = options.negatives
    mark = fingerprint.of(repr((negatives, negatives and seed)), *arrays)
    return RatingSource(with_negatives(train, n_items, negatives, seed), heldout, mark)


def with_negatives(pairs: Pairs, n_items: int, negatives: int, seed: int) -> Pairs:
    """The pairs, then for each so many of its user with items that no pair has; their value is 0.

    Raises ConfigError where a user has too few such items left.
    """
    if not negatives:
        return pairs
    observed = np.unique(pairs.users * n_items + pairs.items)
    users = np.repeat(pairs.users, negatives)
    room = n_items - np.bincount(observed // n_items)
    short = np.flatnonzero(np.bincount(users) > room)
    if len(short):
        user = int(short[0])
        rule = (
            f"asks for {int((users == user).sum())} items that user {user} is not paired with, "
            f"and there are {int(room[user])}"
        )
        raise ConfigError(
            [Violation(path="data.negatives", value=negatives, rule=rule, legal="0, or fewer")]
        )
    found, taken = np.empty(len(users), np.int64), observed
    waiting, turn = np.arange(len(users)), 0
    while len(waiting):  # whoever drew what is taken draws again
        words = (waiting + len(users) * turn).astype(np.uint64)
        key = np.uint64(shuffle.key(seed, _DRAW))
        drawn = (shuffle.mix(shuffle.mix(words) + key) % np.uint64(n_items)).astype(np.int64)
        keys = users[waiting] * n_items + drawn
        _, first = np.unique(keys, return_index=True)
        fresh = np.zeros(len(keys), bool)
        fresh[first] = True
        fresh &= ~np.isin(keys, taken)
        found[waiting[fresh]] = drawn[fresh]
        taken = np.concatenate([taken, keys[fresh]])
        waiting, turn = waiting[~fresh], turn + 1
    return Pairs(
        users=np.concatenate([pairs.users, users]),
        items=np.concatenate([pairs.items, found]),
        values=np.concatenate([pairs.values, np.zeros(len(users))]),
    )


def _read(packed: Mapping[str, np.ndarray], name: str, path: Path) -> Pairs:
    pairs = packed[name]
    values = packed[f"{name}_values"] if f"{name}_values" in packed else np.ones(len(pairs))
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise files.unreadable(path, f"{name} has shape {pairs.shape}, and pairs are [N, 2]")
    if pairs.dtype.kind not in "iu":
        why = f"{name} holds {pairs.dtype}, and users and items are whole numbers"
        raise files.unreadable(path, why)
    if len(pairs) and int(pairs.min()) < 0:
        raise files.unreadable(path, f"{name} holds {int(pairs.min())}: numbers begin at 0")
    if len(pairs) and int(pairs.max()) >= 2**31:
        raise files.unreadable(path, f"{name} holds {int(pairs.max())}, above 2^31")
    if values.shape != (len(pairs),) or values.dtype.kind not in "buif":
        why = f"{name}_values holds {values.dtype} of shape {values.shape}"
        raise files.unreadable(path, f"{why}, and {name} {len(pairs)} pairs")
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise files.unreadable(path, f"{name}_values holds {values[at]} at {at}")
    users, items = (np.ascontiguousarray(each, np.int64) for each in pairs.T)
    return Pairs(users=users, items=items, values=values)


def _fields(pairs: Pairs, indices: np.ndarray) -> dict[str, torch.Tensor]:
    import torch

    named = {"users": pairs.users, "items": pairs.items, "labels": pairs.values}
    return {name: torch.from_numpy(array[indices]) for name, array in named.items()}
