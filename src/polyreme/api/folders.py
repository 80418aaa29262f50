"""Run folders: begun, resumed, ended."""

from __future__ import annotations

import time
from pathlib import Path

from .. import spec as specs
from ..errors import ConfigError, Violation
from ..plan import store as plans
from ..plan.ir import Plan
from ..profile import store as profiles
from ..profile.record import Profile

LOG = "log.jsonl"


def begin(
    folder: Path, spec: specs.Spec, plan: Plan, profile: Profile | None, *, resume: Path | None
) -> None:
    """Write what the run is about to do. A run that was there and is not resumed is moved away."""
    if (folder / LOG).exists() and (resume is None or folder not in resume.parents):
        folder.rename(_beside(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.toml").write_text(specs.dump(spec))
    plans.save(plan, folder / "plan.json")
    if profile is not None:
        profiles.save(profile, folder / "profile.json")


def moved_to(folder: Path, resume: Path | None) -> Path | None:
    """Where `begin` will move a run that is there; None if there is none or it is resumed."""
    there = (folder / LOG).exists() and (resume is None or folder not in resume.parents)
    return _beside(folder) if there else None


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
