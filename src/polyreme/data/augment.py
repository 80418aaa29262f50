"""Random changes to training images, as a function of (seed, epoch, index).

Axes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import shuffle
from .class_options import Augment

if TYPE_CHECKING:
    from .pixels import Moves


def drawn(indices_N: np.ndarray, epoch: int, seed: int, options: Augment) -> Moves:
    """Shifts by up to `shift` pixels each way, and which images are mirrored."""
    from .pixels import Moves  # numba, which data that stay as they are do without

    most = options.shift
    words = shuffle.mix(indices_N.astype(np.uint64) ^ np.uint64(shuffle.key(seed, epoch)))
    down = _shift(words, most)
    words = shuffle.mix(words)
    right = _shift(words, most)
    mirrored = (shuffle.mix(words) & np.uint64(1) == 1) & options.flip
    return Moves(down=down, right=right, mirrored=mirrored)


def augmented(
    images_NCHW: np.ndarray, indices: np.ndarray, epoch: int, seed: int, options: Augment
) -> np.ndarray:
    """Each image shifted by up to `shift` pixels each way (edges repeated) and perhaps mirrored."""
    from . import pixels

    return pixels.moved(images_NCHW, drawn(indices, epoch, seed, options))


def _shift(words: np.ndarray, most: int) -> np.ndarray:
    return (words % np.uint64(2 * most + 1)).astype(np.int64) - most
