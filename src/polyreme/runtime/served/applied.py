"""The list of pushes that a server applied, or of messages that it took: beside its snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW = np.dtype([("worker", "<i4"), ("life", "<u4"), ("number", "<i8"), ("version", "<i8")])
"""Who pushed (`life` counts how often it was begun), its push's number from 0, and the version of
the parameters that it began with."""

TAKEN = np.dtype([("source", "<i4"), ("life", "<u4"), ("number", "<i8")])
"""Whose message a player took (-1: it waited in vain), and its number of those that were sent to it
in that life of its source, from 1 (-1: it was told that the source is gone)."""


class AppliedList:
    """Appends rows; what follows a snapshot that is gone back to is cut off."""

    def __init__(self, path: Path, n_rows: int, row: np.dtype[Any] = ROW) -> None:
        self._file, self._row = path.open("r+b" if path.exists() else "w+b"), row
        self._file.truncate(n_rows * row.itemsize)
        self._file.seek(0, 2)
        self.n_rows = n_rows

    def add(self, *row: int) -> None:
        """One push, or message."""
        self._file.write(np.array([row], dtype=self._row).tobytes())
        self.n_rows += 1

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()


def read_applied(path: Path) -> NDArray[Any]:
    """The rows of such a file, in the order in which pushes were applied."""
    return np.fromfile(path, dtype=ROW)


def read_taken(path: Path) -> NDArray[Any]:
    """The messages that a player took, in their order."""
    return np.fromfile(path, dtype=TAKEN)
