"""Under torchrun ranks watch each other, and go on where they were when it starts them again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.long
SPEC = """
[model]
kind = "mlp"
hidden = [16]
[data]
kind = "digits"
[train]
steps = 4000
global_batch = 12
checkpoint_every = 5
timeout_s = {timeout_s}
"""


def _start(folder: Path, *options: str, timeout_s: float = 3.0) -> subprocess.Popen[bytes]:
    (folder / "spec.toml").write_text(SPEC.format(timeout_s=timeout_s))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), *options, "-m", "polyreme", "train"]
    command += [str(folder / "spec.toml"), "--out", str(folder / "run")]
    return subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)})


def _until(kind: str, folder: Path, after: int = 0) -> None:
    log = folder / "run" / "log.jsonl"
    end_s = time.monotonic() + 90
    while not (log.exists() and log.read_text().count(f'"kind":"{kind}"') > after):
        assert time.monotonic() < end_s, f"no event of kind {kind}"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_all_end(tmp_path: Path, victim: int) -> None:
    agent = _start(tmp_path)
    _until("checkpoint", tmp_path, 1)
    ranks = sorted(psutil.Process(agent.pid).children(), key=lambda child: child.pid)
    ranks[victim].send_signal(signal.SIGSTOP)
    assert agent.wait(60) == 1
    assert not any(rank.is_running() for rank in ranks)
    events = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (fault,) = [event for event in events if event["kind"] == "fault"]
    assert fault["rank"] == victim
    assert "its process is stopped" in fault["what"]
    assert fault["stack"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    told = json.loads((tmp_path / "run/ranks/attempt-0.json").read_text())
    assert told["verdict"]["rank"] == victim
    assert all(rank["events"] for rank in told["ranks"])


def test_ranks_that_torchrun_starts_again_go_on_from_the_newest(tmp_path: Path) -> None:
    # No rank stands still here; one that begins late on a busy machine is to be waited for.
    agent = _start(tmp_path, "--max-restarts", "1", "--rdzv-backend", "c10d", timeout_s=30.0)
    _until("checkpoint", tmp_path, 2)
    ranks = psutil.Process(agent.pid).children()
    ranks[0].send_signal(signal.SIGKILL)
    _until("restart", tmp_path)
    agent.terminate()
    agent.wait(60)
    events = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert restart["attempt"] == 1
    assert restart["step"] >= 10
