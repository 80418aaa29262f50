"""Versions of what is installed, against what the package asks for."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence

from .row import Row

_PACKAGE = "polyreme"
_REQUIREMENT = re.compile(r"([\w.-]+)[^>=<;]*(?:>=([\d.]+))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_USES = {
    "tensorboard": "report.trackers",
    "wandb": "report.trackers",
    "datasets": 'data.kind = "datasets"',
}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_COMPILERS = ("c++", "g++", "clang++")


def rows(
    version: Callable[[str], str | None] | None = None,
    which: Callable[[str], str | None] = shutil.which,
) -> Iterator[Row]:
    """Findings about software; `version` and `which` are what to ask for it."""
    ask = version or installed
    lines, python = _asked()
    yield _python(python)
    needed, extras = requirements(lines)
    found = ask(_PACKAGE)
    yield Row(
        group="software",
        what=_PACKAGE,
        value=found or "not installed: what it asks of others is not known",
        status="ok" if found else "note",
        remedy="" if found else "pip install -e . (in its source folder)",
    )
    for name, least in needed.items():
        yield _package(name, ask(name), least)
    for extra, packages in extras.items():
        if extra in _USES:
            yield _extra(extra, packages, ask)
    browser = next(filter(None, map(which, _BROWSERS)), None)
    yield Row(
        group="extras",
        what="chromium",
        value=browser or "not found",
        status="ok" if browser else "missing",
        remedy="" if browser else "install chromium (pictures of reports; pages need none)",
    )
    yield _compiler(which)


def _asked() -> tuple[Sequence[str], str]:
    """Requirement lines of this package, and the Python it asks for."""
    try:
        metadata = importlib.metadata.metadata(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return (), ">=3.11"
    return metadata.get_all("Requires-Dist") or (), str(metadata["Requires-Python"])


def installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(lines: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Least versions by name: what is needed, and what each extra asks for.

    >>> requirements(["torch>=2.11", 'wandb>=0.19; extra == "wandb"'])
    ({'torch': '2.11'}, {'wandb': {'wandb': '0.19'}})
    """
    needed: dict[str, str] = {}
    extras: dict[str, dict[str, str]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None:
            continue
        extra = _EXTRA.search(line)
        into = needed if extra is None else extras.setdefault(extra[1], {})
        into[match[1]] = match[2] or "0"
    return needed, extras


def _python(asked: str) -> Row:
    least = asked.lstrip(">=")
    found = platform.python_version()
    old = _older(found, least)
    return Row(
        group="software",
        what="python",
        value=f"{found} (asked: {asked}) at {sys.executable}",
        status="missing" if old else "ok",
        needed=True,
        remedy=f"make PYTHON=python{least}" if old else "",
    )


def _package(name: str, found: str | None, least: str) -> Row:
    value = f"{found or 'not installed'} (asked: >= {least})"
    if found is not None and not _older(found, least):
        return Row(group="software", what=name, value=value, needed=True)
    remedy = f'pip install "{name}>={least}"'
    return Row(
        group="software", what=name, value=value, status="missing", needed=True, remedy=remedy
    )


def _extra(extra: str, packages: Mapping[str, str], ask: Callable[[str], str | None]) -> Row:
    lacking = [
        name
        for name, least in packages.items()
        if (found := ask(name)) is None or _older(found, least)
    ]
    if not lacking:
        return Row(group="extras", what=extra, value=", ".join(str(ask(name)) for name in packages))
    return Row(
        group="extras",
        what=extra,
        value=f"not installed (for {_USES[extra]})",
        status="missing",
        remedy=f'pip install "{_PACKAGE}[{extra}]"',
    )


def _compiler(which: Callable[[str], str | None]) -> Row:
    """What torch.compile needs on a processor: a C++ compiler and Python's headers."""
    compiler = next(filter(None, map(which, _COMPILERS)), None)
    headers = sysconfig.get_path("include")
    if compiler and _has(headers):
        return Row(group="extras", what="compiler", value=compiler)
    lack = "a C++ compiler (g++)" if not compiler else f"Python's headers ({headers})"
    return Row(
        group="extras",
        what="compiler",
        value=f"{compiler or 'no compiler'}; needed by train.compile = true on processors",
        status="missing",
        remedy=f"install {lack}, or leave train.compile false",
    )


def _has(folder: str) -> bool:
    from pathlib import Path

    return (Path(folder) / "Python.h").is_file()


def _older(found: str, least: str) -> bool:
    return _numbers(found) < _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:3]]
