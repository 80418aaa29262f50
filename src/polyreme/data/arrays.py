"""Reads samples and classes from a NumPy .npz file.

Axes: N samples, H rows, W columns, C channels, D features.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from ..errors import ConfigError, Violation
from . import files, fingerprint, split
from .class_options import Arrays
from .labelled import Drawn, LabelledSource, Part


def open_arrays(options: Arrays, seed: int) -> LabelledSource:
    """Load the arrays; held out are the file's own test arrays, or a stratified share."""
    if found := options.check():
        raise ConfigError(found)
    path = Path(options.path).expanduser()
    names = (options.x_train, options.y_train, options.x_test, options.y_test)
    try:
        with np.load(path, allow_pickle=False) as packed:
            loaded = {name: packed[name] for name in names if name in packed.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise files.unreadable(path, str(error)) from error
    has_test = options.x_test in loaded
    pairs = [(options.x_train, options.y_train), (options.x_test, options.y_test)][: 1 + has_test]
    for x_name, y_name in pairs:
        if loaded[x_name].ndim not in (2, 3, 4) or loaded[x_name].dtype.kind not in "buif":
            why = f"{x_name} holds {loaded[x_name].dtype} of shape {loaded[x_name].shape}"
            raise files.unreadable(path, why)
        if len(loaded[x_name]) != len(loaded[y_name]):
            why = f"{len(loaded[x_name])} in {x_name} but {len(loaded[y_name])} in {y_name}"
            raise files.unreadable(path, why)
    samples = [_shaped(loaded[x_name], options) for x_name, _ in pairs]
    if has_test and samples[0].shape[1:] != samples[1].shape[1:]:
        why = f"samples of {samples[0].shape[1:]} to train on, of {samples[1].shape[1:]} to test"
        raise files.unreadable(path, why)
    classes, n_classes = split.numbered(*(loaded[y_name] for _, y_name in pairs))
    parts = [_part(x, y) for x, y in zip(samples, classes, strict=True)]
    if not has_test:
        train, heldout = split.stratified(classes[0], options.heldout)
        parts = [parts[0].take(train), parts[0].take(heldout)]
    images = samples[0].ndim == 4
    if options.augment is not None and not images:
        rule, legal = "changes images, and these are features", "none"
        raise ConfigError(
            [Violation(path="data.augment", value=repr(options.augment), rule=rule, legal=legal)]
        )
    return LabelledSource(
        *parts,
        field="pixel_values" if images else "features",
        shape=samples[0].shape[1:],
        n_classes=n_classes,
        fingerprint=fingerprint.of(
            repr((options.flatten, options.channels_first, options.heldout, options.augment)),
            *loaded.values(),
        ),
        drawn=None if options.augment is None else Drawn(options=options.augment, seed=seed),
    )


def _shaped(x: np.ndarray, options: Arrays) -> np.ndarray:
    """[N, D] or [N, C, H, W], as a view."""
    if x.ndim == 2 or options.flatten:
        return x.reshape(len(x), math.prod(x.shape[1:]))
    if x.ndim == 3:
        return x[:, None]
    return x if options.channels_first else x.transpose(0, 3, 1, 2)


def _part(samples: np.ndarray, classes: np.ndarray) -> Part:
    if samples.ndim == 4 and samples.dtype == np.uint8:
        from . import pixels

        levels = _scaled(np.arange(256, dtype=np.uint8)) * 2 - 1
        return Part(
            read=lambda indices: pixels.taken(samples, indices, levels),
            classes=classes,
            read_moved=lambda indices, moves: pixels.taken(samples, indices, levels, moves),
        )
    return Part(read=lambda indices: _scaled(samples[indices]), classes=classes)


def _scaled(x: np.ndarray) -> np.ndarray:
    """float32; bytes to 0..1."""
    wide = x.astype(np.float32)
    return wide / np.float32(255) if x.dtype == np.uint8 else wide
