"""Progress for people, and trackers: what is shown, and what is said where a package is missing."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from polyreme.errors import ConfigError
from polyreme.runlog import CheckpointEvent, EvalEvent
from polyreme.runtime import progress
from polyreme.runtime.progress import ProgressBar
from polyreme.runtime.trackers import open_trackers
from test_runlog import step_event


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _clock(monkeypatch, seconds):
    now = iter(seconds)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))


def _told(bar, step, **changes):
    plain = {"n_steps": 4, "loss": 1.23456, "samples_per_s": 100.0, "memory_bytes": 3 * 2**20}
    bar(step=step, **(plain | changes))


def test_a_line_now_and_then_where_there_is_no_terminal(monkeypatch):
    _clock(monkeypatch, [0.0, 6.0, 12.0, 18.0])
    file = io.StringIO()
    with ProgressBar(file=file) as bar:
        for step in range(1, 5):
            _told(bar, step)
    assert file.getvalue().splitlines() == [
        "step 1/4  loss 1.235  100 samples/s  3 MiB",
        "step 3/4  loss 1.235  100 samples/s  6 s left  3 MiB",
        "step 4/4  loss 1.235  100 samples/s  3 MiB",
    ]


def test_text_is_counted_in_tokens_and_a_skipped_step_has_no_loss(monkeypatch):
    _clock(monkeypatch, [0.0, 11.0])
    file = io.StringIO()
    with ProgressBar(file=file, tokens_per_sample=256) as bar:
        _told(bar, 1)
        _told(bar, 2, loss=None)
    assert (
        file.getvalue().splitlines()[1].startswith("step 2/4  skipped  25.6k tokens/s  22 s left")
    )


def test_one_slow_step_does_not_set_the_rate(monkeypatch):
    _clock(monkeypatch, [0.0, 1.0, 2.0, 20.0])
    file = io.StringIO()
    with ProgressBar(file=file) as bar:
        for step, rate in enumerate((100.0, 100.0, 1.0, 100.0), 1):
            _told(bar, step, samples_per_s=rate)
    assert "100 samples/s" in file.getvalue().splitlines()[-1]


def test_a_terminal_shows_a_bar_that_ends_full():
    file = _Terminal()
    with ProgressBar(file=file) as bar:
        for step in range(1, 5):
            _told(bar, step)
    last = file.getvalue().split("\r")[-1]
    assert "step 4/4  loss 1.235" in last
    assert "━" in last


def test_silence_is_silent():
    for file in (io.StringIO(), _Terminal()):
        with ProgressBar(file=file, silent=True) as bar:
            _told(bar, 1)
            _told(bar, 4)
        assert file.getvalue() == ""


EVENTS = [
    step_event(1, loss=2.5),
    step_event(2, loss=None, grad_norm=None, skipped=True, reason="loss is not finite", rank=0),
    EvalEvent(t=3.0, attempt=0, step=2, metrics={"heldout_loss": 1.5}),
    CheckpointEvent(t=4.0, attempt=0, step=2, path="checkpoints/step-2", seconds=0.1),
]


def test_tensorboard_has_losses_and_metrics_at_their_steps(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    (tracker,) = open_trackers(["tensorboard"], tmp_path)
    for event in EVENTS:
        tracker.write(event)
    tracker.close()
    found = accumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    scalars = {
        tag: [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    assert scalars["train/loss"] == [(1, 2.5)]
    assert scalars["train/step_s"] == [(1, 0.5), (2, 0.5)]
    assert scalars["eval/heldout_loss"] == [(2, 1.5)]


def test_weights_and_biases_gets_one_record_an_event(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(
        log=lambda scalars, step: logged.append((step, scalars)),
        finish=lambda: logged.append("end"),
    )
    asked = {}
    fake = SimpleNamespace(init=lambda **options: asked.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tracker,) = open_trackers(["wandb"], tmp_path)
    for event in EVENTS:
        tracker.write(event)
    tracker.close()
    assert (asked["name"], asked["dir"]) == (tmp_path.name, str(tmp_path))
    assert [entry[0] for entry in logged[:-1]] == [1, 2, 2]
    assert logged[0][1]["train/loss"] == 2.5
    assert "train/loss" not in logged[1][1]
    assert logged[2][1] == {"eval/heldout_loss": 1.5}
    assert logged[-1] == "end"


def test_what_is_missing_or_unknown_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError) as caught:
        open_trackers(["tensorboard", "wandb", "paper"], tmp_path)
    first, second, third = caught.value.violations
    assert (first.path, first.legal) == (
        "report.trackers[0]",
        'pip install "polyreme[tensorboard]"',
    )
    assert (second.path, second.legal) == ("report.trackers[1]", 'pip install "polyreme[wandb]"')
    assert (third.value, third.legal) == ("paper", "tensorboard, wandb")
