"""Run folders: begun, resumed, ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import runlog
from .. import spec as specs
from ..errors import ConfigError, RunError, Violation
from ..plan import store as plans
from ..plan.ir import Plan
from ..profile import store as profiles
from ..profile.record import Profile

LOG = "log.jsonl"
PLAN = "plan.json"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other commands on this machine from writing the same run folder meanwhile.

    Raises:
        ConfigError: another one is at it, or the folder cannot be made.
    """
    refuse_file(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = folder.parent / f".{folder.name}.lock"
    with mark.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule, legal = "is being written by another command", "another folder"
            raise ConfigError(
                [Violation(path="--out", value=str(folder), rule=rule, legal=legal)]
            ) from None
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)


def make_way(folder: Path, resume: Path | None) -> None:
    """Move a run that is in the folder and is not gone on with, and say where to."""
    if (folder / LOG).exists() and (resume is None or folder not in resume.parents):
        place = _beside(folder)
        folder.rename(place)
        sys.stderr.write(f"polyreme: the run in {folder} is kept as {place}\n")


def begin(folder: Path, spec: specs.Spec, top: Sequence[Plan], profile: Profile | None) -> None:
    """Write what the run is about to do: the first of the best plans.

    A run that goes on while the disk is full keeps what it wrote before, and says so.

    Raises:
        RunError: the folder cannot be written.
    """
    path = folder / "spec.toml"
    partial = folder / ".spec.toml.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(specs.dump(spec))
        partial.replace(path)
        plans.save(top[0], folder / PLAN, top)
        if profile is not None:
            profiles.save(profile, folder / "profile.json")
    except OSError as error:
        free = shutil.disk_usage(folder.parent).free
        what = f"{folder} cannot be written: {error.strerror}; {free:,} bytes are free"
        if error.errno not in runlog.FULL or not (folder / LOG).exists():
            raise RunError(what) from error
        sys.stderr.write(f"polyreme: {what}; its spec and plan stay as they were\n")


def take_logs(logs: Path, folder: Path) -> None:
    """Move what other ranks said into the run folder's ``ranks/``; nothing said leaves nothing."""
    said = sorted(logs.glob("*")) if logs.is_dir() else []
    if said and folder.is_dir():
        (folder / "ranks").mkdir(exist_ok=True)
        for file in said:
            file.replace(folder / "ranks" / file.name)
    if logs.is_dir() and not any(logs.iterdir()):
        logs.rmdir()


def writable(path: Path) -> None:
    """Make the folder of a file that is written after long work, or say now that it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        rule, legal = "cannot be written", "a file in a folder that may be written"
        raise ConfigError([Violation(path="--out", value=str(path), rule=rule, legal=legal)])


def refuse_file(folder: Path) -> None:
    """Raise ConfigError if the run folder's path is taken by a file or cannot be written."""
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not above.is_dir():
        rule, legal = "is a file", "a folder to write, or one that does not exist yet"
        raise ConfigError([Violation(path="--out", value=str(above), rule=rule, legal=legal)])


def _beside(folder: Path) -> Path:
    """The old run's new place: its name with the time of its last event."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime((folder / LOG).stat().st_mtime))
    place = folder.with_name(f"{folder.name}-{stamp}")
    number = 1
    while place.exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{stamp}-{number}")
    return place
