"""Sparse samples drawn from a linear model that is sparse too."""

from __future__ import annotations

import math

import numba
import numpy as np

from ..errors import ConfigError
from . import fingerprint, shuffle
from .labelled import LabelledSource
from .rows import Rows
from .sparse_options import Generated
from .sparse_source import SparseSource, Targeted, dense

_Array = np.ndarray
_SHARE = 10  # one feature in so many has a weight
_UNIT = 2.0**-53


def open_generated(options: Generated) -> LabelledSource | SparseSource:
    """Draw the rows, which depend on nothing but these options."""
    if found := options.check():
        raise ConfigError(found)
    rows, targets, _ = drawn(options)
    told = (options.rows, options.features, options.per_row, options.noise, options.seed)
    name = fingerprint.of("generated", repr(told), repr(options.heldout))
    parts = Targeted(rows=rows, targets=targets).cut(options.heldout)
    return (SparseSource if options.sparse else dense)(*parts, fingerprint=name)


def drawn(options: Generated) -> tuple[Rows, np.ndarray, np.ndarray]:
    """Rows, labels -1 and 1 [N], and the model's weights [D]."""
    n, width, per_row = options.rows, options.features, options.per_row
    indices = np.empty((n, per_row), np.int32)
    values = np.empty((n, per_row))
    _fill(np.uint64(shuffle.key(options.seed, 0)), width, indices, values)
    w = _weights(options.seed, width)
    z = _predictions(indices, values, w)
    spread = float(np.sqrt(np.mean(z * z)))
    chance = _uniform(shuffle.mix(np.arange(n, dtype=np.uint64) + _word(options.seed, 2)))
    scale = options.noise * spread
    if scale:
        # Where exp would overflow the chance is 0.
        is_one = chance < 1 / (1 + np.exp(np.minimum(-z / scale, 700.0)))
    else:
        is_one = (z > 0) | ((z == 0) & (chance < 0.5))
    rows = Rows(
        indptr=np.arange(0, (n + 1) * per_row, per_row, dtype=np.int64),
        indices=indices.reshape(-1),
        values=values.reshape(-1),
        n_features=width,
    )
    return rows, np.where(is_one, 1.0, -1.0), w


def _word(*parts: int) -> np.uint64:
    return np.uint64(shuffle.key(*parts))


def _uniform(words: _Array) -> _Array:
    """From 0 to below 1."""
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT


def _weights(seed: int, width: int) -> _Array:
    """-1 to 1 for one feature in ten, 0 for the others; the first feature always has one."""
    words = shuffle.mix(np.arange(width, dtype=np.uint64) + _word(seed, 1))
    w = 2 * _uniform(shuffle.mix(words + np.uint64(1))) - 1
    w[(words % np.uint64(_SHARE) != 0) & (np.arange(width) > 0)] = 0.0
    return w


@numba.njit(inline="always", cache=True, nogil=True)
def _next(state: np.uint64) -> tuple[np.uint64, np.uint64]:
    """SplitMix64's next state and number. Source: Steele et al. 2014."""
    state += np.uint64(0x9E3779B97F4A7C15)
    word = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state, word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def _fill(key: np.uint64, width: int, indices: _Array, values: _Array) -> None:
    """Draw each row from a stream of its own, by whole numbers and square roots only.

    An octave (features 2^k - 1 to 2^(k+1) - 2) is drawn, then a feature in it; those drawn twice
    go on to the next that is free.
    """
    octaves = 0
    while (width >> octaves) > 0:
        octaves += 1
    per_row = indices.shape[1]
    for row in range(indices.shape[0]):
        state, word = _next(key ^ (np.uint64(row) << np.uint64(20)))
        state = word
        own = indices[row]
        for k in range(per_row):
            feature = width
            while feature >= width:
                state, word = _next(state)
                octave = int(word >> np.uint64(40)) % octaves
                low = int(word & np.uint64(0xFFFFFFFF)) & ((1 << octave) - 1)
                feature = (1 << octave) - 1 + low
            own[k] = feature
        own.sort()
        for k in range(1, per_row):
            own[k] = max(own[k], own[k - 1] + 1)
        length = 0.0
        for k in range(per_row):
            own[k] = min(own[k], width - per_row + k)
            state, word = _next(state)
            value = 2.0 * (np.float64(word >> np.uint64(11)) * _UNIT) - 1.0
            values[row, k] = value
            length += value * value
        length = math.sqrt(length)
        for k in range(per_row):
            values[row, k] /= length if length > 0.0 else 1.0


@numba.njit(cache=True, nogil=True)
def _predictions(indices: _Array, values: _Array, w: _Array) -> _Array:
    found = np.zeros(indices.shape[0])
    for row in range(indices.shape[0]):
        for k in range(indices.shape[1]):
            found[row] += values[row, k] * w[indices[row, k]]
    return found
