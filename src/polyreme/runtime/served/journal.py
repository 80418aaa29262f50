"""What a server was told since its last snapshot: a file that outlives its process."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from ..transport.letters import Kind, Letter

_HEAD = struct.Struct("<BiIqqQ")  # kind, source, life, number, covered, bytes of the body


class Journal:
    """Letters in the order in which they were taken, each written before it is acted on.

    It is handed to the system at once, not to the disk: what a killed process wrote is there, what
    a machine lost its power over may not be. A server that plays a journal on its snapshot is where
    it was, whoever else is gone by then. A file that is there is gone on with, or if `new` emptied.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if new else 0), 0o600)
        self.nbytes = 0

    def letters(self) -> Iterator[Letter]:
        """Those of an earlier life; what its end cut off was not acted on, and goes."""
        size = os.fstat(self._file).st_size
        with os.fdopen(os.dup(self._file), "rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                kind, source, life, number, covered, length = _HEAD.unpack(head)
                if self.nbytes + _HEAD.size + length > size:
                    break
                body = file.read(length)
                self.nbytes += _HEAD.size + length
                yield Letter(Kind(kind), source, life, number, covered, body)
        os.ftruncate(self._file, self.nbytes)
        os.lseek(self._file, self.nbytes, os.SEEK_SET)

    def add(self, letter: Letter) -> None:
        """Write one down."""
        body = memoryview(letter.body)
        head = _HEAD.pack(*letter[:-1], body.nbytes)
        left = [memoryview(head), body]
        while left:
            done = os.writev(self._file, left)
            self.nbytes += done
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if left:
                left[0] = left[0][done:]

    def end(self) -> None:
        """Remove it: a snapshot holds all of it."""
        os.close(self._file)
        self._path.unlink()
