"""Global tensors in pieces: who writes which part of what, and how any layout reads them.

A piece is a rectangle of a tensor with its offset in the whole. Ranks write theirs without asking
each other; an index over all pieces is enough to read any rectangle again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from . import tensorfile
from .tensorfile import FileSum

Offset = tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor: where it is stored, where it lies in the whole."""

    file: str
    key: str
    offset: Offset
    shape: tuple[int, ...]


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A global tensor: its shape, dtype (as safetensors names it) and pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What is where; of one rank's files, or of all."""

    tensors: Mapping[str, Whole]
    files: Mapping[str, FileSum]

    @staticmethod
    def merged(parts: list[Index]) -> Index:
        """One index over the files of all ranks."""
        tensors: dict[str, Whole] = {}
        files: dict[str, FileSum] = {}
        for part in parts:
            files |= part.files
            for name, whole in part.tensors.items():
                before = tensors[name].pieces if name in tensors else ()
                tensors[name] = Whole(
                    shape=whole.shape, dtype=whole.dtype, pieces=(*before, *whole.pieces)
                )
        return Index(tensors=tensors, files=files)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rectangle of a tensor as this rank holds it."""

    name: str
    shape: tuple[int, ...]  # of the whole
    offset: Offset
    local: torch.Tensor

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.local.shape, strict=True))

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name}@{','.join(map(str, self.offset))}"


def whole(name: str, tensor: torch.Tensor) -> Part:
    """All of a tensor that this rank alone holds."""
    return Part(name=name, shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), local=tensor)


def write(folder: Path, rank: int, parts: list[Part]) -> Index:
    """Write this rank's file of parts that lie on the host, and the index of it."""
    name = f"rank-{rank:05}.safetensors"
    like = {part.key: tensorfile.entry(part.local) for part in parts}
    total = tensorfile.write(
        folder / name, like, (tensorfile.content(part.local) for part in parts), {}
    )
    tensors: dict[str, Whole] = {}
    for part in parts:
        piece = Piece(file=name, key=part.key, offset=part.offset, shape=tuple(part.local.shape))
        before = tensors[part.name].pieces if part.name in tensors else ()
        tensors[part.name] = Whole(
            shape=part.shape, dtype=tensorfile.NAMES[part.local.dtype], pieces=(*before, piece)
        )
    return Index(tensors=tensors, files={name: total})


class Reader:
    """Reads rectangles of the tensors of a folder; files are opened once."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._files: dict[str, Any] = {}

    def fill(self, part: Part) -> None:
        """Fill a rank's part of a tensor in place, in its own dtype."""
        filled = 0
        for where, value in self._pieces(part):
            with torch.no_grad():
                part.local[where].copy_(value)
            filled += value.numel()
        assert filled == part.local.numel(), "the index covers each element once"

    def _pieces(self, part: Part) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        for piece in self._index.tensors[part.name].pieces:
            spans = [
                (max(ours, theirs), min(ours + n, theirs + m))
                for ours, n, theirs, m in zip(
                    part.offset, part.local.shape, piece.offset, piece.shape, strict=True
                )
            ]
            if any(start >= end for start, end in spans):
                continue
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, part.offset, strict=True))
            there = tuple(
                slice(a - o, b - o) for (a, b), o in zip(spans, piece.offset, strict=True)
            )
            yield here, self._read(piece, there)

    def _read(self, piece: Piece, where: tuple[slice, ...]) -> torch.Tensor:
        file = self._files.get(piece.file)
        if file is None:
            file = self._files[piece.file] = safe_open(self._folder / piece.file, "pt")
        tensor: torch.Tensor
        if not where or all(w == slice(0, n) for w, n in zip(where, piece.shape, strict=True)):
            tensor = file.get_tensor(piece.key)
        else:
            tensor = file.get_slice(piece.key)[where]
        return tensor
