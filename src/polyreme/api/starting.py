"""What an attempt of a run is begun from: one rule for commands, their restarts and torchrun's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .. import runlog
from ..runtime import checkpoints

_MARK = ".start.json"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was begun; rank 0 leaves it in the run folder.

    `launch` names the command or the launcher's job that did, `resume` the checkpoints of which
    the first that is whole was to be loaded (none: from the start), `before` those that were in
    the folder already, with the time they were written in ns.
    """

    launch: str
    resume: tuple[str, ...] = ()
    before: tuple[tuple[str, int], ...] = ()

    @property
    def first(self) -> tuple[Path, ...]:
        """Checkpoints that the first attempt tries, in order."""
        return tuple(map(Path, self.resume))

    def again(self, folder: Path) -> tuple[Path, ...]:
        """Checkpoints that a later attempt tries: the run's own, then what it was begun from."""
        before = set(self.before)
        own = [each for each in checkpoints.candidates(folder) if _stamp(each) not in before]
        more = [each for each in self.first[:-1] if each.is_dir()]
        return (*own, *more, *self.first[-1:])


def begin(resume: str | None, folder: Path, launch: str) -> Start:
    """How a run begins that a command asks for. ConfigError where `resume` names nothing."""
    found = () if resume is None else checkpoints.find(resume, folder)
    return Start(
        launch=launch,
        resume=tuple(map(str, found)),
        before=tuple(map(_stamp, checkpoints.candidates(folder))),
    )


def leave(start: Start, folder: Path) -> None:
    """Leave the mark in the run folder. Raises RunError on a full disk."""
    runlog.write_whole(folder / _MARK, msgspec.json.encode(start))


def begun(folder: Path, launch: str) -> Start | None:
    """How this command or job began the run in the folder; None if another did, or none."""
    try:
        start = msgspec.json.decode((folder / _MARK).read_bytes(), type=Start)
    except (OSError, msgspec.DecodeError):
        return None
    return start if start.launch == launch else None


def _stamp(folder: Path) -> tuple[str, int]:
    """What sets a checkpoint apart from a later one of the same step."""
    return folder.name, checkpoints.written_ns(folder)
