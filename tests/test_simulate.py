"""`polyreme simulate`: the folder that training writes, on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import polyreme as pr
import refusals
from devices import at_least
from polyreme import api, runlog, spec
from polyreme.errors import ConfigError, RunError

SPEC: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [4]},
    "data": {"kind": "digits"},
    "train": {"steps": 6, "global_batch": 12, "checkpoint_every": 4, "eval_every": 3},
    "data_parallel": {
        "rule": {"kind": "SNGM", "lr": 0.1, "momentum": 0.9},
        "sync": {"kind": "LocalSteps", "every": 2},
        "compress": {"kind": "TopK", "ratio": 0.1},
        "feedback": {"kind": "ErrorFeedback"},
    },
    "simulate": {"workers": 3, "compute": {"kind": "constant", "seconds": 0.5}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _steps(folder: Path) -> list[runlog.StepEvent]:
    return [e for e in runlog.read(folder / "log.jsonl") if isinstance(e, runlog.StepEvent)]


@at_least(3)
def test_a_simulated_run_leaves_what_a_run_in_processes_leaves(tmp_path: Path, warm: None) -> None:
    simulated = pr.simulate(SPEC, out=tmp_path / "virtual")
    trained = pr.train(SPEC, out=tmp_path / "real", devices=3)
    assert trained is not None
    virtual, real = _steps(tmp_path / "virtual"), _steps(tmp_path / "real")
    for name in ("step", "loss", "lr", "samples", "wire_bytes", "skipped"):
        assert [getattr(e, name) for e in virtual] == [getattr(e, name) for e in real], name
    mine, theirs = (
        load_file(tmp_path / each / "final.safetensors") for each in ("virtual", "real")
    )
    assert all((mine[name] == tensor).all() for name, tensor in theirs.items())
    assert simulated.metrics == pytest.approx(dict(trained.metrics), rel=1e-6)
    assert {p.name for p in (tmp_path / "real").iterdir()} - {"profile.json"} == {
        p.name for p in (tmp_path / "virtual").iterdir()
    }


def test_simulated_seconds_and_utilisation_are_those_of_the_virtual_clock(tmp_path: Path) -> None:
    slow = {"kind": "hosts", "per_host": 1, "latency_s": 0.25, "bytes_per_s": 1e12}
    spec = SPEC | {"simulate": SPEC["simulate"] | {"network": slow}}
    found = pr.simulate(spec, out=tmp_path / "run")
    # Three rounds of two gradients; numbers, then packets go round a ring of three.
    assert found.seconds == pytest.approx(3 * (2 * 0.5 + 2 * 2 * 0.25), rel=1e-6)
    assert found.basis["utilisation"] == "simulated"
    assert found.utilisation == pytest.approx(0.5, rel=1e-6)
    assert found.workers == 3
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Where virtual time went" in page
    assert "wall time" not in page
    named = "SNGM, LocalSteps (every 2), TopK (ratio 0.1), ErrorFeedback"
    assert page.count(named) == 2  # in the heading, and instead of buckets beside the plan
    assert "gradients in buckets" not in page
    plain = {"rule": SPEC["data_parallel"]["rule"]}
    pr.simulate(spec | {"data_parallel": plain}, out=tmp_path / "plain")
    api.report([tmp_path / "run", tmp_path / "plain"], out=tmp_path / "both.html")
    both = (tmp_path / "both.html").read_text()
    assert named in both
    assert "<th>algorithm</th>" in both.replace(' scope="col"', "")


def test_a_simulation_that_was_asked_to_end_goes_on_where_it_was(tmp_path: Path) -> None:
    pr.simulate(SPEC, out=tmp_path / "whole")
    pr.simulate(SPEC, overrides=["train.steps=4"], out=tmp_path / "run")
    pr.simulate(SPEC, out=tmp_path / "run", resume="auto")
    whole, parts = (load_file(tmp_path / each / "final.safetensors") for each in ("whole", "run"))
    assert all((whole[name] == tensor).all() for name, tensor in parts.items())
    assert [event.step for event in _steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_simulation_that_has_nothing_left_to_do_keeps_its_utilisation(tmp_path: Path) -> None:
    before = pr.simulate(SPEC, out=tmp_path / "run")
    after = pr.simulate(SPEC, out=tmp_path / "run", resume="auto")
    assert before.utilisation is not None
    assert 0 < before.utilisation <= 1
    assert (after.utilisation, after.w) == (before.utilisation, before.w)


def test_a_simulation_that_diverges_leaves_the_samples_and_a_summary_of_its_clock(
    tmp_path: Path,
) -> None:
    overrides = [
        "data_parallel={rule={kind='SGD', lr=1e30}, topology={kind='Ring'}}",
        "train.max_skipped=1",
    ]
    with pytest.raises(RunError, match=r"more than train\.max_skipped"):
        pr.simulate(SPEC, overrides=overrides, out=tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "nonfinite").iterdir())
    assert [name.split(".")[1] for name in kept] == ["rank-0", "rank-1", "rank-2"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["basis"]["utilisation"]) == ("failed", "simulated")


def test_plain_training_is_simulated_too(tmp_path: Path) -> None:
    plain = {key: value for key, value in SPEC.items() if key != "data_parallel"}
    assert pr.simulate(plain, workers=2, out=tmp_path / "run").workers == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("simulate.workers=0", "simulate.workers"),
        ("parallel.shard=2", "is not split here"),
        ("data_parallel.feedback.kind='GMC'", "keeps momentum"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_runs(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        pr.simulate(SPEC, overrides=[override], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [pr.train, pr.simulate])
def test_a_folder_of_other_things_is_refused_before_anything_runs(
    tmp_path: Path, command: Any
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.py", "b.py", "c.py", "d.py", "spec.toml"):
        (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no run, but a.py, b.py, c.py and 1 more. Legal"):
        command(SPEC, out=folder)
    assert len(list(folder.iterdir())) == 5
    assert (folder / "spec.toml").read_text() == "mine"
    assert not list(tmp_path.glob(".mine.*"))


def test_a_folder_that_is_empty_or_of_a_run_is_written_beside_what_lies_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.out").write_text("of a scheduler")
    pr.simulate(SPEC, out=folder)
    (folder / "notes.txt").write_text("mine")
    pr.simulate(SPEC, out=folder, resume="auto")
    assert (folder / "notes.txt").exists()


@pytest.mark.long
def test_a_run_that_diverges_without_a_bad_step_says_so_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(spec.dump(api.read(SPEC)))
    wild = ("--set", "data_parallel.rule={kind='SGD', lr=1e4}")
    for command in (("simulate",), ("train", "--devices", "2")):
        out = str(tmp_path / f"run-{command[0]}")
        said = refusals.command((*command, "spec.toml", "--out", out, *wild))
        assert said.code == 0, said.err
        assert "this run diverged" in " ".join(said.out.split())


def test_the_command_prints_what_the_run_came_to(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(spec.dump(api.read(SPEC)))
    said = refusals.command(("simulate", "spec.toml", "--workers", "2", "--out", "run"))
    assert said.code == 0, said.err
    assert "virtual time" in said.out
    # Nothing was measured or planned before, and nothing is missed.
    assert "profile.json" not in said.out
    assert "predicted" not in said.out
