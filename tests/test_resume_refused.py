"""A run that may not go on from a checkpoint leaves the folder, and the run in it, as they were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import polyreme as pr
from devices import TWO
from polyreme.errors import ConfigError

SPEC: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [4]},
    "data": {"kind": "digits"},
    "train": {"steps": 4, "global_batch": 8},
    "cluster": {"cpu_processes": 2},
    "data_parallel": {"rule": {"kind": "SGD", "lr": 0.1}},
    "simulate": {"workers": 2},
}
SERVED = ("data_parallel.sync={kind='ASGD', servers=1}", "data_parallel.sync.servers=2")
LOCAL = (
    "data_parallel.sync={kind='LocalSteps', every=2}",
    "data_parallel.sync={kind='LocalSteps', every=2}",
    "data_parallel.compress={kind='TopK', ratio=0.1}",
    "data_parallel.feedback.kind='ErrorFeedback'",
)
PLAIN = ("train.log_every=1", "data_parallel.rule.kind='Adam'")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _content(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


@pytest.mark.slice("simulate-served", "train-plain")
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        pytest.param(pr.simulate, SERVED, id="simulate-served"),
        pytest.param(pr.simulate, LOCAL, id="simulate-local"),
        pytest.param(pr.train, SERVED, id="train-served"),
        pytest.param(pr.train, PLAIN, id="train-plain", marks=TWO),
    ],
)
def test_a_refused_resume_leaves_the_folder_as_it_was(
    tmp_path: Path, warm: None, command: Any, changes: tuple[str, ...]
) -> None:
    first, *other = changes
    command(SPEC, overrides=[first], out=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "beside")
    before = _content(tmp_path)
    assert {"run/spec.toml", "run/summary.json", "run/report.html"} <= before.keys()
    refused = [first, *other]
    with pytest.raises(ConfigError, match="holds another state"):
        command(SPEC, overrides=refused, out=tmp_path / "run", resume="auto")
    with pytest.raises(ConfigError, match="holds another state"):
        command(SPEC, overrides=refused, out=tmp_path / "beside", resume=str(tmp_path / "run"))
    after = _content(tmp_path)
    names = before.keys() | after.keys()
    assert not {name for name in names if before.get(name) != after.get(name)}
