"""Finds the files that a path, folder or glob names, and reads them, gzip included."""

from __future__ import annotations

import glob
import gzip
import zlib
from pathlib import Path

from ..errors import ConfigError, Violation, literal
from ..nearby import nearby

_DATA = '"data/*" (any file, folder or glob that names files that are there)'
_SUFFIXES = (".txt", ".md", ".bin", ".svm", ".svmlight", ".libsvm", ".gz")


def find(path: str) -> tuple[Path, ...]:
    """Files of a file, a folder (all below it, hidden ones left out) or a glob, sorted by name.

    Empty when nothing is there.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return (place,)
    if place.is_dir():
        return tuple(sorted(p for p in place.rglob("*") if _plain(p, place)))
    # Path.glob takes no absolute pattern and does not leave hidden files out.
    matches = glob.glob(str(place), recursive=True)  # noqa: PTH207
    return tuple(sorted(match for match in map(Path, matches) if match.is_file()))


def _plain(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden


def _looks_like_data(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file()


def missing(field: str, path: str) -> list[Violation]:
    """A violation if no file is found at `path`; `field` names the option (``data.path``)."""
    if find(path):
        return []
    return [
        Violation(
            path=field,
            value=path,
            rule=f"names no file that is there (looked for {Path(path).expanduser().absolute()})",
            legal=", ".join((*map(literal, nearby(path, _looks_like_data)), _DATA)),
        )
    ]


def parts(path: str, heldout: float | str) -> list[Violation]:
    """What is missing of the files to train on and to hold out, or is in both."""
    found = missing("data.path", path)
    if not isinstance(heldout, str):
        return found
    found += missing("data.heldout", heldout)
    both = {file.resolve() for file in find(path)} & {file.resolve() for file in find(heldout)}
    if both:
        rule = f"names a file that data.path trains on too: {min(both).name}"
        legal = "0.1 (a share to hold out), or other files than those of data.path"
        found.append(Violation(path="data.heldout", value=heldout, rule=rule, legal=legal))
    return found


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked where it ends in ``.gz``; ConfigError if it is damaged."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, str(error)) from error


def unreadable(path: Path, why: str, field: str = "data.path") -> ConfigError:
    """The error for a file that is there but is not what it should be."""
    return ConfigError(
        [
            Violation(
                path=field,
                value=str(path),
                rule=f"cannot be read ({why})",
                legal="a whole, readable file of the stated format",
            )
        ]
    )
