"""`polyreme train` of syncs with servers under signals: as accurate as a quiet run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from polyreme import api
from polyreme.runtime.served.applied import read_applied

N, SERVERS, MOMENTS, STEPS = 3, 2, 50, 1500
SPEC = f"""
[model]
kind = "mlp"
hidden = [32]

[data]
kind = "digits"

[train]
steps = {STEPS}
global_batch = {16 * N}
schedule = {{ kind = "cosine", warmup = 100 }}

[cluster]
cpu_processes = {N}

[data_parallel]
rule = {{ kind = "SGD", lr = 0.01 }}
sync = {{ kind = "OrMo", servers = {SERVERS} }}
"""


def _members() -> list[psutil.Process]:
    """Workers and servers of this process's run, oldest first."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            if "nursery" in " ".join(child.cmdline()):
                found += child.children()
    return sorted(found, key=lambda each: each.create_time())


class _Storm(threading.Thread):
    """Sends signals to members at random moments of the run that logs to a file."""

    def __init__(self, log: Path, seed: int) -> None:
        super().__init__()
        self._log, self._drawn = log, random.Random(seed)
        self.sent: list[signal.Signals] = []

    def run(self) -> None:
        end_s = time.monotonic() + 600
        for moment in sorted(self._drawn.sample(range(10, STEPS * 4 // 5), MOMENTS)):
            while self._step() < moment and time.monotonic() < end_s:
                time.sleep(0.02)
            time.sleep(self._drawn.uniform(0.0, 0.1))
            while not self._struck() and time.monotonic() < end_s:
                time.sleep(0.02)

    def _step(self) -> int:
        """The last that was logged."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return max((event["step"] for event in _steps(lines)), default=0)

    def _struck(self) -> bool:
        """Whether there was a member to send a signal to."""
        members = _members()
        if not members:
            return False
        member, number = self._drawn.choice(members).pid, signal.SIGKILL
        try:
            if self._drawn.random() < 0.5:
                number = signal.SIGSTOP
                os.kill(member, number)
                time.sleep(self._drawn.uniform(0.0, 0.4))
            os.kill(member, signal.SIGKILL if number == signal.SIGKILL else signal.SIGCONT)
        except ProcessLookupError:  # it ended just now
            return False
        self.sent.append(number)
        return True


def _steps(lines: list[str]) -> list[dict[str, object]]:
    """Events of steps; the last line may be half written."""
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in events if event["kind"] == "step"]


def _accuracy(spec: Path, folder: Path, seed: int) -> float:
    summary = api.train(spec, out=folder, overrides=[f"train.seed={seed}"])
    assert (summary.status, summary.steps) == ("done", STEPS)
    return float(summary.metrics["test_accuracy"])


@pytest.mark.long
def test_fifty_signals_leave_a_model_as_accurate_as_a_quiet_run_s(tmp_path: Path) -> None:
    spec, folder = tmp_path / "spec.toml", tmp_path / "storm"
    spec.write_text(SPEC)
    quiet = [_accuracy(spec, tmp_path / f"quiet-{seed}", seed) for seed in range(3)]
    storm = _Storm(folder / "log.jsonl", 0)
    storm.start()
    struck = _accuracy(spec, folder, 0)
    ended = len(storm.sent)
    storm.join()
    assert ended == MOMENTS, f"the run ended after {ended} signals"
    assert {signal.SIGKILL, signal.SIGSTOP} == set(storm.sent)
    mean = statistics.fmean(quiet)
    of_images = math.sqrt(mean * (1 - mean) / 360)  # the standard error of an accuracy
    assert abs(struck - mean) <= max(of_images, 2 * statistics.stdev(quiet)), (quiet, struck)
    log = (folder / "log.jsonl").read_text()
    killed = log.count("was killed by SIGKILL and is begun anew")
    assert 0 < killed <= storm.sent.count(signal.SIGKILL)
    steps = [event["step"] for event in _steps(log.splitlines())]
    assert steps == list(range(1, STEPS + 1))
    for server in range(SERVERS):
        rows = read_applied(folder / "servers" / f"applied-{server}.bin")
        for who in np.unique(rows[["worker", "life"]]):
            numbers = rows["number"][rows[["worker", "life"]] == who]
            assert np.array_equal(numbers, np.arange(len(numbers)))
