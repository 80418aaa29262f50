"""The log: whole lines only, attempts and seconds that never go back."""

from __future__ import annotations

import errno
import json

import msgspec
import pytest

from polyreme import runlog
from polyreme.errors import RunError
from polyreme.runlog import CheckpointEvent, EvalEvent, FaultEvent, RestartEvent, StepEvent, Writer


def step_event(step: int = 1, **changes) -> StepEvent:
    plain = {
        "t": float(step),
        "attempt": 0,
        "step": step,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "samples": 8,
        "tokens": 80,
        "step_s": 0.5,
        "compute_s": 0.3,
        "comm_s": 0.1,
        "wait_s": 0.1,
        "wire_bytes": 100,
        "memory_bytes": 1000,
    }
    return StepEvent(**(plain | changes))


def _written(path, *events) -> None:
    writer = Writer(path)
    for event in events:
        writer.write(event)
    writer.close()


def test_every_kind_of_event_comes_back_as_written(tmp_path):
    events = [
        RestartEvent(t=0.0, attempt=0, step=0, devices=2),
        step_event(),
        step_event(2, loss=None, skipped=True, reason="loss is not finite", rank=1),
        EvalEvent(t=3.0, attempt=0, step=2, metrics={"heldout_loss": 1.5}),
        CheckpointEvent(t=4.0, attempt=0, step=2, path="checkpoints/step-2", seconds=0.1),
        FaultEvent(t=5.0, attempt=0, what="killed", rank=1, op=None),
    ]
    path = tmp_path / "log.jsonl"
    _written(path, *events)
    assert list(runlog.read(path)) == events
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["restart", "step", "step", "eval", "checkpoint", "fault"]


class FullFor:
    """A file on a disk that takes a few bytes, then none for some writes, then all."""

    name = "log.jsonl"

    def __init__(self, n_writes: int) -> None:
        self.content, self._refuse = b"", [3, *[0] * n_writes]

    def write(self, data: bytes) -> int:
        if self._refuse and (room := self._refuse.pop(0)) == 0:
            raise OSError(errno.ENOSPC, "no space left")
        part = bytes(data[:room] if self._refuse else data)
        self.content += part
        return len(part)

    def close(self) -> None:
        pass


def test_a_full_disk_holds_events_back_and_loses_none(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = Writer(path)
    writer._file.close()
    writer._file = FullFor(2)
    for number in (1, 2, 3):
        writer.write(step_event(number))
    writer.close()
    path.write_bytes(writer._file.content)
    assert [event.step for event in runlog.read(path)] == [1, 2, 3]


def test_events_that_never_found_room_are_an_error(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer._file.close()
    writer._file = FullFor(100)
    writer._file.name = str(tmp_path / "log.jsonl")
    writer.write(step_event(1))
    writer.write(step_event(2))
    left = 2 * (len(msgspec.json.encode(step_event(1))) + 1) - 3
    said = rf"log\.jsonl: no space left; it needs {left:,} bytes, [\d,]+ are free; .* 2 events"
    with pytest.raises(RunError, match=said):
        writer.close()


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = Writer(path)
    writer.write(step_event())
    assert len(list(runlog.read(path))) == 1
    writer.close()


@pytest.mark.parametrize("kept", range(0, 200, 7))
def test_a_log_cut_anywhere_is_read_and_gone_on_with(tmp_path, kept):
    """After a cut the whole events stay, what was cut goes, and every line is JSON again."""
    path = tmp_path / "log.jsonl"
    _written(path, step_event(1), step_event(2))
    whole = path.read_bytes()
    n_cut = len(whole.splitlines()[1]) + 1 - kept
    path.write_bytes(whole[: len(whole) - max(0, n_cut)])
    before = list(runlog.read(path))
    assert len(before) >= 1
    _written(path, step_event(3))
    after = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert after == [1, *([2] if n_cut <= 0 else []), 3]


def test_a_broken_line_inside_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    _written(path, step_event(1), step_event(2))
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))
    with pytest.raises(msgspec.DecodeError):
        list(runlog.read(path))


def test_attempts_and_the_clock_go_on(tmp_path, monkeypatch):
    now_s = [3000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("time.time", lambda: 1e9 + now_s[0])
    path = tmp_path / "log.jsonl"
    first = Writer(path)
    assert first.attempt == 0
    now_s[0] += 7
    assert first.t == 7
    first.write(step_event(1, t=500.0))
    first.close()
    second = Writer(path)
    assert second.attempt == 1
    now_s[0] += 2
    assert second.t == 502
    second.write(step_event(2, t=501.0, attempt=second.attempt))
    second.close()
    assert Writer(path).attempt == 2
    assert Writer(path, attempt=7).attempt == 7
    started = Writer(path, began_s=1e9 + now_s[0] - 20)
    now_s[0] += 1
    assert started.t == 522


@pytest.mark.parametrize("content", [b"", b"\n", b'{"kind": "step", "t'])
def test_a_log_without_a_whole_event_starts_anew(tmp_path, content):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    writer = Writer(path)
    assert writer.attempt == 0
    writer.write(step_event())
    writer.close()
    assert len(list(runlog.read(path))) == 1


def test_a_last_event_longer_than_a_block_is_found(tmp_path):
    path = tmp_path / "log.jsonl"
    metrics = {f"metric {i}": 1.0 for i in range(20_000)}
    _written(path, step_event(), EvalEvent(t=9.0, attempt=3, step=1, metrics=metrics))
    assert path.stat().st_size > 2 * 2**16
    assert Writer(path).attempt == 4


def test_numbers_that_are_not_finite_stay_readable(tmp_path):
    path = tmp_path / "log.jsonl"
    _written(path, step_event(1, grad_norm=float("inf"), loss=float("nan")))
    (event,) = runlog.read(path)
    assert event.loss is None
    assert event.grad_norm is None
