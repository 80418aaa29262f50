"""The loss of a bigram model: what a language model must beat to have learnt more than pairs.

Axes: V vocabulary.
"""

from __future__ import annotations

import numpy as np

from .joined import Joined

# Up to bytes, adding one to each pair is harmless: with 2,500 tokens it costs 0.9 nats (measured
# on 0.4 M tokens of WikiText-2).
_ADD_ONE_VOCAB = 256
# Training pairs counted at most, so that a huge token file does not take hours.
_COUNTED = 2**26
# Weight of the unigram distribution in pairs: the best of 10, 30, 100, ... 3000 on WikiText-2 and
# on the King James Bible with 2,500 and 8,000 tokens.
_PRIOR = 100.0


def loss(train: Joined, n_train: int, heldout: Joined, n_heldout: int, vocab: int) -> float:
    """Mean nats per token over the first `n_heldout` pairs, counted on the first `n_train`.

    Up to 256 tokens: add-one smoothing, p(w | h) = (c(h, w) + 1) / (c(h) + V). Above, where
    adding one to every pair would drown the counts: p(w | h) = (c(h, w) + m u(w)) / (c(h) + m)
    with m = 100 and the add-one unigram u(w) = (c(w) + 1) / (N + V). Source: MacKay and Peto
    1995, with m fixed instead of inferred.
    """
    assert n_heldout > 0
    n_train = min(n_train, _COUNTED)
    if vocab <= _ADD_ONE_VOCAB:
        total = _dense(train, n_train, heldout, n_heldout, vocab)
    else:
        total = _sparse(train, n_train, heldout, n_heldout, vocab)
    return total / n_heldout


def _dense(train: Joined, n_train: int, heldout: Joined, n_heldout: int, vocab: int) -> float:
    def counts(tokens: Joined, n: int) -> np.ndarray:
        found = np.zeros(vocab * vocab, dtype=np.int64)
        for first, second in tokens.pairs(n):
            found += np.bincount(first * vocab + second, minlength=vocab * vocab)
        return found.reshape(vocab, vocab)

    known_VV, asked_VV = counts(train, n_train), counts(heldout, n_heldout)
    first, second = np.nonzero(asked_VV)
    chance = (known_VV[first, second] + 1) / (known_VV.sum(axis=1)[first] + vocab)
    return float(-(asked_VV[first, second] * np.log(chance)).sum())


def _sparse(train: Joined, n_train: int, heldout: Joined, n_heldout: int, vocab: int) -> float:
    """Only the pairs that are asked for are counted, so memory follows the held-out part."""
    asked = [np.unique(first * vocab + second) for first, second in heldout.pairs(n_heldout)]
    pairs = np.unique(np.concatenate(asked))
    known = np.zeros(len(pairs), dtype=np.int64)
    first_V = np.zeros(vocab, dtype=np.int64)
    second_V = np.zeros(vocab, dtype=np.int64)
    for first, second in train.pairs(n_train):
        first_V += np.bincount(first, minlength=vocab)
        second_V += np.bincount(second, minlength=vocab)
        seen, times = np.unique(first * vocab + second, return_counts=True)
        place = np.minimum(np.searchsorted(pairs, seen), len(pairs) - 1)
        hit = pairs[place] == seen
        known[place[hit]] += times[hit]
    unigram = (second_V[pairs % vocab] + 1) / (n_train + vocab)
    nats = -np.log((known + _PRIOR * unigram) / (first_V[pairs // vocab] + _PRIOR))
    total = 0.0
    for first, second in heldout.pairs(n_heldout):
        total += float(nats[np.searchsorted(pairs, first * vocab + second)].sum())
    return total
