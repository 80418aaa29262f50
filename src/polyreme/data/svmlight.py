"""Samples of svmlight (LIBSVM) files, sparse or dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from . import files, fingerprint, split, svmlight_text
from .labelled import LabelledSource
from .rows import Rows
from .sparse_options import Svmlight
from .sparse_source import SparseSource, Targeted, dense, strata


def open_svmlight(options: Svmlight) -> LabelledSource | SparseSource:
    """Parse the files, all with one width; held out is a stratified share, or other files."""
    if found := options.check():
        raise ConfigError(found)
    paths = files.find(options.path)
    tested = files.find(options.heldout) if isinstance(options.heldout, str) else ()
    read = svmlight_text.read(paths, options.n_features, tested)
    parts = [_joined(read[: len(paths)], options.sparse)]
    if tested:
        parts.append(_joined(read[len(paths) :], options.sparse))
    del read
    share = "" if isinstance(options.heldout, str) else repr(options.heldout)
    name = fingerprint.of(
        share,
        *(array for part in parts for array in _stored(part.rows)),
        *(part.targets for part in parts),
        *(() if options.positive is None else (repr(options.positive),)),
    )
    if not isinstance(options.heldout, str):
        targets = parts[0].targets
        kinds = strata(targets) if options.sparse else split.numbered(targets)[0][0]
        train, heldout = split.stratified(kinds, options.heldout)
        parts = [parts[0].take(train), parts[0].take(heldout)]
    if not options.sparse:
        return dense(*parts, positive=options.positive, fingerprint=name)
    return SparseSource(
        *parts,
        positive=options.positive,
        fingerprint=name,
        where=lambda: svmlight_text.third_class((*paths, *tested)),
    )


def _joined(read: Sequence[tuple[Rows, np.ndarray]], sparse: bool) -> Targeted:
    rows = Rows.joined([rows for rows, _ in read])
    if not sparse:
        rows = dataclasses.replace(rows, values=rows.values.astype(np.float32))
    targets = [labels for _, labels in read]
    return Targeted(rows=rows, targets=targets[0] if len(targets) == 1 else np.concatenate(targets))


def _stored(rows: Rows) -> tuple[np.ndarray, ...]:
    # As narrow as scipy has them, whatever reads the file: checkpoints hold the name.
    ends = rows.indptr.astype(np.int32 if rows.n_stored < 2**31 else np.int64)
    return rows.values, rows.indices, ends
