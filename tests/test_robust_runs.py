"""Whole runs of which three of ten workers send NaN, infinity and the opposite of gradients."""

from __future__ import annotations

import html
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polyreme import api, runlog
from polyreme.errors import ConfigError, RunError
from polyreme.report import suspects
from polyreme.report.runs import read_run

EXAMPLE = Path(__file__).parent.parent / "examples" / "robust.toml"
HOSTILE = (
    'simulate.attack=[{kind="NotFinite",workers=[2]},'
    '{kind="NotFinite",value="inf",workers=[5]},{kind="SignFlip",workers=[8]}]'
)
AGGREGATES = {
    "CenteredClipping": 'kind="CenteredClipping",tau=1.0,iterations=3',
    "MultiKrum": 'kind="MultiKrum"',
}


def _overrides(aggregate: str, *, hostile: bool) -> list[str]:
    given = f"data_parallel.aggregate={{{AGGREGATES[aggregate]},byzantine=3}}"
    return [given, HOSTILE if hostile else "simulate.attack=[]"]


def _accuracy(summary: runlog.Summary | None) -> float:
    assert summary is not None
    assert summary.status == "done"
    found = summary.metrics["test_accuracy"]
    assert found is not None
    return found


def _named(folder: Path) -> None:
    """Log, terminal's line and page name the hostile workers, each in most of the steps."""
    run = read_run(folder)
    assert set(suspects.usual(run)) == {2, 5, 8}
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert all({2, 5} <= set(event["suspects"]) for event in steps)
    assert not any(event["skipped"] for event in steps)
    line = suspects.line(run)
    assert line.startswith("workers 2, 5, 8 were set aside or farthest in 100 %, 100 %, ")
    assert line.endswith("; hostile: 2, 5 (NotFinite); 8 (SignFlip)")
    assert line[1:] in (folder / "report.html").read_text()


@pytest.mark.long
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_simulated_training_with_three_hostile_of_ten_ends_as_without(
    aggregate: str, tmp_path: Path
) -> None:
    clean = api.simulate(
        EXAMPLE, out=tmp_path / "clean", overrides=_overrides(aggregate, hostile=False)
    )
    hostile = api.simulate(
        EXAMPLE, out=tmp_path / "hostile", overrides=_overrides(aggregate, hostile=True)
    )
    assert _accuracy(clean) > 0.9
    assert abs(_accuracy(hostile) - _accuracy(clean)) <= 0.01
    _named(tmp_path / "hostile")


@pytest.mark.long
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_ten_processes_of_which_three_are_hostile_end_within_a_point_of_the_clean_run(
    aggregate: str, tmp_path: Path, warm: None
) -> None:
    clean = api.train(
        EXAMPLE, out=tmp_path / "clean", overrides=_overrides(aggregate, hostile=False)
    )
    hostile = api.train(
        EXAMPLE,
        out=tmp_path / "hostile",
        overrides=_overrides(aggregate, hostile=True),
        attack=True,
    )
    assert clean is not None
    assert clean.workers == 10
    assert _accuracy(clean) > 0.9
    assert abs(_accuracy(hostile) - _accuracy(clean)) <= 0.01
    _named(tmp_path / "hostile")


def test_the_mean_does_not_bear_what_robust_aggregates_do(tmp_path: Path) -> None:
    """The same attack, for comparison: the model is lost, and the run says who is not finite."""
    overrides = ["data_parallel.aggregate={kind='Mean'}", "train.max_skipped=3", HOSTILE]
    with pytest.raises(RunError, match="not finite"):
        api.simulate(EXAMPLE, out=tmp_path / "run", overrides=overrides)


def test_more_hostile_workers_than_an_aggregate_bears_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["train.steps=2", "train.eval_every=2", "train.schedule.warmup=0"]
    fewer: list[str] = ["data_parallel.aggregate.byzantine=2", *short]
    api.simulate(EXAMPLE, out=tmp_path / "more", overrides=fewer)
    said = capsys.readouterr().err
    assert "workers 7, 8, 9 are hostile: ALIE" in said
    assert "3 workers are hostile, and data_parallel.aggregate CenteredClipping bears 2" in said
    api.simulate(EXAMPLE, out=tmp_path / "enough", overrides=short)
    said = capsys.readouterr().err
    assert "workers 7, 8, 9 are hostile: ALIE" in said
    assert "bears" not in said


def test_a_run_that_hostile_workers_end_says_at_which_step_and_who(tmp_path: Path) -> None:
    hostile = 'simulate.attack={kind="NotFinite",workers=[2,3,5,6]}'
    with pytest.raises(RunError) as caught:
        api.simulate(EXAMPLE, out=tmp_path, overrides=[hostile])
    said = str(caught.value)
    assert said.startswith("step 1: 4 of 10 rows are missing or not finite, and CenteredClipping")
    assert said.endswith("(those of workers 2, 3, 5, 6)")
    run = read_run(tmp_path)
    assert (run.status, [event.what for event in run.faults]) == ("failed", [said])
    assert said[8:] in html.unescape((tmp_path / "report.html").read_text())


def test_a_checkpoint_that_goes_on_under_another_aggregate_or_attack_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["train.steps=4", "train.checkpoint_every=2", "train.schedule.warmup=0"]
    api.simulate(EXAMPLE, out=tmp_path / "run", overrides=short)
    kept = str(tmp_path / "run" / "checkpoints" / "step-2")
    changed = ["data_parallel.aggregate.tau=2.0", 'simulate.attack={kind="SignFlip",workers=[1]}']
    api.simulate(EXAMPLE, out=tmp_path / "again", overrides=[*short, *changed], resume=kept)
    said = capsys.readouterr().err
    assert "was written under data_parallel.aggregate.tau = 1.0, and it is 2.0 now" in said
    assert 'simulate.attack = ["ALIE [7, 8, 9]"], and it is ["SignFlip [1]"] now' in said
    other = "data_parallel.aggregate={kind='Krum',byzantine=3}"
    with pytest.raises(ConfigError, match='= "CenteredClipping", and it is "Krum" now'):
        api.simulate(EXAMPLE, out=tmp_path / "other", overrides=[*short, other], resume=kept)


def test_the_example_is_as_the_docs_show_it() -> None:
    tables: dict[str, Any] = tomllib.loads(EXAMPLE.read_text())
    assert tables["data_parallel"]["rule"]["kind"] == "SNGD"
    assert tables["data_parallel"]["aggregate"]["byzantine"] == 3
    assert tables["simulate"]["attack"] == {"kind": "ALIE", "workers": [7, 8, 9]}
    shown = (EXAMPLE.parent.parent / "docs" / "robust.md").read_text()
    lines = EXAMPLE.read_text().partition("[data_parallel]")[2].strip().splitlines()
    assert all(line in shown for line in lines)
