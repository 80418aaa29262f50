"""A run goes on after a rank died or stalled: from where, on what, how often, and what it says."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import polyreme as pr
import restart_entries as entries
from devices import TWO
from polyreme import runlog
from polyreme.api import attempts, training
from polyreme.cluster import accelerator
from polyreme.errors import RunError
from polyreme.runtime import checkpoints
from polyreme.runtime.launch import Launcher, RankFailed
from restart_entries import Fault

pytestmark = TWO
STEPS = 12


class Shared:
    """A launcher that outlives each run, and plants faults in it."""

    def __init__(self, launcher: Launcher, faults: dict[int, Fault]) -> None:
        self._launcher, self._faults = launcher, faults
        self.runs: list[int] = []

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        assert not psutil.Process(self._launcher._zygote.pid).children()

    @property
    def outcome(self) -> Any:
        return self._launcher.outcome

    def run(self, entry: Any, args: Any, **said: Any) -> Any:
        if entry is attempts.count:
            return self._launcher.run(entry, args, **said)
        self.runs.append(said["n_processes"])
        return self._launcher.run(entries.trains, (args[0], self._faults), **said)


@pytest.fixture
def launcher(launcher_of_runs: Launcher) -> Launcher:
    return launcher_of_runs


def _train(
    launcher: Launcher,
    folder: Path,
    faults: dict[int, Fault],
    *,
    searched: bool = False,
    resume: str | None = None,
    **settings: Any,
) -> runlog.Summary:
    """A run of STEPS steps that saves every fourth; attempt -> fault.

    The plan is given, which saves measuring, unless it must be `searched`.
    """
    shared = Shared(launcher, faults)
    spec = {
        "model": {"kind": "mlp", "hidden": [16]},
        "data": {"kind": "digits"},
        "train": {
            "steps": STEPS,
            "global_batch": 12,
            "checkpoint_every": 4,
            "restart_wait_s": 0.0,
            "timeout_s": 30.0,  # where many share the cores ranks start far apart
            **settings,
        },
    }
    plan = None
    if not searched:
        (plan, *_) = pr.plan(spec, assume=True, devices=2, overrides=["parallel.replica=2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Launcher", lambda **_: shared)
        found = pr.train(spec, out=folder, devices=2, plan=plan, resume=resume)
    assert found is not None
    return found


def _events(folder: Path, kind: type) -> list[Any]:
    return [event for event in runlog.read(folder / "log.jsonl") if isinstance(event, kind)]


def test_a_killed_rank_costs_steps_but_not_the_result(launcher: Launcher, tmp_path: Path) -> None:
    _train(launcher, tmp_path / "calm", {})
    found = _train(launcher, tmp_path / "run", {0: Fault(1, 7, "SIGKILL")})
    assert (found.status, found.steps) == ("done", STEPS)
    assert 0 < found.goodput < 1
    (fault,) = _events(tmp_path / "run", runlog.FaultEvent)
    (restart,) = _events(tmp_path / "run", runlog.RestartEvent)
    assert (fault.attempt, fault.rank, fault.op) == (0, 1, "all_reduce sum")
    assert "was ended by SIGKILL" in fault.what
    assert (restart.attempt, restart.devices) == (1, 2)
    assert restart.step in (0, 4)  # the save of step 4 may have been under way
    steps = [(e.attempt, e.step) for e in _events(tmp_path / "run", runlog.StepEvent)]
    assert steps == [(0, n) for n in range(1, 7)] + [
        (1, n) for n in range(restart.step + 1, STEPS + 1)
    ]
    times = [event.t for event in runlog.read(tmp_path / "run" / "log.jsonl")]
    assert times == sorted(times)
    calm, run = (load_file(tmp_path / name / "final.safetensors") for name in ("calm", "run"))
    assert all(torch.equal(run[name], tensor) for name, tensor in calm.items())
    told = json.loads((tmp_path / "run" / "ranks" / "attempt-0.json").read_text())
    assert told["verdict"]["rank"] == 1
    assert [rank["state"] for rank in told["ranks"]][1] == "ended by SIGKILL"
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.long
def test_a_restart_before_the_first_save_begins_from_what_the_run_was_begun_from(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Not from later steps that the run went back from."""
    _train(launcher, tmp_path, {})
    whole = load_file(tmp_path / "final.safetensors")
    resume = str(tmp_path / "checkpoints" / "step-8")
    _train(launcher, tmp_path, {1: Fault(1, 2, "SIGKILL")}, resume=resume)
    restarts = _events(tmp_path, runlog.RestartEvent)
    assert [(event.attempt, event.step) for event in restarts] == [(1, 8), (2, 8)]
    found = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.long
