"""The page of a run in which something went wrong."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import report_run
from polyreme.report import attempts, facts, figures, tables, trouble
from polyreme.report.page import render
from polyreme.report.ranks import MAX_RANKS, aligned, read_ranks
from polyreme.report.runs import Run, read_run
from polyreme.runlog import CheckpointEvent, EvalEvent, FaultEvent, RestartEvent, StepEvent
from polyreme.runtime.record import Account, Event
from polyreme.runtime.verdict import Verdict, attempt_json

STEP = msgspec.structs.replace(report_run.make_steps(1)[0], step_s=1.0)


def shown(page: Path) -> str:
    """The page's HTML without scripts and styles."""
    text = page.read_text()
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)


def steps_of(attempt: int, numbers: Sequence[int], t: float, **fields) -> list[StepEvent]:
    """Steps of a second each, from a time on; the loss is the step plus 100 times the attempt."""
    return [
        msgspec.structs.replace(
            STEP,
            **{"attempt": attempt, "step": n, "t": t + i, "loss": n + 100.0 * attempt, **fields},
        )
        for i, n in enumerate(numbers, start=1)
    ]


def restarted(folder: Path) -> Path:
    """Six steps, killed; step 3 failed to be saved; goes on from step 4 ten seconds later."""
    others = [
        CheckpointEvent(t=5.5, attempt=0, step=4, path="c", seconds=0.25, write_s=3.0),
        FaultEvent(t=5.6, attempt=0, what="the checkpoint of step 5 failed", rank=0, op="save"),
        EvalEvent(t=7.5, attempt=0, step=6, metrics={"heldout_loss": 77.0}),
        FaultEvent(t=9.0, attempt=0, what="rank 1 died", rank=1, op="all_reduce", stack="in <f>"),
        RestartEvent(t=17.5, attempt=1, step=4, devices=1),
    ]
    steps = [*steps_of(0, range(1, 7), 1.0), *steps_of(1, range(5, 9), 18.0)]
    return report_run.write_run(folder, steps=steps, others=others, plan=report_run.make_plan())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(restarted(tmp_path / "run"))


def unpacked(array: dict[str, str]) -> list[float]:
    return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"]).tolist()


