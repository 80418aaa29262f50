"""The list of pushes that a server applied, in their order: a file beside its snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW = np.dtype([("worker", "<i4"), ("life", "<u4"), ("number", "<i8"), ("version", "<i8")])
"""Who pushed (`life` counts how often it was begun), its push's number from 0, and the version of
the parameters that it began with."""


class AppliedList:
    """Appends rows; what follows a snapshot that is gone back to is cut off."""

    def __init__(self, path: Path, n_rows: int) -> None:
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(n_rows * ROW.itemsize)
        self._file.seek(0, 2)
        self.n_rows = n_rows

    def add(self, worker: int, life: int, number: int, version: int) -> None:
        """One push."""
        self._file.write(np.array([(worker, life, number, version)], dtype=ROW).tobytes())
        self.n_rows += 1

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()


def read_applied(path: Path) -> NDArray[Any]:
    """The rows of such a file, in the order in which pushes were applied."""
    return np.fromfile(path, dtype=ROW)
