"""Checkpoints: global tensors in a folder that appears whole or not at all.

A folder is written under a hidden name, synced, renamed to ``checkpoints/step-N`` and only then
pointed to by ``checkpoints/latest``. So a run killed at any moment leaves the last complete
checkpoint, and a half-written one is never mistaken for it. In it: ``rank-R.safetensors`` with
the pieces that rank R wrote, ``index.json`` (where each piece lies in its tensor, size and
SHA-256 of each file) and, written last, ``meta.json``.
"""

from __future__ import annotations

import math
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from .. import __version__
from ..errors import ConfigError, Violation, literal
from ..graph.layer import LayerGraph
from . import own, pieces, tensorfile
from .mesh import World
from .parted import Parted
from .pieces import Index
from .state import Progress, State
from .synced import sync_folder, write_synced

EXTRA = "extra/"  # imported tensors that the library ignores; they are kept for the way back
META = "meta.json"
_FORMAT = 2
_INDEX = "index.json"
_MOST_NAMED = 5


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """``meta.json``: what a checkpoint was made of. `n_ranks` wrote it; any number may read it.

    `metrics` are of an evaluation at this very step. `origin` is set where weights were imported.
    `settings` are those of the spec from which the order of the samples follows.
    """

    format: int
    progress: Progress
    model: str
    fingerprint: str
    n_ranks: int
    versions: Mapping[str, str]
    metrics: Mapping[str, float | None] = {}
    origin: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}


class Damaged(ConfigError):
    """A checkpoint is not what was written; another of the run may be."""


