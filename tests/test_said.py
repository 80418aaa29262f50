"""What a command says on stderr when a run breaks off: every failure, and each once."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import refusals
from polyreme import ending, runlog
from polyreme.api import aftermath
from polyreme.errors import RunError
from polyreme.report import page
from polyreme.runtime.saver import Saver
from test_runlog import step_event

SPEC = """
model = { kind = "mlp", hidden = [4] }
data = { kind = "digits" }
cluster = { cpu_processes = 1 }
[train]
steps = 4
global_batch = 8
max_skipped = 1
[data_parallel]
rule = { kind = "SGD", lr = 1e38 }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_is_not_finite_says_so_once(home: Path, warm: None) -> None:
    said = refusals.command(("train", "spec.toml", "--out", str(home / "run"), "--devices", "1"))
    assert said.code == 1, said.err
    assert said.err.count("more than train.max_skipped") == 1, said.err
    assert (home / "run" / "report.html").exists()


@pytest.mark.parametrize("said", [False, True])
def test_an_error_is_said_unless_it_was(said: bool, capsys: Any) -> None:
    error = RunError("the card fell off")
    error.said = said

    def fail() -> None:
        raise error

    with pytest.raises(ending.typer.Exit):
        ending.end(fail, False)
    assert capsys.readouterr().err == ("" if said else "polyreme: the card fell off\n")


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may have more than 5,000 bytes.

    Not a fixture: pytest says how a test ended before it tears one down, and what it says
    may go to a file that is longer.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LIMIT = r"File too large; it needs [\d,]+ bytes, one file may have 5,000: .* \(ulimit -f unlimited"


@small_files()
def test_the_limit_on_a_file_is_not_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=LIMIT):
        runlog.write_whole(tmp_path / "page", bytes(5_001))
    log = runlog.Writer(tmp_path / "log.jsonl")
    for number in range(50):
        log.write(step_event(number))
    with pytest.raises(RunError, match=LIMIT):
        log.close()
    words = Saver._in_words
    saver = SimpleNamespace(_needed_bytes=7, _partial=tmp_path / "new", _run_folder=tmp_path)
    with pytest.raises(OSError, match="too large") as refused:
        (tmp_path / "part").write_bytes(bytes(5_001))
    assert re.search(f"{LIMIT}.*; there is none before it", words(saver, refused.value))  # type: ignore[arg-type]


def test_a_summary_that_was_made_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EFBIG, "File too large", "report.html")

    log = runlog.Writer(tmp_path / "log.jsonl")
    log.write(step_event())
    log.close()
    monkeypatch.setattr(aftermath, "_summarise", lambda *_: None)
    monkeypatch.setattr(page, "render", refuse)
    aftermath.conclude(None, tmp_path, "failed", (None, None))  # type: ignore[arg-type]
    assert capsys.readouterr().err.startswith("polyreme: no report was made: ")
