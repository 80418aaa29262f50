"""What a command says on stderr when a run breaks off: every failure, and each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import refusals
from polyreme import cli
from polyreme.errors import RunError

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


def test_a_run_that_is_not_finite_says_so_once(home: Path) -> None:
    said = refusals.command(("train", "spec.toml", "--out", "run", "--devices", "1"))
    assert said.code == 1, said.err
    assert said.err.count("more than train.max_skipped") == 1, said.err
    assert (home / "run" / "report.html").exists()


@pytest.mark.parametrize("said", [False, True])
def test_an_error_is_said_unless_it_was(said: bool, capsys: Any) -> None:
    error = RunError("the card fell off")
    error.said = said

    def fail() -> None:
        raise error

    with pytest.raises(cli.typer.Exit):
        cli._end(fail, False)
    assert capsys.readouterr().err == ("" if said else "polyreme: the card fell off\n")
