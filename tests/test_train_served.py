"""`polyreme train` of syncs with servers: processes that come and go, checkpoints, both clocks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from polyreme import api
from polyreme.errors import ConfigError
from polyreme.runtime.served.applied import read_applied

SPEC = """
[model]
kind = "mlp"
hidden = [8]

[data]
kind = "digits"

[train]
steps = 24
global_batch = 32
eval_every = 12
checkpoint_every = 8

[cluster]
cpu_processes = 2

[data_parallel]
rule = { kind = "SGD", lr = 0.02 }
sync = { kind = "OrMo", servers = 2 }

[simulate]
workers = 2
"""


def _spec(folder: Path, changed: dict[str, str] | None = None) -> Path:
    text = SPEC
    for old, new in (changed or {}).items():
        text = text.replace(old, new)
    path = folder / "spec.toml"
    path.write_text(text)
    return path


SYNC = 'sync = { kind = "OrMo", servers = 2 }'
AHEAD = """sync = { kind = "OrMo", servers = 2, ahead = 1 }
compress_back = { kind = "TopK", ratio = 0.2 }"""
WAITS = 'sync = { kind = "SSP", servers = 2, staleness = 0 }'


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [SYNC, AHEAD, WAITS])
def test_a_run_ends_is_logged_and_goes_on_from_its_checkpoint(sync: str, tmp_path: Path) -> None:
    spec = _spec(tmp_path, {SYNC: sync})
    first = api.train(spec, out=tmp_path / "run")
    assert (first.status, first.steps, first.workers) == ("done", 24, 2)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 25))
    assert all(sum(event["delays"].values()) >= 2 for event in steps)
    assert sum(event["wire_bytes"] for event in steps) > 0
    assert [event["step"] for event in events if event["kind"] == "eval"] == [12, 24]
    lists = [read_applied(tmp_path / "run" / "servers" / f"applied-{at}.bin") for at in (0, 1)]
    assert {len(each) for each in lists} == {len(lists[0])}
    assert len(lists[0]) >= 48
    again = api.train(
        spec, out=tmp_path / "again", resume=str(tmp_path / "run" / "checkpoints" / "step-16")
    )
    assert (again.status, again.steps) == ("done", 24)
    simulated = api.simulate(
        spec, out=tmp_path / "clock", resume=str(tmp_path / "run" / "checkpoints" / "step-16")
    )
    assert simulated.steps == 24


@pytest.mark.long
def test_members_that_are_killed_while_a_run_trains_do_not_end_it(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path,
        {
            "steps = 24": "steps = 3000",
            "eval_every = 12": "eval_every = 1500",
            "checkpoint_every = 8": "checkpoint_every = 1000",
        },
    )
    killed: list[int] = []

    def storm() -> None:
        here = psutil.Process()
        end_s = time.monotonic() + 120
        log = tmp_path / "run" / "log.jsonl"
        while not (log.exists() and log.stat().st_size) and time.monotonic() < end_s:
            time.sleep(0.02)
        for at in (0, 3, 1):
            members = sorted(
                (
                    each
                    for child in here.children()
                    if "nursery" in " ".join(child.cmdline())
                    for each in child.children()
                ),
                key=lambda each: each.create_time(),
            )
            if len(members) == 4:
                os.kill(members[at].pid, signal.SIGKILL)
                killed.append(members[at].pid)
            time.sleep(0.3)

    thread = threading.Thread(target=storm)
    thread.start()
    summary = api.train(spec, out=tmp_path / "run")
    thread.join()
    assert killed
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert "was killed by SIGKILL and is begun anew" in log
    assert (summary.status, summary.steps) == ("done", 3000)
    for at in (0, 1):
        rows = read_applied(tmp_path / "run" / "servers" / f"applied-{at}.bin")
        for who in np.unique(rows[["worker", "life"]]):
            numbers = rows["number"][rows[["worker", "life"]] == who]
            assert np.array_equal(numbers, np.arange(len(numbers)))


def test_a_launcher_s_processes_are_no_members(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="come and go"):
        api.train(_spec(tmp_path), out=tmp_path / "run")


def test_a_worker_is_one_device(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    with pytest.raises(ConfigError, match=r"parallel\.tp"):
        api.train(spec, overrides=["parallel.tp=2"], out=tmp_path / "run")
