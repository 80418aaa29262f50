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
from typing import IO

from .. import runlog
from .. import spec as specs
from ..errors import ConfigError, RunError, Violation
from ..plan import store as plans
from ..plan.ir import Plan
from ..profile import store as profiles
from ..profile.record import Profile

LOG = "log.jsonl"
PLAN = "plan.json"
_MARKS = (LOG, "checkpoints", ".start.json")  # in a folder that a run has written
_FIRST = ("spec.toml", ".spec.toml.partial", PLAN, "profile.json", "ranks")  # may be there before
_PRINTED = (".log", ".txt", ".out", ".err")  # what a shell or a scheduler writes beside a run
_MOST_NAMED = 3


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other commands on this machine from writing the same run folder meanwhile.

    Raises:
        ConfigError: another one is at it, the folder cannot be made, or it holds other things.
    """
    refuse_file(folder)
    mark = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(mark, folder)
    except OSError as error:
        rule, legal = f"cannot be written ({error.strerror})", "a folder that may be written"
        raise ConfigError(
            [Violation(path="--out", value=str(folder), rule=rule, legal=legal)]
        ) from error
    with lock:
        try:
            _refuse_foreign(folder)
            yield
        finally:
            mark.unlink(missing_ok=True)


def _locked(mark: Path, folder: Path) -> IO[str]:
    """The lock's file, locked, and still the one of that name: its last holder removes it."""
    while True:
        file = mark.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, mark):
                return file
        except BlockingIOError:
            file.close()
            rule, legal = "is being written by another command", "another folder"
            raise ConfigError(
                [Violation(path="--out", value=str(folder), rule=rule, legal=legal)]
            ) from None
        file.close()


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def goes_on(folder: Path, resume: Sequence[Path]) -> bool:
    """Whether a run that begins from one of these checkpoints is the one in the folder."""
    return any(folder.resolve() in each.resolve().parents for each in resume)


def make_way(folder: Path, resume: Sequence[Path]) -> None:
    """Move a run that is in the folder and is not gone on with, and say where to."""
    if (folder / LOG).exists() and not goes_on(folder, resume):
        place = _beside(folder)
        folder.rename(place)
        sys.stderr.write(f"polyreme: the run in {folder} is kept as {place}\n")


def begin(folder: Path, spec: specs.Spec, top: Sequence[Plan], profile: Profile | None) -> None:
    """Write what the run is about to do: the first of the best plans.

    A run that goes on while the disk is full keeps what it wrote before, and says so; what an
    earlier attempt came to is no longer true.

    Raises:
        RunError: the folder cannot be written.
    """
    path = folder / "spec.toml"
    partial = folder / ".spec.toml.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "report.html"):
            (folder / name).unlink(missing_ok=True)
        partial.write_text(specs.dump(spec))
        partial.replace(path)
        plans.save(top[0], folder / PLAN, top)
        if profile is not None:
            profiles.save(profile, folder / "profile.json")
    except OSError as error:
        free = f"{shutil.disk_usage(folder.parent).free:,} bytes are free"
        why = f"{error.strerror}; {runlog.size_limit(error) or free}"
        what = f"{folder} cannot be written: {why}"
        if error.errno not in runlog.FULL or not (folder / LOG).exists():
            raise RunError(what) from error
        sys.stderr.write(f"polyreme: {what}; its spec and plan stay as they were\n")


def take_logs(logs: Path, folder: Path) -> None:
    """Move what other ranks said into the run folder's ``ranks/``; nothing said leaves nothing.

    What cannot be moved stays where it is, and that is said.
    """
    try:
        said = sorted(logs.glob("*")) if logs.is_dir() else []
        if said and folder.is_dir():
            (folder / "ranks").mkdir(exist_ok=True)
            for file in said:
                file.replace(folder / "ranks" / file.name)
        if logs.is_dir() and not any(logs.iterdir()):
            logs.rmdir()
    except OSError as error:
        sys.stderr.write(f"polyreme: {logs} cannot be moved into {folder}: {error.strerror}\n")


def writable(path: Path, option: str = "--out") -> None:
    """Make the folder of a file that is written after long work, or say now that it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        rule, legal = "cannot be written", "a file in a folder that may be written"
        raise ConfigError([Violation(path=option, value=str(path), rule=rule, legal=legal)])


def refuse_file(folder: Path) -> None:
    """Raise ConfigError if the run folder's path is taken by a file or cannot be written."""
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not above.is_dir():
        rule, legal = "is a file", "a folder to write, or one that does not exist yet"
        raise ConfigError([Violation(path="--out", value=str(above), rule=rule, legal=legal)])


def _refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if the run folder is there and holds something, and no run wrote it."""
    try:
        held = sorted(each.name for each in folder.iterdir())
    except OSError:  # it is not there, or what is done with it says what is wrong
        return
    foreign = [name for name in held if name not in _FIRST and Path(name).suffix not in _PRINTED]
    if not foreign or any(mark in held for mark in _MARKS):
        return
    more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
    rule = f"holds no run, but {', '.join(foreign[:_MOST_NAMED])}{more}"
    legal = "the folder of a run, an empty one, or one that does not exist yet"
    raise ConfigError([Violation(path="--out", value=str(folder), rule=rule, legal=legal)])


def refuse_absent(resume: str | None) -> None:
    """Raise ConfigError where ``--resume`` names what is not there; before any process is begun."""
    if resume not in (None, "auto") and not Path(resume).is_dir():
        legal = "auto, a folder checkpoints/step-N, or a run folder that has one"
        raise ConfigError(
            [Violation(path="resume", value=resume, rule="is no folder", legal=legal)]
        )


def _beside(folder: Path) -> Path:
    """The old run's new place: its name with the time of its last event."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime((folder / LOG).stat().st_mtime))
    place = folder.with_name(f"{folder.name}-{stamp}")
    number = 1
    while place.exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{stamp}-{number}")
    return place
