"""Weights from Hugging Face's safetensors to a checkpoint; a block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from shutil import disk_usage, rmtree

import msgspec

from ..errors import ConfigError, RunError, Violation
from ..graph.layer import LayerGraph
from . import checkpoint, tensorfile
from .pieces import Index, Piece, Whole
from .state import Progress
from .synced import sync_folder, write_synced
from .weights_names import misfits, named, some, wanted
from .weights_source import Source, read_source


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """``origin`` of a checkpoint's meta data: what it takes to write the source again.

    `headers` are those of the files by name; `names` gives each key's tensor in the checkpoint.
    """

    headers: dict[str, str]
    names: dict[str, str]
    index: str | None
    config: str | None


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What was written where; bytes of tensors, each counted once a file."""

    path: str
    files: tuple[str, ...]
    tensors: int
    n_bytes: int


def import_weights(graph: LayerGraph, path: Path, to: Path) -> Moved:
    """Make the run folder `to` with one checkpoint at step 0: these weights, kept as stored.

    Raises:
        ConfigError: files are damaged, or tensors missing, unknown or of other shapes; tied
            weights differ; `to` holds something already.
        RunError: it cannot be written.
    """
    source = read_source(path)
    names = named(source.tensors, graph)
    found = [(key, names[key], stored.held.shape) for key, stored in source.tensors.items()]
    violations = misfits(found, wanted(graph), path="--from", value=str(path))
    known = {key: name for key, name in names.items() if name is not None}
    owners = _owners(known)
    if not violations:
        violations = _unequal(source, known, owners)
    if violations:
        raise ConfigError(violations)
    origin = Origin(headers=source.headers, names=known, index=source.index, config=source.config)
    n_bytes = sum(source.tensors[key].held.n_bytes for key in owners.values())
    with appearing(to, n_bytes) as partial:
        step = partial / "checkpoints" / ".step-0.partial"
        step.mkdir(parents=True)
        n_files = 0
        for file in source.headers:
            keys = [k for k in owners.values() if source.tensors[k].file == file]
            if keys:
                _write(step, n_files, source, keys, known)
                n_files += 1
        meta = checkpoint.describe(
            graph, Progress(), n_ranks=n_files, origin=msgspec.to_builtins(origin)
        )
        folder = checkpoint.complete(step, meta)
        files = tuple(sorted(str(each.relative_to(partial)) for each in folder.iterdir()))
    return Moved(path=str(to), files=files, tensors=len(owners), n_bytes=n_bytes)


@contextmanager
def appearing(to: Path, n_bytes: int) -> Iterator[Path]:
    """A hidden folder that becomes `to` when all is written, or else goes away.

    Raises:
        ConfigError: `to` holds something already.
        RunError: it cannot be written; names the bytes needed and free.
    """
    refuse_taken(to)
    partial = to.absolute().with_name(f".{to.absolute().name}.partial")
    try:
        rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(to)
        sync_folder(to.absolute().parent)
    except OSError as error:
        above = next(each for each in to.absolute().parents if each.exists())
        free = disk_usage(above).free
        raise RunError(
            f"{to} cannot be written: {error.strerror or error}; it needs {n_bytes:,} bytes, "
            f"{free:,} are free"
        ) from error
    finally:
        rmtree(partial, ignore_errors=True)


def refuse_taken(to: Path) -> None:
    """Raise ConfigError if there is anything at `to` but an empty folder."""
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        rule = "is not empty" if to.is_dir() else "is a file"
        legal = "a folder that does not exist yet, or is empty"
        raise ConfigError([Violation(path="--to", value=str(to), rule=rule, legal=legal)])


def _owners(names: dict[str, str]) -> dict[str, str]:
    """The key that each tensor is read from: the one of its own name, or else the first."""
    owners: dict[str, str] = {}
    for key, name in names.items():
        if name not in owners or name.partition("/")[2] == key:
            owners[name] = key
    return owners


def _unequal(source: Source, names: dict[str, str], owners: dict[str, str]) -> list[Violation]:
    """Copies of tied weights that are not what their owner is."""
    differ = []
    for key, name in names.items():
        own = owners[name]
        mine, theirs = source.tensors[key].held, source.tensors[own].held
        same = key == own or (
            mine.dtype == theirs.dtype
            and all(a == b for a, b in zip_longest(source.blocks(key), source.blocks(own)))
        )
        if not same:
            differ.append(f"{key} and {own}")
    if not differ:
        return []
    rule = f"holds tied weights that differ: {some(differ)}"
    legal = "equal ones, or a model without the tie (tie_word_embeddings = false)"
    return [Violation(path="--from", value=str(source.path), rule=rule, legal=legal)]


def _write(
    folder: Path, number: int, source: Source, keys: list[str], names: dict[str, str]
) -> None:
    """Write tensors as the file of one rank, each as a single piece."""
    file = f"rank-{number:05}.safetensors"
    like, tensors = {}, {}
    for key in keys:
        held, name = source.tensors[key].held, names[key]
        offset = (0,) * len(held.shape)
        piece = f"{name}@{','.join(map(str, offset))}"
        like[piece] = (held.dtype, held.shape, held.n_bytes)
        tensors[name] = Whole(
            shape=held.shape,
            dtype=held.dtype,
            pieces=(Piece(file=file, key=piece, offset=offset, shape=held.shape),),
        )
    blocks = chain.from_iterable(source.blocks(key) for key in keys)
    total = tensorfile.write(folder / file, like, blocks, {})
    index = Index(tensors=tensors, files={file: total})
    write_synced(checkpoint.part_index(folder, number), msgspec.json.encode(index))
