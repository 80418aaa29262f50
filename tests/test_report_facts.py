"""What the report says of a run, in numbers."""

from __future__ import annotations

import io
import math
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import report_run
from polyreme.errors import ConfigError
from polyreme.plan.ir import LayerPlan, Leaf, Split
from polyreme.report import facts, tables
from polyreme.report.against import against, check_target, parse_target, reach
from polyreme.report.beside import beside
from polyreme.report.drawing import devices_svg, order_svg
from polyreme.report.plot import MAX_POINTS, smoothed, thinned
from polyreme.report.runs import Run, read_run
from polyreme.report.view import memory_bars
from polyreme.report.words import number, percent, runs_of
from polyreme.runlog import RestartEvent


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(
        report_run.quickstart(tmp_path_factory.mktemp("facts") / "complete", n_steps=300)
    )


def test_thinning_keeps_a_spike_a_dip_and_a_gap() -> None:
    values = np.ones(100_000)
    values[12_345], values[54_321] = 99.0, -99.0
    values[70_000:80_000] = np.nan
    index = thinned(values)
    assert {12_345, 54_321, 0, 99_999} <= set(index)
    assert np.isnan(values[index]).any()
    assert len(index) <= MAX_POINTS + 2
    assert (np.diff(index) > 0).all()


@pytest.mark.parametrize("n", [0, 1, 2, 7, 500])
def test_smoothing_is_a_centred_mean_without_the_missing(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    values[2:3] = np.nan
    expected = []
    for i in range(n):
        half = min(max(2, n // 100), i)
        window = [v for v in values[i - half : i + half + 1] if not math.isnan(v)]
        expected.append(statistics.fmean(window) if window else math.nan)
    np.testing.assert_allclose(smoothed(values), expected, rtol=1e-9)


def test_smoothing_all_missing_stays_missing() -> None:
    assert np.isnan(smoothed(np.full(10, np.nan))).all()


def test_a_huge_loss_is_in_no_mean_but_those_of_its_windows() -> None:
    values = np.full(500, 2.5)
    values[100] = 1e35
    found = smoothed(values)
    near = np.abs(np.arange(500) - 100) <= 5
    np.testing.assert_array_equal(found[~near], 2.5)
    assert (found[near] > 1e34 / 2).all()


def test_totals_of_a_killed_run_are_those_its_summary_would_give(complete: Run) -> None:
    killed = msgspec.structs.replace(complete, summary=None)
    was, found = facts.totals(complete), facts.totals(killed)
    for name in ("steps", "samples", "tokens", "wire_bytes", "final_loss", "metrics"):
        assert getattr(found, name) == getattr(was, name), name
    assert found.step_s_median == pytest.approx(was.step_s_median, rel=0.01)
    assert killed.status == "unfinished"


def test_a_thinned_log_counts_every_step(complete: Run) -> None:
    tenth = tuple(event for event in complete.steps if event.step % 10 == 0)
    thin = msgspec.structs.replace(complete, steps=tenth, summary=None)
    assert facts.totals(thin).samples == facts.totals(complete).samples
    unsaid = msgspec.structs.replace(thin, restarts=())  # a first attempt logs no start
    assert facts.totals(unsaid).samples == facts.totals(complete).samples
    target = parse_target("heldout_loss=2.2")
    assert reach(thin, target).samples == reach(complete, target).samples  # type: ignore[union-attr]


def test_a_skipped_step_of_a_thinned_log_stands_for_itself_alone(complete: Run) -> None:
    kept = tuple(event for event in complete.steps if event.skipped or event.step % 10 == 0)
    thin = msgspec.structs.replace(complete, steps=kept)
    counts = {e.step: n for e, n in zip(kept, thin.covered, strict=True)}
    assert (counts[120], counts[127], counts[130], counts[140]) == (10, 1, 9, 10)


def test_unknown_utilisation_makes_w_unknown_not_zero(complete: Run) -> None:
    assert complete.summary is not None
    summary = msgspec.structs.replace(complete.summary, utilisation=None, w=None)
    run = msgspec.structs.replace(complete, summary=summary)
    parts = facts.factors(run)
    assert facts.product(parts) is None
    assert "cannot be given: utilisation is unknown" in facts.meaning_of_w(run, parts)


def test_w_is_the_product_and_its_sentence_names_the_largest_loss(complete: Run) -> None:
    parts = facts.factors(complete)
    w = facts.product(parts)
    assert w is not None
    assert complete.summary is not None
    assert w == pytest.approx(complete.summary.w)
    text = facts.meaning_of_w(complete, parts)
    assert f"{percent(w)} of the pace" in text
    assert "lost to utilisation" in text
    assert "assumed to be 1" in text
    assert "assumed to be 1" not in facts.meaning_of_w(complete, facts.factors(complete, 1.0))


def test_time_shares_add_up_and_need_steps(complete: Run) -> None:
    assert sum(share.share for share in facts.time_shares(complete)) == pytest.approx(1)
    assert sum(share.share for share in facts.wall_shares(complete)) == pytest.approx(1)
    assert facts.time_shares(msgspec.structs.replace(complete, steps=())) == ()


def test_a_prediction_below_the_measurement_is_too_low() -> None:
    def text(predicted: float | None, measured: float | None) -> str:
        return facts.Prediction(
            name="x", unit="s", predicted=predicted, measured=measured
        ).error_text

    assert text(0.9, 1.0) == "predicted 10 % too low"
    assert text(1.1, 1.0) == "predicted 10 % too high"
    assert text(1.0, 1.0) == "as predicted"
    assert text(1.0, None) == text(None, 1.0) == text(1.0, 0.0) == "cannot be compared"


def test_memory_parts_are_the_prediction(complete: Run) -> None:
    found = {share.name: share.amount for share in facts.predicted_memory(complete)}
    assert found == report_run.MEMORY
    assert facts.peak_bytes(complete) == 540_000_000


def test_a_capacity_far_above_the_use_does_not_squeeze_its_bars(complete: Run) -> None:
    def labels(capacity: int) -> list[str]:
        assert complete.summary is not None
        measured = {**complete.summary.measured, "capacity_bytes": capacity}
        summary = msgspec.structs.replace(complete.summary, measured=measured)
        return [b.label for b in memory_bars(msgspec.structs.replace(complete, summary=summary))]

    assert labels(10**9) == ["predicted", "measured", "capacity"]
    assert labels(10**12) == ["predicted", "measured"]


def test_target_is_met_by_a_tie_and_the_direction_follows_the_metric() -> None:
    assert parse_target("heldout_loss=2").reached(2.0)
    assert not parse_target("heldout_loss=2").reached(2.1)
    assert parse_target("test_accuracy=0.9").reached(0.9)
    assert not parse_target("test_accuracy=0.9").reached(0.89)
    assert not parse_target("test_accuracy=0.9").reached(math.nan)


@pytest.mark.parametrize("text", ["", "loss", "=3", "loss=low", "loss=nan"])
def test_no_target_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="target"):
        parse_target(text)


def test_unknown_metric_names_those_there_are(complete: Run) -> None:
    with pytest.raises(ConfigError, match="bigram_loss, heldout_loss"):
        check_target(parse_target("accuracy=1"), [complete])


def test_steps_done_again_after_a_restart_need_their_samples_once(complete: Run) -> None:
    target = parse_target("heldout_loss=2.2")
    again = [
        msgspec.structs.replace(event, attempt=1, t=event.t + 100)
        for event in complete.steps
        if event.step > 60
    ]
    first = [event for event in complete.steps if event.step <= 80]
    restart = RestartEvent(t=100, attempt=1, step=60, devices=2)
    run = msgspec.structs.replace(
        complete, steps=(*first, *again), restarts=(*complete.restarts, restart)
    )
    was, found = reach(complete, target), reach(run, target)
    assert was is not None
    assert found is not None
    assert found.samples == was.samples == was.step * 32


def test_speedup_is_the_product_of_its_parts(complete: Run, tmp_path: Path) -> None:
    slow = read_run(report_run.quickstart(tmp_path / "slow", n_steps=300, scale=2.0))
    found = against(slow, complete, parse_target("heldout_loss=2.2"))
    assert found.real == pytest.approx(0.5, rel=0.05)
    assert found.utilisation == pytest.approx(0.5)
    assert found.hardware == pytest.approx(1.0, rel=0.02)
    assert found.effectiveness == 1.0
    assert found.hardware * found.w * found.rest == pytest.approx(found.real)  # type: ignore[operator]


def test_a_target_never_reached_says_so(complete: Run) -> None:
    found = against(complete, complete, parse_target("heldout_loss=0.1"))
    assert found.real is None
    assert found.effectiveness is None
    assert any("never reached heldout_loss <= 0.1" in line for line in found.why)


def test_an_attempt_whose_clock_starts_anew_follows_the_one_before(tmp_path: Path) -> None:
    first = report_run.make_steps(20)
    second = [msgspec.structs.replace(e, attempt=1, step=e.step + 10) for e in first]
    folder = report_run.write_run(tmp_path / "run", steps=first)
    with (folder / "log.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","t":9.2,"att')
        for event in second:
            file.write(msgspec.json.encode(event) + b"\n")
    run = read_run(folder)
    times = [event.t for event in run.steps]
    assert times == sorted(times)
    assert len(run.steps) == 39  # the first of the second attempt is glued to the cut line
    assert any("1 of the log's" in line for line in run.missing)


def test_summary_json_holds_plain_numbers_and_nulls(complete: Run, tmp_path: Path) -> None:
    failed = read_run(report_run.failed(tmp_path / "failed"))
    for run in (complete, failed):
        text = msgspec.json.encode(tables.summary_json(run))
        assert b"NaN" not in text
        assert msgspec.json.decode(text)["status"] == run.status
    assert tables.summary_json(failed)["w"] is None
    assert tables.summary_json(failed)["faults"][0]["rank"] == 1


def test_terminal_summary_fits_80_columns_and_names_everything(
    complete: Run, tmp_path: Path
) -> None:
    failed = read_run(report_run.failed(tmp_path / "failed"))
    for run, words in (
        (
            complete,
            ["utilisation", "measured", "assumed", "held-out", "bigram", "waiting", "too low"],
        ),
        (failed, ["SIGKILL", "rank 1", "all_reduce", "summary.json is missing"]),
    ):
        out = io.StringIO()
        tables.show_run(run, Console(file=out, width=80))
        assert max(len(line) for line in out.getvalue().splitlines()) <= 80
        for word in words:
            assert word in out.getvalue(), word


def test_a_wide_table_turns_on_its_side(complete: Run) -> None:
    table = tables.comparison([complete, complete])
    for width, lines in ((80, len(table.heads)), (250, 2)):
        out = io.StringIO()
        tables.show_table(table, Console(file=out, width=width))
        shown = [line for line in out.getvalue().splitlines() if line.strip(" ─")]
        assert len(shown) >= lines
        assert "…" not in out.getvalue()


def test_every_device_of_a_plan_is_drawn_once_with_its_axes() -> None:
    plan = report_run.make_plan((("replica", 2), ("shard", 2), ("tp", 2)), stages=2, level="grads")
    drawn = devices_svg(plan, 1200)
    for device in range(16):
        assert drawn.count(f"<title>device {device}, ") == 1
    assert drawn.count(">replica 1<") == 2
    assert "block.0-2" in drawn


def test_uneven_parts_show_their_weights() -> None:
    split = Split(axis="shard", weights=(3, 1), children=(Leaf(0), Leaf(1)))
    plan = report_run.make_plan()
    plan = msgspec.structs.replace(
        plan, layer_plans={name: LayerPlan(split=split) for name in plan.layer_plans}
    )
    assert "shard 0 · 3/4" in devices_svg(plan, 1200)


def test_thousands_of_devices_are_summed_up() -> None:
    plan = report_run.make_plan((("replica", 512), ("shard", 8)))
    drawn = devices_svg(plan, 330)
    assert len(drawn) < 50_000
    assert "plan over 4,096 devices" in drawn
    assert "509 more replica parts, alike" in drawn
    assert "devices 0-4095" in order_svg(plan, 1200)


def test_words() -> None:
    assert number(math.nan) == number(None) == "unknown"
    assert number(math.inf) == "infinite"
    assert number(0.0) == "0"
    assert number(999.7) == "1,000"
    assert number(3e-9) == "3.00e-09"
    assert percent(0.0) == "0 %"
    assert percent(0.0999) == "10 %"
    assert percent(0.00037) == "0.037 %"
    assert percent(2.8e-7) == "0.000028 %"
    assert percent(0.0123) == "1.2 %"
    assert runs_of(()) == ""
    assert runs_of(("h.0", "h.1", "h.3", "x")) == "h.0-1, h.3, x"


def test_hidden_communication_is_said_with_what_may_hide_it(complete: Run) -> None:
    """The effect of a switch could be seen in no report."""
    replace = msgspec.structs.replace
    steps = tuple(replace(step, comm_s=0.01, hidden_s=0.03) for step in complete.steps)
    assert complete.plan is not None
    layers = {name: replace(e, level="params") for name, e in complete.plan.layer_plans.items()}
    plan = replace(complete.plan, layer_plans=layers, prefetch=False, decouple=True)
    said = beside(replace(complete, steps=steps, plan=plan))
    hidden = "75 % of communication, 30 ms of 40 ms a step on average."
    assert said.startswith(f"Behind computation: {hidden}")
    assert "Overlap of reductions on" in said
    assert "prefetch of parameters off" in said
    assert "decoupled gathers on, priority on." in said


def test_nothing_hidden_is_said_where_nothing_is_communicated(complete: Run) -> None:
    alone = tuple(msgspec.structs.replace(step, comm_s=0.0) for step in complete.steps)
    assert beside(msgspec.structs.replace(complete, steps=alone)) == ""
    assert beside(msgspec.structs.replace(complete, steps=())) == ""
