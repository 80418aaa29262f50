"""Sparse samples in a folder of NumPy files, which may be larger than memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ConfigError
from . import files, fingerprint
from .labelled import LabelledSource
from .rows import Rows
from .sparse_options import Csr
from .sparse_source import SparseSource, Targeted, dense

_MOST_CHECKED = 2**28  # indices that are all looked at: 1 GB
_BLOCK = 2**20


def write(folder: Path, rows: Rows, targets: np.ndarray) -> None:
    """Write rows and their labels [N] as ``kind = "csr"`` reads them."""
    rows.save(folder)
    np.save(folder / "labels.npy", np.asarray(targets, np.float64))


def open_csr(options: Csr) -> LabelledSource | SparseSource:
    """Map the files; held out are the last rows."""
    if found := options.check():
        raise ConfigError(found)
    folder = Path(options.path).expanduser()
    try:
        rows, targets = Rows.open(folder), np.load(folder / "labels.npy", mmap_mode="r")
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise files.unreadable(folder, str(error)) from error
    if why := _wrong(rows, targets):
        raise files.unreadable(folder, why)
    targets = np.asarray(targets, np.float64)
    positive = () if options.positive is None else (repr(options.positive),)
    name = fingerprint.of(
        repr(options.heldout), rows.values, rows.indices, rows.indptr, targets, *positive
    )
    parts = Targeted(rows=rows, targets=targets).cut(options.heldout)
    if options.sparse:
        return SparseSource(*parts, positive=options.positive, fingerprint=name)
    return dense(*parts, positive=options.positive, fingerprint=name)


def _wrong(rows: Rows, targets: np.ndarray) -> str | None:
    """Why these are no rows; of very many indices, spread blocks are looked at."""
    wanted = (("indptr", "q"), ("indices", "i"), ("values", "fd"))
    for name, kinds in wanted:
        array = getattr(rows, name)
        if array.ndim != 1 or array.dtype.char not in kinds + "l" * (name == "indptr"):
            return f"{name} holds {array.dtype} of shape {array.shape}"
    if targets.ndim != 1 or targets.dtype.kind not in "buif":
        return f"labels holds {targets.dtype} of shape {targets.shape}"
    if not np.isfinite(targets).all():
        return "labels holds NaN or infinity"
    if len(rows.indptr) != len(targets) + 1:
        return f"{len(rows)} rows but {len(targets)} labels"
    n_stored = len(rows.indices)
    ends = (int(rows.indptr[0]), int(rows.indptr[-1]))
    if ends != (0, n_stored) or len(rows.values) != n_stored or (np.diff(rows.indptr) < 0).any():
        return f"indptr does not fit {n_stored} indices and {len(rows.values)} values"
    for start in _blocks(n_stored):
        block = rows.indices[start : start + _BLOCK]
        if block.min() < 0 or block.max() >= rows.n_features:
            return f"indices reach from {block.min()} to {block.max()}, of {rows.n_features}"
    return None


def _blocks(n: int) -> np.ndarray:
    if n <= _MOST_CHECKED:
        return np.arange(0, n, _BLOCK)
    return np.linspace(0, n - _BLOCK, 64).astype(np.int64)
