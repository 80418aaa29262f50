"""Weights of a checkpoint of any layout to Hugging Face's safetensors."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, RunError, Violation
from ..graph.layer import LayerGraph
from . import checkpoint, checkpoints, tensorfile
from .checkpoint import EXTRA
from .pieces import Piece, Whole
from .synced import write_synced
from .tensorfile import Held
from .weights import Moved, Origin, appearing
from .weights_names import misfits, named, wanted
from .weights_source import INDEX, ITEM_BYTES, SINGLE, read_blocks, read_source

SHARD_BYTES = 5 * 10**9
_TORCH = {name: dtype for dtype, name in tensorfile.NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Tensors in pieces, and where each file holds them; without the optimizer's."""

    folder: Path
    tensors: Mapping[str, Whole]
    held: Mapping[str, Mapping[str, Held]]
    origin: Origin | None

    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        """The bytes of a whole tensor, a block at a time, however it is cut into pieces."""
        whole = self.tensors[name]
        parted = _Parted.of(whole)
        if parted.n_lines > 1 and parted.line_bytes < tensorfile.BLOCK_BYTES:
            step = max(1, tensorfile.BLOCK_BYTES // max(1, parted.line_bytes))
            for first in range(0, parted.n_lines, step):
                yield self._joined(parted, first, min(first + step, parted.n_lines))
            return
        for line in range(parted.n_lines):
            for piece in parted.pieces:
                yield from self._read(parted.run(piece, line, line + 1))

    def _joined(self, parted: _Parted, first: int, end: int) -> memoryview:
        """Some lines, each from the pieces that it goes through."""
        lines = np.empty((end - first, parted.line_bytes), np.uint8)
        n_bytes = 0
        for piece in parted.pieces:
            run = parted.run(piece, first, end)
            read = b"".join(self._read(run))
            n_bytes += len(read)
            lines[run.lines, run.columns] = np.frombuffer(read, np.uint8).reshape(run.shape)
        assert n_bytes == lines.nbytes, "the pieces cover each element once"
        return lines.reshape(-1).data

    def _read(self, run: _Run) -> Iterator[bytes]:
        held = self.held[run.piece.file][run.piece.key]
        n_lines, line_bytes = run.shape
        part = msgspec.structs.replace(
            held, start=held.start + run.skipped * line_bytes, n_bytes=n_lines * line_bytes
        )
        yield from read_blocks(self.folder / run.piece.file, part)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a piece has of some lines of its tensor: all of it lies together in the piece.

    `lines` are those that it has a part of, `columns` the bytes of each; `shape` is lines x bytes,
    `skipped` the number of the piece's own lines before them.
    """

    piece: Piece
    lines: npt.NDArray[np.int64]
    columns: slice
    shape: tuple[int, int]
    skipped: int


@dataclass(frozen=True, kw_only=True)
class _Parted:
    """A tensor as lines: from the last dim that its pieces cut on, all bytes of one index before.

    Lines follow one another in the tensor, and a line's parts follow one another in the line.
    """

    whole: Whole
    pieces: list[Piece]
    dim: int

    @staticmethod
    def of(whole: Whole) -> _Parted:
        """Lines that are as short as may be."""
        cut = [dim for p in whole.pieces for dim, n in enumerate(p.shape) if n < whole.shape[dim]]
        dim = max(cut, default=0)
        ordered = sorted(whole.pieces, key=lambda piece: piece.offset[dim:])
        return _Parted(whole=whole, pieces=ordered, dim=dim)

    @property
    def n_lines(self) -> int:
        """Lines in all; 1 where the pieces follow one another."""
        return math.prod(self.whole.shape[: self.dim])

    @property
    def line_bytes(self) -> int:
        """Bytes of one."""
        return math.prod(self.whole.shape[self.dim :]) * ITEM_BYTES[self.whole.dtype]

    def run(self, piece: Piece, first: int, end: int) -> _Run:
        """What a piece has of the lines from `first` to before `end`."""
        item_bytes = ITEM_BYTES[self.whole.dtype]
        inner_bytes = math.prod(self.whole.shape[self.dim + 1 :]) * item_bytes
        start_bytes = math.prod(piece.offset[self.dim : self.dim + 1]) * inner_bytes
        width_bytes = math.prod(piece.shape[self.dim : self.dim + 1]) * inner_bytes
        offset, sizes = (0, *piece.offset[: self.dim]), (1, *piece.shape[: self.dim])
        places = np.unravel_index(np.arange(first, end), (1, *self.whole.shape[: self.dim]))
        inside = [(o <= at) & (at < o + n) for at, o, n in zip(places, offset, sizes, strict=True)]
        lines = np.flatnonzero(np.logical_and.reduce(inside))
        skipped = 0
        for at, o, n in zip(places, offset, sizes, strict=True) if len(lines) else ():
            skipped = skipped * n + int(at[lines[0]]) - o
        return _Run(
            piece=piece,
            lines=lines,
            columns=slice(start_bytes, start_bytes + width_bytes),
            shape=(len(lines), width_bytes),
            skipped=skipped,
        )


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file to write: key -> tensor; the header if it is known already."""

    name: str
    keys: Mapping[str, str]
    header: str | None = None


def export_weights(
    graph: LayerGraph,
    path: Path,
    to: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Moved:
    """Write the weights of a checkpoint, a run folder's newest, or a ``final.safetensors``.

    What was imported comes back as it was, file by file. With `dtype` floating-point parameters
    are cast to it; buffers never are.

    Raises:
        ConfigError: the checkpoint is damaged or another model's; `to` holds something already.
        RunError: it cannot be written, or a value is too large for `dtype`.
    """
    weights = _read(graph, path)
    cast = None if dtype is None else tensorfile.NAMES[dtype]
    like = {
        name: _like(whole, cast if name.startswith("param/") else None)
        for name, whole in weights.tensors.items()
    }
    as_it_was = all(like[name][0] == whole.dtype for name, whole in weights.tensors.items())
    origin = weights.origin
    files = _files(graph, origin, like, shard_bytes, as_it_was=as_it_was)
    n_bytes = sum(like[name][2] for file in files for name in file.keys.values())
    with appearing(to, n_bytes) as partial:
        for file in files:
            _write(partial / file.name, file, weights, like)
        if origin is not None and as_it_was:
            index, config = origin.index, origin.config
        else:
            index, config = _index(files, like), _config(graph, like)
        if index is not None:
            write_synced(partial / INDEX, index.encode())
        if config is not None:
            write_synced(partial / "config.json", config.encode())
        written = tuple(sorted(each.name for each in partial.iterdir()))
    n_tensors = sum(len(file.keys) for file in files)
    return Moved(path=str(to), files=written, tensors=n_tensors, n_bytes=n_bytes)


def _read(graph: LayerGraph, path: Path) -> _Weights:
    if path.is_file():
        weights = _of_file(graph, path)
    else:
        folder = _folder(path)
        meta, index = checkpoint.verify(folder), checkpoint.read_index(folder)
        weights = _Weights(
            folder=folder,
            tensors={n: t for n, t in index.tensors.items() if not n.startswith("optimizer/")},
            held={name: tensorfile.header(folder / name)[0] for name in index.files},
            origin=None if meta.origin is None else msgspec.convert(meta.origin, Origin),
        )
    shapes = wanted(graph)
    found = [
        (
            name.partition("/")[2],
            name if name in shapes or name.startswith(EXTRA) else None,
            t.shape,
        )
        for name, t in weights.tensors.items()
    ]
    violations = misfits(found, shapes, path="--from", value=str(path))
    if violations:
        raise ConfigError(violations)
    return weights


def _folder(path: Path) -> Path:
    """The checkpoint of a path: itself, or the newest of a run folder."""
    found = path if checkpoint.is_complete(path) else checkpoints.newest(path)
    if found is None:
        rule = "holds no complete checkpoint" if path.is_dir() else "is not there"
        legal = "a folder checkpoints/step-N, a run folder that has one, or a final.safetensors"
        raise ConfigError([Violation(path="--from", value=str(path), rule=rule, legal=legal)])
    return found


def _of_file(graph: LayerGraph, path: Path) -> _Weights:
    """A file of whole tensors under the names of the model, as a run ends with."""
    source = read_source(path)
    names = named(source.tensors, graph)
    tensors: dict[str, Whole] = {}
    for key, stored in source.tensors.items():
        shape = stored.held.shape
        piece = Piece(file=stored.file, key=key, offset=(0,) * len(shape), shape=shape)
        name = names[key] or f"unknown/{key}"
        tensors.setdefault(name, Whole(shape=shape, dtype=stored.held.dtype, pieces=(piece,)))
    held = {path.name: {key: stored.held for key, stored in source.tensors.items()}}
    return _Weights(folder=source.folder, tensors=tensors, held=held, origin=None)


def _like(whole: Whole, cast: str | None) -> tuple[str, tuple[int, ...], int]:
    dtype = cast if cast is not None and _TORCH[whole.dtype].is_floating_point else whole.dtype
    return dtype, whole.shape, math.prod(whole.shape) * ITEM_BYTES[dtype]


def _files(
    graph: LayerGraph,
    origin: Origin | None,
    like: Mapping[str, tuple[str, tuple[int, ...], int]],
    shard_bytes: int,
    *,
    as_it_was: bool,
) -> list[_File]:
    """The files of the source, or as many as it takes to keep each below `shard_bytes`."""
    if origin is not None:
        return [
            _File(
                name=name,
                keys={key: origin.names[key] for key in _keys(header)},
                header=header if as_it_was else None,
            )
            for name, header in origin.headers.items()
        ]
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for name in wanted(graph):
        n_bytes = like[name][2]
        if shards[-1] and filled + n_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name.partition("/")[2]] = name
        filled += n_bytes
    if len(shards) == 1:
        return [_File(name=SINGLE, keys=shards[0])]
    return [
        _File(name=f"model-{number:05}-of-{len(shards):05}.safetensors", keys=keys)
        for number, keys in enumerate(shards, 1)
    ]


def _keys(header: str) -> list[str]:
    """Keys of a header in the order of their bytes."""
    described = json.loads(header)
    described.pop("__metadata__", None)
    return sorted(described, key=lambda key: described[key]["data_offsets"])


def _write(
    path: Path,
    file: _File,
    weights: _Weights,
    like: Mapping[str, tuple[str, tuple[int, ...], int]],
) -> None:
    described = {key: like[name] for key, name in file.keys.items()}
    blocks = chain.from_iterable(_cast(weights, name, like[name][0]) for name in file.keys.values())
    if file.header is None:
        tensorfile.write(path, described, blocks, {"format": "pt"})
    else:
        n_bytes = sum(size for _, _, size in described.values())
        tensorfile.write_under(path, file.header.encode(), n_bytes, blocks)


def _cast(weights: _Weights, name: str, dtype: str) -> Iterator[bytes | memoryview]:
    stored = weights.tensors[name].dtype
    if stored == dtype:
        yield from weights.blocks(name)
        return
    for block in weights.blocks(name):
        before = torch.frombuffer(bytearray(block), dtype=_TORCH[stored])
        after = before.to(_TORCH[dtype])
        if not torch.equal(before.isfinite(), after.isfinite()):
            raise RunError(f"{name} holds values that are too large for {dtype}; nothing written")
        yield tensorfile.content(after)


def _index(files: list[_File], like: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str | None:
    """The index of shards, as the library writes it; None for one file."""
    if len(files) == 1:
        return None
    names = {key: name for file in files for key, name in file.keys.items()}
    total = {
        "total_parameters": sum(math.prod(like[name][1]) for name in names.values()),
        "total_size": sum(like[name][2] for name in names.values()),
    }
    places = {key: file.name for file in files for key in file.keys}
    return json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def _config(graph: LayerGraph, like: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str | None:
    """The model's configuration for the library, if it has one."""
    if graph.library is None:
        return None
    config = copy.deepcopy(graph.library.config)
    config.architectures = [graph.library.model_class.__name__]
    config.dtype = next(_TORCH[dtype] for dtype, _, _ in like.values())
    text: str = config.to_json_string()
    return text