def test_a_restart_sets_a_damaged_checkpoint_aside_and_takes_the_one_before(
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damaged: list[Path] = []

    def damage(seconds: float) -> None:
        found = checkpoints.newest(tmp_path)
        if found is not None and not damaged:
            damaged.append(found)
            (found / "meta.json").write_text("{")

    monkeypatch.setattr(attempts.time, "sleep", damage)
    # That of step 8 is whole when that of step 10 begins, which may still be under way.
    fault = {0: Fault(1, 12, "SIGKILL")}
    assert _train(launcher, tmp_path, fault, checkpoint_every=2).status == "done"
    (newest,) = damaged
    (restart,) = _events(tmp_path, runlog.RestartEvent)
    assert f"step-{restart.step + 2}" == newest.name
    assert restart.step in (6, 8)
    assert newest.with_name(f"damaged.{newest.name}").is_dir()
    assert newest.name in capfd.readouterr().err


@pytest.mark.long
def test_a_run_outlives_the_process_that_ranks_are_forked_from(
    launcher: Launcher, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"

    def kill() -> None:
        while not log.exists() or b'"step":5' not in log.read_bytes():
            time.sleep(0.02)
        launcher._zygote.kill()

    threading.Thread(target=kill, daemon=True).start()
    assert _train(launcher, tmp_path, {0: Fault(1, 6, "sleep")}).status == "done"
    (fault,) = _events(tmp_path, runlog.FaultEvent)
    assert fault.what.startswith("the process that ranks are forked from ended by SIGKILL")
    (restart,) = _events(tmp_path, runlog.RestartEvent)
    assert restart.step in (0, 4)


@pytest.mark.parametrize(
    ("how", "said"),
    [("sleep", "rank 1 of 2 did not come to all_reduce sum"), ("backend", "the card fell off")],
)
@pytest.mark.slice("backend-the card fell off")
def test_what_another_attempt_may_mend_is_tried_again(
    launcher: Launcher, tmp_path: Path, how: str, said: str
) -> None:
    found = _train(launcher, tmp_path, {0: Fault(1, 2, how)}, timeout_s=4.0)
    assert found.status == "done"
    (fault,) = _events(tmp_path, runlog.FaultEvent)
    assert said in fault.what
    assert fault.rank == 1
    assert "in _fail" in (fault.stack or "")
    (restart,) = _events(tmp_path, runlog.RestartEvent)
    assert restart.step == 0  # nothing was saved before


@pytest.mark.long
def test_a_rank_that_dies_before_the_run_has_a_folder(launcher: Launcher, tmp_path: Path) -> None:
    assert _train(launcher, tmp_path / "run", {0: Fault(0, 0, "early")}).status == "done"
    assert {event.attempt for event in runlog.read(tmp_path / "run" / "log.jsonl")} == {1}


def test_a_programs_own_error_is_not_tried_again(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ValueError: the cause"):
        _train(launcher, tmp_path, {0: Fault(1, 6, "raise")})
    assert not _events(tmp_path, runlog.RestartEvent)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 5)
    (fault,) = _events(tmp_path, runlog.FaultEvent)
    assert (fault.attempt, fault.rank) == (0, 1)


@pytest.mark.long
def test_restarts_end(launcher: Launcher, tmp_path: Path) -> None:
    faults = {attempt: Fault(0, 2, "SIGKILL") for attempt in range(9)}
    with pytest.raises(RankFailed, match="rank 0 of 2 was ended by SIGKILL"):
        _train(launcher, tmp_path, faults, restarts=2)
    assert [event.attempt for event in _events(tmp_path, runlog.FaultEvent)] == [0, 1, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert sorted(path.name for path in (tmp_path / "ranks").glob("*.json")) == [
        f"attempt-{attempt}.json" for attempt in range(3)
    ]


@pytest.mark.long
def test_a_rank_that_fails_again_is_left_out_where_that_is_allowed(
    launcher: Launcher, tmp_path: Path
) -> None:
    faults = {attempt: Fault(1, 2, "SIGKILL") for attempt in range(2)}
    found = _train(launcher, tmp_path, faults, searched=True, min_devices=1)
    assert (found.status, found.devices, found.steps) == ("done", 1, STEPS)
    assert [e.devices for e in _events(tmp_path, runlog.RestartEvent)] == [2, 1]


@pytest.mark.long
@pytest.mark.parametrize("least", [1, None])
def test_a_run_goes_on_with_the_devices_that_are_left(
    launcher: Launcher, tmp_path: Path, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = tmp_path / "number"
    number.write_text("2")
    entry = entries.Shrinking(name="shrinking", file=number)
    accelerator.register(entry)
    settings: dict[str, Any] = {} if least is None else {"min_devices": least}
    sleep = time.sleep
    lost = [number]

    def lose(seconds: float) -> None:
        while lost:
            lost.pop().write_text("1")
        sleep(seconds)

    monkeypatch.setattr(attempts.time, "sleep", lose)
    try:
        faults = {0: Fault(0, 6, "SIGKILL")}
        if least is None:
            with pytest.raises(RunError, match=r"1 of 2 devices are left.*min_devices is not set"):
                _train(launcher, tmp_path / "run", faults, searched=True)
        else:
            found = _train(launcher, tmp_path / "run", faults, searched=True, **settings)
            assert (found.status, found.devices, found.steps) == ("done", 1, STEPS)
    finally:
        accelerator.unregister("shrinking")


@pytest.mark.long
def test_a_signal_while_a_restart_is_waited_for_ends_the_run(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {0: Fault(1, 6, "SIGKILL")}
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        sleep(seconds)

    monkeypatch.setattr(attempts.time, "sleep", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            _train(launcher, tmp_path, faults, restart_wait_s=60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.long
def test_kills_of_any_rank_at_any_time_do_not_hang_a_run(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A seeded storm of kills and stops, some before the run has a folder."""
    strike = random.Random(7)
    ended = threading.Event()

    def kill() -> None:
        struck = 0
        while struck < 6 and not ended.wait(strike.uniform(0.1, 1.5)):
            ranks = psutil.Process(launcher._zygote.pid).children()
            if ranks:
                struck += 1
                strike.choice(ranks).send_signal(
                    strike.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                )

    storm = threading.Thread(target=kill)
    storm.start()
    try:
        found = _train(launcher, tmp_path, {}, restarts=100, steps=400, timeout_s=4.0)
    finally:
        ended.set()
        storm.join()
    assert (found.status, found.steps) == ("done", 400)
    assert capfd.readouterr().err.count("starting again") >= 2
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-400"
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert not [name for name in kept if name.startswith(".step")]
