"""Reads svmlight (LIBSVM) files; kept sparse, given as dense rows."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from . import files, fingerprint, split
from .class_options import Svmlight
from .labelled import LabelledSource, Part


def open_svmlight(options: Svmlight) -> LabelledSource:
    """Parse the files, all with one width; held out is a stratified share, or other files."""
    from scipy import sparse
    from sklearn.datasets import load_svmlight_files

    if found := options.check():
        raise ConfigError(found)
    trained = files.find(options.path)
    tested = files.find(options.heldout) if isinstance(options.heldout, str) else ()
    paths = [str(path) for path in (*trained, *tested)]
    try:
        loaded = load_svmlight_files(paths, n_features=options.n_features, dtype=np.float32)
    except (ValueError, OSError, EOFError) as error:
        raise files.unreadable(trained[0], str(error)) from error
    rows, targets = loaded[::2], loaded[1::2]
    n = len(trained)
    x = [sparse.vstack(rows[:n]).tocsr()] + ([sparse.vstack(rows[n:]).tocsr()] if tested else [])
    y = [np.concatenate(targets[:n])] + ([np.concatenate(targets[n:])] if tested else [])
    classes, n_classes = split.numbered(*y)
    parts = [_part(rows, own) for rows, own in zip(x, classes, strict=True)]
    if not tested:
        assert isinstance(options.heldout, float | int)
        train, heldout = split.stratified(classes[0], options.heldout)
        parts = [parts[0].take(train), parts[0].take(heldout)]
    stored = [array for own in x for array in (own.data, own.indices, own.indptr)]
    return LabelledSource(
        *parts,
        field="features",
        shape=(x[0].shape[1],),
        n_classes=n_classes,
        fingerprint=fingerprint.of("" if tested else repr(options.heldout), *stored, *y),
    )


def _part(rows: object, classes: np.ndarray) -> Part:
    return Part(read=lambda indices: rows[indices].toarray(), classes=classes)  # type: ignore[index]
