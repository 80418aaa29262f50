"""The loss of a unigram model: what a model that fills in masks must beat to have read the rest."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .joined import Joined

# Training tokens counted at most, so that a huge token file does not take hours.
_COUNTED = 2**26


def loss(train: Joined, n_train: int, labels: Iterable[np.ndarray], vocab: int) -> float:
    """Mean nats per label of u(w) = (c(w) + 1) / (N + V), counted on the first `n_train` tokens."""
    n_train = min(n_train, _COUNTED)
    known_V = np.zeros(vocab, dtype=np.int64)
    for tokens in train.chunks(n_train):
        known_V += np.bincount(tokens, minlength=vocab)
    asked_V = np.zeros(vocab, dtype=np.int64)
    for each in labels:
        asked_V += np.bincount(each, minlength=vocab)
    nats_V = -np.log((known_V + 1) / (n_train + vocab))
    return float(asked_V @ nats_V) / int(asked_V.sum())
