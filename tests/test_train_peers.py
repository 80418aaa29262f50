"""`polyreme train` of syncs whose models travel: logs, evaluations, checkpoints, both clocks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyreme import api
from polyreme.runtime.served.applied import read_taken
from test_train_served import SPEC


def _spec(folder: Path, sync: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(SPEC.replace('{ kind = "OrMo", servers = 2 }', f'{{ kind = "{sync}" }}'))
    return path


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("sync", ["PartialReduce", "ADPSGD", "AsyncPushSum"])
def test_a_run_ends_is_logged_and_goes_on_from_its_checkpoint(sync: str, tmp_path: Path) -> None:
    spec, run = _spec(tmp_path, sync), tmp_path / "run"
    first = api.train(spec, out=run)
    assert (first.status, first.steps, first.workers) == ("done", 24, 2)
    events = _events(run)
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 25))
    assert all(event["loss"] > 0 for event in steps)
    assert sum(event["wire_bytes"] for event in steps) > 0
    delays = [sum(event["delays"].values()) for event in steps if event.get("delays")]
    assert delays == ([] if sync == "PartialReduce" else [2] * 24)
    evals = [event for event in events if event["kind"] == "eval"]
    assert [event["step"] for event in evals] == [12, 24]
    # The first may be of later models: workers do not wait for what is told of them.
    assert evals[-1]["metrics"]["heldout_loss"] < steps[0]["loss"]
    assert len(read_taken(run / "servers" / "taken-0.bin")) >= 24
    checkpoint = str(run / "checkpoints" / "step-16")
    again = api.train(spec, out=tmp_path / "again", resume=checkpoint)
    assert (again.status, again.steps) == ("done", 24)
    simulated = api.simulate(spec, out=tmp_path / "clock", resume=checkpoint)
    assert simulated.steps == 24
    keys = [
        {key for event in _events(folder) if event["kind"] == kind for key in event}
        for folder in (run, tmp_path / "clock")
        for kind in ("step", "eval")
    ]
    assert keys[:2] == keys[2:]


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", ["PartialReduce", "ADPSGD", "AsyncPushSum"])
def test_a_simulated_worker_that_crashes_is_left_out_of_what_is_evaluated_and_kept(
    sync: str, tmp_path: Path
) -> None:
    spec = _spec(tmp_path, sync)
    fault = '{ kind = "crash", worker = 1, at_s = 3.0, back_s = 99.0, detect_s = 0.5 }'
    compute = 'compute = { kind = "constant", seconds = 1.0 }'
    spec.write_text(f"{spec.read_text()}{compute}\nfaults = [{fault}]\n")
    first = api.simulate(spec, out=tmp_path / "run")
    assert (first.status, first.steps) == ("done", 24)
    evals = [event for event in _events(tmp_path / "run") if event["kind"] == "eval"]
    before, after = (event["metrics"]["heldout_loss"] for event in evals)
    assert after < before < 2.2
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-16")  # it is away
    spec.write_text(spec.read_text().replace(f"faults = [{fault}]\n", ""))
    again = api.train(spec, out=tmp_path / "again", resume=checkpoint)
    assert (again.status, again.steps) == ("done", 24)


def _members() -> list[psutil.Process]:
    """Processes of workers and servers of this process's run."""
    nurseries = [
        each for each in psutil.Process().children() if "nursery" in " ".join(each.cmdline())
    ]
    return [each for nursery in nurseries for each in nursery.children()]


def _kill(member: psutil.Process) -> None:
    with suppress(ProcessLookupError):
        os.kill(member.pid, signal.SIGKILL)


@pytest.mark.long
def test_workers_that_are_all_killed_at_once_go_on_from_the_mean_that_was_evaluated(
    tmp_path: Path,
) -> None:
    spec, run = _spec(tmp_path, "PartialReduce"), tmp_path / "run"
    spec.write_text(
        spec.read_text()
        .replace("steps = 24", "steps = 400")
        .replace("eval_every = 12", "eval_every = 200")
        .replace("checkpoint_every = 8", "checkpoint_every = 400")
    )
    over, killed = threading.Event(), list[psutil.Process]()

    def kill() -> None:
        log = run / "log.jsonl"
        while not log.exists() or '"eval"' not in log.read_text():
            if over.wait(0.01):
                return
        killed.extend(_members())
        for each in killed:
            _kill(each)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        api.train(spec, out=run)
    finally:
        over.set()
        thread.join()
    assert len(killed) == 3
    events = _events(run)
    (at,) = (at for at, each in enumerate(events) if each.get("step") == 201)
    before, last = (each["metrics"] for each in events if each["kind"] == "eval")
    assert before["test_accuracy"] > 0.5
    losses = [each["loss"] for each in events[at:] if each["kind"] == "step"]
    assert max(losses[:60]) < 1.5, "no step began from the first model"
    assert last["heldout_loss"] < before["heldout_loss"]


@pytest.mark.long
@pytest.mark.parametrize("sync", ["PartialReduce", "ADPSGD", "AsyncPushSum"])
def test_members_that_are_killed_while_a_run_trains_do_not_end_it(
    sync: str, tmp_path: Path
) -> None:
    """Checkpoints and evaluations meanwhile are whole."""
    spec, run = _spec(tmp_path, sync), tmp_path / "run"
    spec.write_text(
        spec.read_text()
        .replace("steps = 24", "steps = 1500")
        .replace("eval_every = 12", "eval_every = 100")
        .replace("checkpoint_every = 8", "checkpoint_every = 100")
    )
    over, killed = threading.Event(), list[psutil.Process]()

    def storm() -> None:
        drawn = random.Random(0)
        while not over.wait(drawn.uniform(0.2, 1.0)) and len(killed) < 12:
            found = _members()
            if found and (run / "log.jsonl").exists():
                killed.append(drawn.choice(found))
                _kill(killed[-1])

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        summary = api.train(spec, out=run)
    finally:
        over.set()
        thread.join()
    assert (summary.status, summary.steps) == ("done", 1500)
    assert len(killed) >= 3
    assert "was killed by SIGKILL and is begun anew" in (run / "log.jsonl").read_text()
    evals = [event for event in _events(run) if event["kind"] == "eval"]
    assert len(evals) == 15
    assert evals[-1]["metrics"]["test_accuracy"] > 0.8
    again = api.train(spec, out=tmp_path / "again", resume=str(run / "checkpoints" / "step-1400"))
    assert again.steps == 1500
