"""Random changes to training images, as a function of (seed, epoch, index).

Axes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from . import shuffle
from .class_options import Augment


def augmented(
    images_NCHW: np.ndarray, indices: np.ndarray, epoch: int, seed: int, options: Augment
) -> np.ndarray:
    """Each image shifted by up to `shift` pixels each way (edges repeated) and perhaps mirrored."""
    n, _, height, width = images_NCHW.shape
    most = options.shift
    words = shuffle.mix(indices.astype(np.uint64) ^ np.uint64(shuffle.key(seed, epoch)))
    down_N = _shift(words, most)
    words = shuffle.mix(words)
    right_N = _shift(words, most)
    padded = np.pad(images_NCHW, ((0, 0), (0, 0), (most, most), (most, most)), mode="edge")
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    changed: np.ndarray = windows[np.arange(n), :, most - down_N, most - right_N]
    if options.flip:
        mirrored_N = shuffle.mix(words) & np.uint64(1) == 1
        changed[mirrored_N] = changed[mirrored_N, ..., ::-1]
    return changed


def _shift(words: np.ndarray, most: int) -> np.ndarray:
    return (words % np.uint64(2 * most + 1)).astype(np.int64) - most
