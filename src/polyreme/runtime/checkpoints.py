"""The checkpoints of a run: the newest, what ``--resume`` names, which are damaged, which stay."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

from ..errors import ConfigError, RunError, Violation
from .checkpoint import META, is_complete, read_index, read_meta, replaced


def newest(run_folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names, or else the complete one of the highest step."""
    home = run_folder / "checkpoints"
    pointed = _pointed(home)
    if pointed is not None and is_complete(pointed):
        return pointed
    return max(filter(is_complete, _named(home)), key=_step, default=None)


def candidates(run_folder: Path) -> tuple[Path, ...]:
    """The newest checkpoint of a run that nobody writes to, and those of earlier steps after it.

    One that had to make way for another of its step, which never came, is put back first.
    """
    home = run_folder / "checkpoints"
    _put_back(home)
    first = _pointed(home) or max(_named(home), key=_step, default=None)
    if first is None:
        return ()
    older = [folder for folder in _named(home) if _step(folder) < _step(first)]
    return (first, *sorted(older, key=_step, reverse=True))


def find(resume: str, run_folder: Path) -> tuple[Path, ...]:
    """What ``--resume`` names: a checkpoint, a run folder's newest, or ``auto``.

    ``auto`` is the run's newest, and those before it in case it is damaged; none if there is none.

    Raises ConfigError where it is neither, Damaged where it cannot be read.
    """
    if resume == "auto":
        return candidates(run_folder)
    folder = Path(resume)
    if _is_named(folder) or is_complete(folder):
        read_meta(folder)
        read_index(folder)
        return (folder,)
    if folder.resolve() == run_folder.resolve():
        _put_back(folder / "checkpoints")
    found = newest(folder)
    if found is None:
        rule, legal = "holds no complete checkpoint", "auto, a checkpoint, or a run that has one"
        raise ConfigError([Violation(path="resume", value=resume, rule=rule, legal=legal)])
    return (found,)


def set_aside(folder: Path) -> Path:
    """Take a damaged checkpoint from among the run's; where it is now. RunError if it stays."""
    place = folder.with_name(f"damaged.{folder.name}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        return folder.rename(place)
    except OSError as error:
        what = f"{folder} is damaged and cannot be renamed to {place.name}: {error.strerror}"
        raise RunError(f"{what}; make its folder writable, or name another by --resume") from error


def prune(run_folder: Path, keep: int, best: str | None = None) -> None:
    """Delete all but the `keep` newest checkpoints; never the one in use.

    Nor the one whose metric `best` is the best of all (a loss that is lowest, or else what is
    highest); one without it, or whose metric is not finite, is never the best.
    """
    assert keep >= 1, "the newest always stays"
    home = run_folder / "checkpoints"
    # A run that went back to an earlier step writes lower numbers than those it left behind.
    age = sorted(_named(home), key=written_ns)
    stay = {newest(run_folder), *age[-keep:]}
    if best is not None:
        stay.add(best_of(age, best))
    for folder in age:
        if folder not in stay:
            aside = home / f".{folder.name}.pruned"
            folder.rename(aside)
            shutil.rmtree(aside)


def best_of(folders: list[Path], metric: str) -> Path | None:
    """The checkpoint with the best value of a metric; the latest of equal ones.

    One whose meta data cannot be read is none.
    """
    sign = -1.0 if metric.endswith("loss") else 1.0
    scored = []
    for folder in folders:
        try:
            value = read_meta(folder).metrics.get(metric)
        except ConfigError:
            continue
        if value is not None and math.isfinite(value):
            scored.append((sign * value, _step(folder), folder))
    return max(scored)[2] if scored else None


def sweep(home: Path) -> None:
    """Remove what killed runs left half-written and what was pruned."""
    _put_back(home)
    for leftover in home.glob(".step-*"):
        shutil.rmtree(leftover)


def _put_back(home: Path) -> None:
    """Undo a replacement that was killed between its two renames: it may be all there is."""
    for aside in home.glob(".step-*.replaced"):
        folder = home / aside.name.removeprefix(".").removesuffix(".replaced")
        if not folder.exists():
            aside.rename(folder)


def written_ns(folder: Path) -> int:
    """When a checkpoint was completed; 0 where that is lost."""
    try:
        return (folder / META).stat().st_mtime_ns
    except OSError:
        return 0


def _pointed(home: Path) -> Path | None:
    """What ``latest`` names, if it is there."""
    try:
        name = (home / "latest").read_text().strip()
    except OSError:
        return None
    found = (each for each in (home / name, replaced(home / name)) if each.is_dir())
    return next(found, None)


def _named(home: Path) -> list[Path]:
    """Checkpoints: a folder gets such a name when it is whole, and what it lacks then is damage."""
    return [folder for folder in home.glob("step-*") if _is_named(folder)]


def _is_named(folder: Path) -> bool:
    return re.fullmatch(r"step-\d+", folder.name) is not None and folder.is_dir()


def _step(folder: Path) -> int:
    """The step in a checkpoint's name, which is there when its files are damaged."""
    return int(folder.name.removeprefix(".").split(".")[0].rpartition("-")[2])
