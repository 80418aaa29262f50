"""Curves of objective and gap, and the partition in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

import report_run
from page_text import Page
from polyreme import api
from polyreme.report import certificates, facts, figures, partition
from polyreme.report.page import render
from polyreme.report.runs import read_run
from polyreme.report.tables import outcome_rows
from polyreme.runlog import RestartEvent
from test_report_page import figures_of, unpacked


def test_a_certificate_is_drawn_where_its_model_was_not_a_step_later(tmp_path: Path) -> None:
    folder = report_run.certified(tmp_path / "run", n_steps=30)
    run = read_run(folder)
    found = certificates.certificates(run)
    assert found is not None
    assert found.steps.tolist() == list(range(31))
    begins = [event.t - event.step_s for event in run.steps]
    np.testing.assert_allclose(found.seconds, [*begins, run.evals[-1].t])
    np.testing.assert_allclose(found.gap[:2], [0.5, 0.35])
    assert found.gap[-1] == 0.0
    assert found.bound == 0.3
    drawn = figures_of(render([folder], tmp_path / "page.html"))
    gap, above, asked = drawn["gap"]["data"]
    ys = [unpacked(trace["y"]) for trace in (gap, above, asked)]
    np.testing.assert_allclose(ys[0][:-1], 0.5 * 0.7 ** np.arange(30), rtol=1e-6)
    np.testing.assert_allclose(ys[1][:-1], 0.4 * 0.5 ** np.arange(1, 31), rtol=1e-3)
    assert np.isnan([ys[0][-1], ys[1][-1]]).all()  # a logarithm has no place for 0
    np.testing.assert_allclose(ys[2], 1e-5)
    assert drawn["gap"]["layout"]["yaxis"]["type"] == "log"
    objective = unpacked(drawn["objective"]["data"][0]["y"])
    np.testing.assert_allclose(objective[[0, -1]], [0.5, 0.3], rtol=1e-6)
    assert set(drawn["gap"]["xs"]) == {"steps", "seconds", "wire"}
    assert unpacked(drawn["gap"]["xs"]["wire"][0])[0] == 0
    assert "metrics" not in drawn


def test_a_sync_that_asks_no_rule_is_not_said_to_step_by_one(tmp_path: Path) -> None:
    run = read_run(report_run.certified(tmp_path / "run"))
    parallel = {"rule": {"kind": "AdamW"}, "sync": {"kind": "pSCOPE"}}
    run = msgspec.structs.replace(run, spec={**run.spec, "data_parallel": parallel})
    assert facts.algorithm(run) == "pSCOPE"
    evaluated = msgspec.structs.replace(run, steps=tuple(report_run.make_steps(10)))
    assert facts.algorithm(evaluated) == "AdamW, pSCOPE"


def test_the_best_bound_is_below_no_round_and_above_no_gap(tmp_path: Path) -> None:
    found = certificates.certificates(read_run(report_run.certified(tmp_path / "run")))
    assert found is not None
    kept = found.above[~np.isnan(found.above)]
    assert (kept >= 0).all()
    assert (kept <= found.gap[~np.isnan(found.above)] + 1e-15).all()


def test_rounds_that_a_restart_took_back_are_not_drawn(tmp_path: Path) -> None:
    steps = [
        msgspec.structs.replace(event, objective=1.0, gap=0.5)
        for event in report_run.make_steps(10)
    ]
    after = [
        msgspec.structs.replace(event, t=event.t + 10, attempt=1, objective=2.0)
        for event in steps[4:6]
    ]
    again = RestartEvent(t=9.0, attempt=1, step=4, devices=2)
    folder = report_run.write_run(tmp_path / "run", steps=[*steps, *after], others=[again])
    found = certificates.certificates(read_run(folder))
    assert found is not None
    assert found.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.objective.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_a_run_without_certificates_has_no_such_charts(tmp_path: Path) -> None:
    folder = report_run.quickstart(tmp_path / "run", n_steps=60)
    drawn = figures_of(render([folder], tmp_path / "page.html"))
    assert not {"objective", "gap"} & set(drawn)
    assert certificates.curves(read_run(folder)) == ()
    assert certificates.overlaid([read_run(folder)]) is None
    assert partition.line(read_run(folder)) == ""


def test_a_run_that_knows_no_gap_has_the_objective_alone(tmp_path: Path) -> None:
    steps = [
        msgspec.structs.replace(event, objective=1.0 / event.step)
        for event in report_run.make_steps(5)
    ]
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    assert [figure.name for figure in certificates.curves(read_run(folder))] == ["objective"]
    assert "objective" in figures_of(render([folder], tmp_path / "page.html"))


def test_a_comparison_lays_gaps_over_each_other_in_the_colours_of_their_runs(
    tmp_path: Path,
) -> None:
    one, two = (report_run.certified(tmp_path / name) for name in ("one", "two"))
    other = report_run.quickstart(tmp_path / "other", n_steps=60)
    drawn = figures_of(render([one, other, two], tmp_path / "page.html"))["gaps"]
    assert [(trace["name"], trace["meta"]) for trace in drawn["data"]] == [
        ("one", "run0"),
        ("two", "run2"),
    ]
    assert all(len(xs) == 2 for xs in drawn["xs"].values())
    assert drawn["layout"]["yaxis"]["type"] == "log"
    assert drawn["layout"]["showlegend"]


def test_thousands_of_rounds_are_drawn_as_lines_without_marks(tmp_path: Path) -> None:
    run = read_run(report_run.certified(tmp_path / "run", n_steps=300))
    assert {trace["mode"] for trace in certificates.curves(run)[1].data[:2]} == {"lines"}
    assert figures.metrics(run) is None


def test_the_page_the_terminal_and_json_say_the_partition_with_what_it_means(
    tmp_path: Path,
) -> None:
    folder = report_run.certified(tmp_path / "run")
    run = read_run(folder)
    page = Page(render([folder], tmp_path / "page.html"))
    assert page.facts["partition constant"][0] == "0.71"
    assert "Partition constant: at least 0.71, the largest seen from 2 anchors" in page.text
    assert "fall at least 44 times as far" in page.text
    rows = {row.label: row for row in outcome_rows(run)}
    assert "differ much" in rows["partition constant"].note
    assert api.run_json(folder)["partition"]["anchors"][0]["promised"] == 44.5
    assert run.summary is not None
    assert run.summary.partition is not None
    best = run.summary.partition.anchors[1]
    alike = msgspec.structs.replace(
        run.summary.partition, anchors=(msgspec.structs.replace(best, promised=1.01),)
    )
    summary = msgspec.structs.replace(run.summary, partition=alike)
    same = msgspec.structs.replace(run, summary=summary)
    assert partition.note(same) == "or more, from half the final model; workers' rows are alike"
    assert "1 anchor (half the final model)" in partition.line(same)
