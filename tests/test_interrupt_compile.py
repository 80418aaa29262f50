"""A run that is asked to end while its layers are compiled ends in order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyreme.runtime import checkpoint, checkpoints

pytestmark = pytest.mark.long

SPEC = """
model = { kind = "mlp", hidden = [32] }
data = { kind = "digits" }
cluster = { cpu_processes = 2 }
[train]
steps = 100000
global_batch = 64
checkpoint_every = 50000
compile = true
"""


def _parents() -> dict[int, tuple[int, str]]:
    """Parent and name of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        found[int(path.parent.name)] = (int(rest.split()[1]), name)
    return found


def _ancestors(process: int, parents: dict[int, tuple[int, str]]) -> list[int]:
    above = []
    while process in parents:
        process = parents[process][0]
        above.append(process)
    return above


def _compiling_rank(command: int) -> int | None:
    """A process below the command and the one it forks ranks from that runs a compiler."""
    parents = _parents()
    for process, (_, name) in parents.items():
        above = _ancestors(process, parents)
        if name == "cc1plus" and command in above:
            return above[above.index(command) - 2]
    return None


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists() or shutil.which("g++") is None,
    reason="needs /proc and a compiler",
)
def test_asked_to_end_while_it_compiles_a_run_saves_and_ends(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = subprocess.Popen(
        [sys.executable, "-m", "polyreme", "train", "spec.toml", "--out", "run"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 240
        while (rank := _compiling_rank(command.pid)) is None:
            assert command.poll() is None, "it ended before it compiled"
            assert time.monotonic() < end, "it never compiled"
            time.sleep(0.02)
        os.kill(rank, signal.SIGTERM)
        _, said = command.communicate(timeout=300)
    finally:
        command.kill()
    assert command.returncode == 130, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] == 1, "the next safe point is the end of the first step"
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None
    assert checkpoint.verify(newest).progress.step == summary["steps"]
