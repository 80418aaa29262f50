"""Random changes to training images, as a function of (seed, epoch, index).

Axes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import numpy as np

from . import shuffle
from .class_options import Augment


def augmented(
    images_NCHW: np.ndarray, indices: np.ndarray, epoch: int, seed: int, options: Augment
) -> np.ndarray:
    """Each image shifted by up to `shift` pixels each way (edges repeated) and perhaps mirrored."""
    n, n_channels, height, width = images_NCHW.shape
    words = shuffle.mix(indices.astype(np.uint64) ^ np.uint64(shuffle.key(seed, epoch)))
    down_N = _shift(words, options.shift)
    words = shuffle.mix(words)
    right_N = _shift(words, options.shift)
    rows_NH = np.clip(np.arange(height) - down_N[:, None], 0, height - 1)
    columns_NW = np.clip(np.arange(width) - right_N[:, None], 0, width - 1)
    if options.flip:
        mirrored_N = shuffle.mix(words) & np.uint64(1) == 1
        columns_NW[mirrored_N] = columns_NW[mirrored_N, ::-1]
    changed: np.ndarray = images_NCHW[
        np.arange(n)[:, None, None, None],
        np.arange(n_channels)[None, :, None, None],
        rows_NH[:, None, :, None],
        columns_NW[:, None, None, :],
    ]
    return changed


def _shift(words: np.ndarray, most: int) -> np.ndarray:
    return (words % np.uint64(2 * most + 1)).astype(np.int64) - most