def test_steps_done_again_are_drawn_once_and_the_later_attempt_wins(run: Run) -> None:
    assert attempts.led_to_end(run).tolist() == [True] * 4 + [False] * 2 + [True] * 4
    figure = figures.learning(run)
    assert figure is not None
    traces = {trace.get("name"): i for i, trace in enumerate(figure.data)}
    training, lost = traces["training"], traces["taken back by a restart"]
    assert unpacked(figure.xs["steps"][training]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert unpacked(figure.data[training]["y"]) == [1, 2, 3, 4, 105, 106, 107, 108]
    assert unpacked(figure.xs["steps"][lost]) == [5, 6]
    assert unpacked(figure.xs["seconds"][lost]) == [6, 7]
    assert "held-out" not in traces or not unpacked(figure.data[traces["held-out"]]["y"])
    for drawn in (figures.throughput(run), *figures.rates(run)):
        assert drawn is not None
        assert unpacked(drawn.xs["steps"][0]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_faults_and_restarts_stand_where_they_came(run: Run) -> None:
    figure = figures.learning(run)
    assert figure is not None
    traces = {trace.get("name"): i for i, trace in enumerate(figure.data)}
    assert unpacked(figure.xs["seconds"][traces["fault"]]) == pytest.approx([5.6, 9.0])
    assert unpacked(figure.xs["steps"][traces["restart"]]) == [4]
    assert unpacked(figure.xs["seconds"][traces["restart"]]) == [17.5]
    lines = [i for i, trace in enumerate(figure.data) if trace.get("yaxis") == "y3"]
    assert [len(unpacked(figure.data[i]["y"])) for i in lines] == [6, 3]
    assert "yaxis3" in figure.layout


def test_what_a_restart_cost_is_what_the_log_says(run: Run) -> None:
    (again,) = attempts.restarts(run)
    assert again.stopped_s == 17.5 - 7.5  # the last evaluation was the last thing done
    assert attempts.again_s(run) == 2.0
    assert attempts.attempts(run) == 2
    shares = {share.name: share.amount for share in facts.wall_shares(run)}
    assert shares["steps"] == 8.0
    assert shares["steps done again or skipped"] == 2.0
    assert shares["until training went on"] == 10.0
    assert sum(shares.values()) == pytest.approx(22.0)


def test_totals_without_a_summary_count_steps_once(run: Run) -> None:
    total = facts.totals(run)
    assert (total.steps, total.samples, total.final_loss) == (8, 8 * 32, 108.0)


def test_an_attempt_that_did_nothing_takes_steps_back_too(run: Run) -> None:
    again = RestartEvent(t=30.0, attempt=2, step=2, devices=1)
    found = msgspec.structs.replace(run, restarts=(*run.restarts, again))
    assert attempts.led_to_end(found).tolist() == [True] * 2 + [False] * 8
    assert facts.totals(found).steps == 2


def test_a_run_without_trouble_says_nothing_of_it(tmp_path: Path) -> None:
    steps = report_run.make_steps(20)
    summary = report_run.make_summary(steps, [])
    folder = report_run.write_run(tmp_path / "run", steps=steps, summary=summary)
    assert trouble.trouble(read_run(folder)) is None
    assert "What went wrong" not in shown(render([folder], tmp_path / "report.html"))
    assert "began again" not in panel(read_run(folder))


def test_going_on_after_a_run_ended_in_order_is_no_trouble(tmp_path: Path) -> None:
    began = RestartEvent(t=1.0, attempt=0, step=0, devices=2)
    again = RestartEvent(t=30.0, attempt=1, step=4, devices=1)
    steps = [*steps_of(0, range(1, 5), 1.0), *steps_of(1, range(5, 9), 30.0, loss=4.0)]
    folder = report_run.write_run(tmp_path / "run", steps=steps, others=[began, again])
    run = read_run(folder)
    assert trouble.trouble(run) is None
    assert "What went wrong" not in shown(render([folder], tmp_path / "report.html"))
    assert "began again once" in panel(run)
    lost = msgspec.structs.replace(again, step=3)
    assert trouble.trouble(msgspec.structs.replace(run, restarts=(began, lost))) is not None


def panel(run: Run) -> str:
    out = io.StringIO()
    tables.show_run(run, Console(file=out, width=80))
    return re.sub(r"[│\s]+", " ", out.getvalue())


def test_page_and_panel_tell_of_faults_restarts_and_saves(run: Run, tmp_path: Path) -> None:
    text = shown(render([run.folder], tmp_path / "report.html"))
    for words in (
        "Training began again once (2 attempts in all): 10 s passed until it went on, and 2 s went",
        "rank 1 died",
        "in &lt;f&gt;",
        "1 checkpoint and 1 failed save; training stood still for 250 ms in all.",
        "the checkpoint of step 5 failed",
    ):
        assert words in text, words
    assert "began again once (2 attempts in all): 10 s passed" in panel(run)


def test_a_run_of_skipped_steps_says_so_plainly(tmp_path: Path) -> None:
    bad = {"loss": None, "skipped": True, "reason": "the loss is nan", "rank": 1}
    steps = [*steps_of(0, [1, 2], 0.0), *steps_of(0, [3, 4, 5], 2.0, **bad)]
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    line = (
        "Most of this run taught the model nothing: 3 of 5 steps (60 %) were skipped, "
        "because the loss is nan on rank 1."
    )
    assert line in shown(render([folder], tmp_path / "report.html"))
    assert line in panel(read_run(folder))
    few = msgspec.structs.replace(read_run(folder), steps=tuple(steps[:3]))
    assert trouble.skipped_line(few).startswith("1 of 3 steps (33 %) was skipped")


def test_a_run_that_ended_with_a_far_larger_loss_says_so(tmp_path: Path) -> None:
    def line(name: str, *losses: float | None) -> str:
        steps = [
            msgspec.structs.replace(each, loss=loss)
            for each, loss in zip(steps_of(0, range(1, len(losses) + 1), 0.0), losses, strict=True)
        ]
        folder = report_run.write_run(tmp_path / name, steps=steps)
        found = trouble.worse_line(read_run(folder))
        assert found in panel(read_run(folder))
        assert found in shown(render([folder], tmp_path / "report.html"))
        return found

    said = "The loss rose from 2.30 to 3.50e+07: this run diverged."
    assert line("last", 2.3, 2.0, 3.5e7).startswith(said)
    assert line("skipped", None, 2.3, 3.5e7, None).startswith(said)
    assert line("ten", 2.0, 20.0) == line("back", 2.0, 2e9, 1.0) == line("fit", 0.0, 1.0) == ""
    assert line("none", None, None) == line("negative", -1.0, 5.0) == ""


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ((0, 1), (0, 1), "not finite on rank 0, 1."),
        ((0, 1), (1,), "not finite, on rank 1 most often."),
        ((), (), "not finite."),
        ((), (2,), "not finite, on rank 2 most often."),
    ],
)
def test_every_rank_to_blame_for_skipped_steps_is_named(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], where: str
) -> None:
    bad = {"loss": None, "skipped": True, "reason": "loss is not finite"}
    steps = [
        *steps_of(0, [1], 0.0, **bad, rank=next(iter(first), None), ranks=first),
        *steps_of(0, [2], 1.0, **bad, rank=next(iter(second), None), ranks=second),
        *steps_of(0, [3], 2.0),
    ]
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    assert trouble.skipped_line(read_run(folder)).endswith(f"because loss is {where}")
    cell = ", ".join(map(str, first)) or "unknown"
    assert f"<td>{cell}</td>" in re.sub(
        r"<td[^>]*>", "<td>", shown(render([folder], tmp_path / "page"))
    )