def describe(
    graph: LayerGraph,
    progress: Progress,
    *,
    n_ranks: int,
    metrics: Mapping[str, float | None] | None = None,
    origin: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Meta:
    """The meta data of a checkpoint that is written now."""
    return Meta(
        format=_FORMAT,
        progress=progress,
        model=graph.name,
        fingerprint=graph.fingerprint,
        n_ranks=n_ranks,
        versions={
            "polyreme": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        metrics=metrics or {},
        origin=origin,
        settings=settings or {},
    )


def part_index(folder: Path, rank: int) -> Path:
    """Where a rank leaves the index of its own file until all are merged."""
    return folder / f"rank-{rank:05}.json"


def complete(partial: Path, meta: Meta) -> Path:
    """Make a checkpoint of a folder in which every rank has written its part; where it is now."""
    parts = [part_index(partial, rank) for rank in range(meta.n_ranks)]
    found = [msgspec.json.decode(part.read_bytes(), type=Index) for part in parts]
    write_synced(partial / _INDEX, msgspec.json.encode(Index.merged(found)))
    for part in parts:
        part.unlink()
    write_synced(partial / META, msgspec.json.format(msgspec.json.encode(meta)))
    sync_folder(partial)
    home = partial.parent
    folder = home / f"step-{meta.progress.step}"
    if folder.exists():
        folder.rename(replaced(folder))
    partial.rename(folder)
    sync_folder(home)
    write_synced(home / ".latest.partial", folder.name.encode())
    (home / ".latest.partial").replace(home / "latest")
    sync_folder(home)
    shutil.rmtree(replaced(folder), ignore_errors=True)
    return folder


def load(
    state: State,
    folder: Path,
    *,
    graph: LayerGraph,
    settings: Mapping[str, Any] | None = None,
) -> Progress:
    """Fill the state's tensors in place from a checkpoint of any layout; all ranks together.

    A checkpoint of weights alone (one that was imported) leaves the optimizer's state at zero.
    Where `settings` or the graph differ from those it was written with, that is said.

    Raises:
        ConfigError: it belongs to another model or rule; names what differs.
        Damaged: names the file; nothing was loaded.
    """
    meta, index = read_meta(folder), read_index(folder)
    world, tensors = state.world, state.parted()
    damaged = [name for each in world.gather(_damaged(folder, index, world)) for name in each]
    if damaged:
        rule = f"is damaged: {'; '.join(sorted(set(damaged))[:_MOST_NAMED])}"
        legal = "another of the run's checkpoints/step-N folders"
        raise Damaged([Violation(path="resume", value=str(folder), rule=rule, legal=legal)])
    if meta.origin is not None:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer/")}
        if world.is_first:
            sys.stderr.write(f"polyreme: {folder} holds weights alone: the optimizer starts anew\n")
    everywhere = {name for names in world.gather(list(tensors)) for name in names}
    if state.own():  # of how many, and by whom, is the state's to say
        everywhere |= {name for name in index.tensors if name.startswith(own.PREFIX)}
    lacking = [name for each in world.gather(state.lacking(index)) for name in each]
    differences = [
        *_kinds(index, of_workers=bool(state.own())),
        *dict.fromkeys(
            words
            for each in world.gather(list(_differences(tensors, index, everywhere)))
            for words in each
        ),
        *dict.fromkeys(lacking),
    ]
    if differences:
        differences[:0] = _changed(meta, settings or {}, algorithm=True)
        named = "; ".join(differences[:_MOST_NAMED])
        rest = len(differences) - _MOST_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        violation = Violation(
            path="resume",
            value=str(folder),
            rule=f'holds another state, of model "{meta.model}": {named}{more}',
            legal=f'a checkpoint of model "{graph.name}" with this rule and algorithm',
        )
        raise ConfigError([violation])
    if world.is_first:
        for words in _changes(meta, graph, settings or {}):
            sys.stderr.write(f"polyreme: {folder} {words}\n")
    reader = pieces.Reader(folder, index)
    for name, tensor in tensors.items():
        for part in tensor.parts(name):
            reader.fill(part)
    state.take(reader, index)
    return meta.progress


def verify(folder: Path) -> Meta:
    """Check that a checkpoint is whole: every file as it was written, every element once.

    Raises ConfigError naming what is damaged.
    """
    meta, index = read_meta(folder), read_index(folder)
    found = [*_damages(folder, index, list(index.files)), *_gaps(index)]
    if found:
        rule, legal = f"is damaged: {'; '.join(found)}", "another checkpoint"
        raise ConfigError([Violation(path="checkpoint", value=str(folder), rule=rule, legal=legal)])
    return meta


def is_complete(folder: Path) -> bool:
    """Whether a folder is a whole checkpoint."""
    return (folder / META).is_file() and (folder / _INDEX).is_file()


def read_meta(folder: Path) -> Meta:
    """``meta.json``; Damaged if it cannot be read, ConfigError if it is of a later format."""
    legal = "another of the run's checkpoints/step-N folders"
    try:
        meta = msgspec.json.decode((folder / META).read_bytes(), type=Meta)
    except (OSError, msgspec.DecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        rule = f"is damaged: {META} {'is missing' if missing else f'cannot be read ({error})'}"
        raise Damaged(
            [Violation(path="resume", value=str(folder), rule=rule, legal=legal)]
        ) from error
    if meta.format > _FORMAT:
        rule = f"has format {meta.format}; this version reads up to {_FORMAT}"
        raise ConfigError([Violation(path="resume", value=str(folder), rule=rule, legal=legal)])
    return meta


def read_index(folder: Path) -> Index:
    """``index.json`` of a checkpoint; raises Damaged if it cannot be read."""
    try:
        return msgspec.json.decode((folder / _INDEX).read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError) as error:
        rule = f"is damaged: its index cannot be read ({error})"
        legal = "another of the run's checkpoints/step-N folders"
        raise Damaged(
            [Violation(path="resume", value=str(folder), rule=rule, legal=legal)]
        ) from error


def replaced(folder: Path) -> Path:
    """Where a checkpoint waits while another of the same step takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def _damaged(folder: Path, index: Index, world: World) -> list[str]:
    """What is wrong with this rank's share of the files; all are looked at by some rank."""
    names = sorted(index.files)[world.rank :: world.n_ranks]
    return list(_damages(folder, index, names))


def _damages(folder: Path, index: Index, names: list[str]) -> Iterator[str]:
    for name in names:
        wanted = index.files[name]
        try:
            size = (folder / name).stat().st_size
            if size != wanted.n_bytes:
                yield f"{name} has {size:,} bytes instead of {wanted.n_bytes:,}"
            elif tensorfile.checksum(folder / name) != wanted:
                yield f"{name} is not what was written (its SHA-256 differs)"
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"


def _gaps(index: Index) -> Iterator[str]:
    for name, whole in index.tensors.items():
        if sum(math.prod(piece.shape) for piece in whole.pieces) != math.prod(whole.shape):
            yield f"pieces of {name} do not make up the whole"


def _changes(meta: Meta, graph: LayerGraph, settings: Mapping[str, Any]) -> Iterator[str]:
    """What is legal to change and yet may not be meant."""
    for words in _changed(meta, settings, algorithm=False):
        yield f"was written under {words}: samples may come twice, or not at all"
    for words in _changed(meta, settings, algorithm=True):
        yield f"was written under {words}"
    if meta.fingerprint != graph.fingerprint:
        yield f'was written for another form of model "{meta.model}" with the same tensors'


def _changed(meta: Meta, settings: Mapping[str, Any], *, algorithm: bool) -> list[str]:
    """Settings that differ, of the algorithm and attacks on it or of the order of samples."""
    return [
        f"{name} = {literal(before)}, and it is {literal(value)} now"
        for name, value in settings.items()
        if (before := meta.settings.get(name, value)) != value
        and algorithm == (not name.startswith("train."))
    ]


def _kinds(index: Index, *, of_workers: bool) -> Iterator[str]:
    """Whether plain training would go on as an algorithm's workers, or they as plain training."""
    n = own.n_workers(index)
    if n and not of_workers:
        yield f"it is of an algorithm's {n} workers, and this run is plain training"
    if of_workers and not n and any(name.startswith("optimizer/") for name in index.tensors):
        yield "it is of plain training, and this run is of an algorithm's workers"


def _differences(
    tensors: Mapping[str, Parted], index: Index, everywhere: set[str]
) -> Iterator[str]:
    for name, tensor in tensors.items():
        stored = index.tensors.get(name)
        if stored is None:
            yield f"{name} is not in it"
        elif stored.shape != tensor.shape:
            yield f"{name} is {list(stored.shape)} there and {list(tensor.shape)} here"
    for name in index.tensors:
        if name not in everywhere and not name.startswith(EXTRA):
            yield f"{name} is unknown here"
    yield from _gaps(index)
