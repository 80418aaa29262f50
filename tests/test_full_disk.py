"""A run on a disk that is too small for its second checkpoint, as a user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyreme as pr
from polyreme.errors import RunError
from polyreme.runlog import FaultEvent, StepEvent, read, write_whole
from polyreme.runtime import checkpoint, checkpoints, tensorfile

SPEC = """
model = { kind = "mlp", hidden = [256] }
data = { kind = "digits" }
cluster = { cpu_processes = 2 }
parallel = { replica = 2 }
[train]
steps = 6
global_batch = 16
checkpoint_every = 2
keep = 3
[data_parallel]
rule = { kind = "AdamW", lr = 0.001 }
"""
CHECKPOINT_BYTES = 3 * 4 * (3 * 32 * 32 * 256 + 256 + 256 * 10 + 10)


@pytest.fixture
def disk(tmp_path):
    """A folder with room for one checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _train(home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (home / "spec.toml").write_text(SPEC)
    return subprocess.run(
        [sys.executable, "-m", "polyreme", "train", "spec.toml", "--out", "disk/run", *more],
        cwd=home,
        env=os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_is_said_with_bytes_and_the_policy_decides(disk, tmp_path, policy):
    """No traceback, though the report finds no room either; the checkpoint before it is whole."""
    done = _train(tmp_path, "--json", "--set", f"train.on_save_error={policy}")
    assert "Traceback" not in done.stderr, done.stderr
    what = "the checkpoint of step 4 failed on rank "
    assert what in done.stderr
    run = disk / "run"
    events = list(read(run / "log.jsonl"))
    assert [path.name for path in (run / "checkpoints").glob("*step-*")] == ["step-2"]
    assert checkpoint.verify(checkpoints.newest(run)).progress.step == 2
    if policy == "stop":
        assert done.returncode == 1
        (error,) = json.loads(done.stdout)["errors"]
        said = error["rule"]
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["status"] == "done"
        said = next(event.what for event in events if isinstance(event, FaultEvent))
        assert max(event.step for event in events if isinstance(event, StepEvent)) == 6
    assert what in said
    needed = int(said.split("it needs ")[1].split(" bytes")[0].replace(",", ""))
    assert CHECKPOINT_BYTES <= needed < CHECKPOINT_BYTES + 1000
    free = int(said.split(" bytes, ")[1].split(" are free")[0].replace(",", ""))
    assert 0 < free < 10 * 2**20 - CHECKPOINT_BYTES, "without what was written of the new one"
    assert not list(run.glob(".*.partial"))


def test_a_file_that_finds_no_room_leaves_the_one_before(disk):
    write_whole(disk / "page", b"before")
    with pytest.raises(RunError, match="it needs 20,000,000 bytes, "):
        write_whole(disk / "page", bytes(20_000_000))
    assert [(path.name, path.read_bytes()) for path in disk.iterdir()] == [("page", b"before")]


def test_under_a_launcher_the_log_names_the_operation_too(monkeypatch, tmp_path):
    def full(path, *_):
        raise OSError(28, "No space left on device", str(path))

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("XDG_CACHE_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tensorfile, "write", full)
    spec = {
        "model": {"kind": "mlp", "hidden": [4]},
        "data": {"kind": "digits"},
        "train": {"steps": 1, "global_batch": 4},
    }
    with pytest.raises(RunError, match="No space left"):
        pr.train(spec, out=tmp_path / "run")
    [fault] = [e for e in read(tmp_path / "run" / "log.jsonl") if isinstance(e, FaultEvent)]
    assert (fault.rank, fault.op) == (0, "save")
