"""Checkpoints: global tensors in a folder that appears whole or not at all.

A folder is written under a hidden name, synced, renamed to ``checkpoints/step-N`` and only then
pointed to by ``checkpoints/latest``. So a run killed at any moment leaves the last complete
checkpoint, and a half-written one is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .. import __version__
from ..errors import ConfigError, RunError, Violation
from ..graph.layer import LayerGraph
from ..runlog import CheckpointEvent, Writer
from .mesh import World
from .state import Progress, State

_FORMAT = 1
_META = "meta.json"
_INDEX = ".metadata"  # torch's own, written last of its files
_SHARED_WAIT_S = 5.0  # network file systems show a new folder late
_MOST_NAMED = 5


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """``meta.json``: what a checkpoint was made of. `n_ranks` wrote it; any number may read it."""

    format: int
    progress: Progress
    model: str
    fingerprint: str
    n_ranks: int
    versions: Mapping[str, str]


def save(
    state: State, run_folder: Path, *, graph: LayerGraph, keep: int, log: Writer | None = None
) -> Path:
    """Write ``checkpoints/step-N``, point to it, and prune to `keep`; all ranks call it together.

    `log` (rank 0) is told. Raises RunError where the ranks do not share the run folder.
    """
    start_s = time.monotonic()
    world, progress = state.world, state.progress
    home = run_folder / "checkpoints"
    folder = home / f"step-{progress.step}"
    partial = home / f".step-{progress.step}.partial"
    if world.is_first:
        _sweep(home)
        partial.mkdir(parents=True)
    world.barrier()
    _check_shared(partial, world)
    tensors = state.tensors()
    with _quiet():
        state_dict_saver.save(
            tensors,
            storage_writer=FileSystemWriter(partial, thread_count=1),
            no_dist=world.group is None,
        )
    if world.is_first:
        meta = Meta(
            format=_FORMAT,
            progress=progress,
            model=graph.name,
            fingerprint=graph.fingerprint,
            n_ranks=world.n_ranks,
            versions={
                "polyreme": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        _write(partial / _META, msgspec.json.format(msgspec.json.encode(meta)))
        _sync_folder(partial)
        if folder.exists():
            folder.rename(_replaced(folder))
        partial.rename(folder)
        _sync_folder(home)
        _write(home / ".latest.partial", folder.name.encode())
        (home / ".latest.partial").replace(home / "latest")
        _sync_folder(home)
        prune(run_folder, keep)
    world.barrier()
    if log is not None and world.is_first:
        log.write(
            CheckpointEvent(
                t=log.t,
                attempt=log.attempt,
                step=progress.step,
                path=str(folder.relative_to(run_folder)),
                seconds=time.monotonic() - start_s,
            )
        )
    return folder


def load(state: State, folder: Path, *, graph: LayerGraph) -> Progress:
    """Fill the state's tensors in place from a checkpoint of any layout; all ranks together.

    Raises ConfigError naming what differs if it belongs to another model or rule.
    """
    meta = read_meta(folder)
    tensors = state.tensors()
    stored = _stored(folder)
    differences = list(_differences(tensors, stored, _all_names(tensors, state.world)))
    if differences:
        named = "; ".join(differences[:_MOST_NAMED])
        rest = len(differences) - _MOST_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        violation = Violation(
            path="resume",
            value=str(folder),
            rule=f'holds another state, of model "{meta.model}": {named}{more}',
            legal=f'a checkpoint of model "{graph.name}" with this rule',
        )
        raise ConfigError([violation])
    with _quiet():
        state_dict_loader.load(
            tensors,
            storage_reader=FileSystemReader(folder),
            no_dist=state.world.group is None,
        )
    return meta.progress


def newest(run_folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names, or else the complete one of the highest step."""
    home = run_folder / "checkpoints"
    with contextlib.suppress(OSError):
        name = (home / "latest").read_text().strip()
        for named in (home / name, _replaced(home / name)):
            if is_complete(named):
                return named
    return max(_complete(home), key=_step, default=None)