def account(rank: int, n_events: int, state: str = "running", odd: bool = False) -> Account:
    events = tuple(
        Event(
            seq=seq,
            op="broadcast" if odd and seq == n_events else "all_reduce sum",
            shape=(4, 2),
            dtype="float32",
            n_ranks=3,
            start_s=100.0 + seq,
            end_s=None if seq == n_events else 100.5 + seq,
        )
        for seq in range(1, n_events + 1)
    )
    return Account(rank=rank, pid=40 + rank, host="h", state=state, began_s=100.0, events=events)


def write_ranks(folder: Path, accounts: Sequence[Account], verdict: Verdict | None) -> None:
    (folder / "ranks").mkdir()
    (folder / "ranks" / "attempt-0.json").write_bytes(attempt_json(0, verdict, accounts))


def test_ranks_are_aligned_by_number_and_the_odd_one_is_marked(tmp_path: Path) -> None:
    folder = restarted(tmp_path / "run")
    verdict = Verdict(kind="stalled", rank=2, op="all_reduce sum", what="rank 2 stalled")
    write_ranks(folder, [account(0, 30), account(1, 30, odd=True), account(2, 29)], verdict)
    (last,) = read_run(folder).ranks
    table = aligned(last)
    assert table.heads[:2] == ("#30", "#29")
    assert [row.odd for row in table.rows] == [False, False, True]
    assert [row.cells[0].state for row in table.rows] == ["other", "other", "none"]
    assert [row.cells[1].state for row in table.rows] == ["done", "done", "inside"]
    assert "all_reduce sum [4, 2] float32" in table.rows[0].cells[0].full
    text = shown(render([folder], tmp_path / "report.html"))
    assert text.count("at fault") == 1
    assert "process 42 on h" in text


def test_a_rank_that_called_something_else_is_marked(tmp_path: Path) -> None:
    write_ranks(tmp_path, [account(0, 9), account(1, 9, odd=True), account(2, 9)], None)
    (last,) = read_ranks(tmp_path, [])
    assert [row.cells[0].state for row in aligned(last).rows] == ["inside", "other", "inside"]


def test_of_two_ranks_that_differ_neither_is_taken_for_right(tmp_path: Path) -> None:
    write_ranks(tmp_path, [account(0, 9), account(1, 9, odd=True)], None)
    (last,) = read_ranks(tmp_path, [])
    assert [row.cells[0].state for row in aligned(last).rows] == ["other", "other"]


def test_of_very_many_ranks_those_behind_are_shown(tmp_path: Path) -> None:
    accounts = [account(rank, 2 if rank == 777 else 3) for rank in range(1000)]
    write_ranks(tmp_path, accounts, None)
    table = aligned(read_ranks(tmp_path, [])[0])
    assert len(table.rows) == MAX_RANKS
    assert 777 in [row.rank for row in table.rows]
    assert table.n_hidden == 1000 - MAX_RANKS


@pytest.mark.parametrize("content", [b"", b'{"attempt": 0, "ra', b"[]", b'{"attempt": 0}', b"\xff"])
def test_a_damaged_file_of_ranks_is_said_to_be_so(content: bytes, tmp_path: Path) -> None:
    folder = restarted(tmp_path / "run")
    (folder / "ranks").mkdir()
    (folder / "ranks" / "attempt-0.json").write_bytes(content)
    text = shown(render([folder], tmp_path / "report.html"))
    assert "ranks/attempt-0.json cannot be read" in text


def test_a_run_that_failed_before_its_first_step_gets_its_page(tmp_path: Path) -> None:
    fault = FaultEvent(t=3.0, attempt=0, what="rank 0 ran out of memory", rank=0)
    summary = report_run.make_summary([], [], status="failed", utilisation=None)
    folder = report_run.write_run(tmp_path / "run", steps=[], others=[fault], summary=summary)
    write_ranks(folder, [account(0, 0), Account(rank=1)], None)
    text = shown(render([folder], tmp_path / "report.html"))
    for words in (
        "This run failed.",
        "rank 0 ran out of memory",
        "No rank had called a collective",
    ):
        assert words in text, words
    assert "None" not in text


def test_a_spike_is_marked_and_listed_with_its_samples(tmp_path: Path) -> None:
    steps = steps_of(0, range(1, 101), 0.0, loss=2.0)
    steps[79] = msgspec.structs.replace(steps[79], loss=5.0, sample_ids=(31, 7))
    folder = report_run.write_run(tmp_path / "run", steps=steps)
    figure = figures.learning(read_run(folder))
    assert figure is not None
    names = [trace.get("name") for trace in figure.data]
    assert unpacked(figure.xs["steps"][names.index("spike")]) == [80]
    assert unpacked(figure.data[names.index("spike")]["y"]) == [5.0]
    text = shown(render([folder], tmp_path / "report.html"))
    assert "1 spike of the training loss" in text
    assert "+3.00" in text
    assert "31, 7" in text
    assert json.loads(json.dumps(tables.summary_json(read_run(folder))))["spikes"][0]["step"] == 80