def find(resume: str, run_folder: Path) -> Path | None:
    """What ``--resume`` names: ``auto`` (the run's newest, if any), a checkpoint, or a run folder.

    Raises ConfigError where the folder is neither.
    """
    if resume == "auto":
        return newest(run_folder)
    folder = Path(resume)
    found = folder if is_complete(folder) else newest(folder)
    if found is None:
        rule = "holds no complete checkpoint" if folder.is_dir() else "is no folder"
        legal = "auto, a folder checkpoints/step-N, or a run folder that has one"
        raise ConfigError([Violation(path="resume", value=resume, rule=rule, legal=legal)])
    return found


def prune(run_folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints; never the one in use."""
    assert keep >= 1, "the newest always stays"
    home = run_folder / "checkpoints"
    latest = newest(run_folder)
    # A run that went back to an earlier step writes lower numbers than those it left behind.
    age = sorted(_complete(home), key=lambda folder: (folder / _META).stat().st_mtime_ns)
    for folder in age[:-keep]:
        if folder != latest:
            folder.rename(home / f".{folder.name}.pruned")
    _sweep(home)


def is_complete(folder: Path) -> bool:
    """Whether a folder is a whole checkpoint."""
    return (folder / _META).is_file() and (folder / _INDEX).is_file()


def read_meta(folder: Path) -> Meta:
    """``meta.json`` of a checkpoint; ConfigError if it is missing, broken or of a later format."""
    legal = "a complete checkpoints/step-N folder"
    try:
        meta = msgspec.json.decode((folder / _META).read_bytes(), type=Meta)
    except (OSError, msgspec.DecodeError) as error:
        rule = f"cannot be read as a checkpoint ({error})"
        raise ConfigError(
            [Violation(path="resume", value=str(folder), rule=rule, legal=legal)]
        ) from error
    if meta.format > _FORMAT:
        rule = f"has format {meta.format}; this version reads up to {_FORMAT}"
        raise ConfigError([Violation(path="resume", value=str(folder), rule=rule, legal=legal)])
    return meta


def _complete(home: Path) -> list[Path]:
    return [folder for folder in home.glob("step-*") if is_complete(folder)]


def _step(folder: Path) -> int:
    return read_meta(folder).progress.step


def _sweep(home: Path) -> None:
    """Remove what killed runs left half-written and what was pruned."""
    for aside in home.glob(".step-*.replaced"):
        folder = home / aside.name.removeprefix(".").removesuffix(".replaced")
        if not folder.exists():  # killed between two renames: it may be all there is
            aside.rename(folder)
    for leftover in home.glob(".step-*"):
        shutil.rmtree(leftover)


def _replaced(folder: Path) -> Path:
    """Where a checkpoint waits while another of the same step takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _check_shared(partial: Path, world: World) -> None:
    end_s = time.monotonic() + _SHARED_WAIT_S
    while not partial.is_dir():
        if time.monotonic() > end_s:
            raise RunError(
                f"rank {world.rank} does not see {partial}, which rank 0 made: the run folder "
                "must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def _stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a checkpoint by name; ConfigError if its index is damaged."""
    try:
        index = FileSystemReader(folder).read_metadata()
    except Exception as error:  # unpickling what is no pickle may raise anything
        rule = f"is damaged: its index cannot be read ({type(error).__name__}: {error})"
        legal = "another of the run's checkpoints/step-N folders"
        violation = Violation(path="resume", value=str(folder), rule=rule, legal=legal)
        raise ConfigError([violation]) from error
    return {
        name: tuple(entry.size)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _all_names(tensors: Mapping[str, torch.Tensor], world: World) -> set[str]:
    """Names on any rank."""
    if world.group is None:
        return set(tensors)
    found: list[Any] = [None] * world.n_ranks
    torch.distributed.all_gather_object(found, list(tensors), group=world.group)
    return {name for names in found for name in names}


def _differences(
    tensors: Mapping[str, torch.Tensor],
    stored: Mapping[str, tuple[int, ...]],
    everywhere: set[str],
) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name not in stored:
            yield f"{name} is not in it"
        elif stored[name] != tuple(tensor.shape):
            yield f"{name} is {list(stored[name])} there and {list(tensor.shape)} here"
    for name in stored:
        if name not in everywhere:
            yield f"{name} is unknown here"
