"""The runs of a storm: their spec, their processes, their disk, and what they left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "STORM_RUN"
FOLDER, SKIP, PACE = "STORM_FAULTS", "STORM_SKIP", "STORM_PACE"  # what `storm_faults` is told
DISK_BYTES = 64 * 2**20
PATIENCE_S = 1800.0  # for what takes minutes at most
_COMMAND = Path(__file__).with_name("storm.py")
_SPEC = """
[model]
kind = "transformers"
model_type = "llama"

[model.config]
vocab_size = 256
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32

[data]
kind = "text"
path = "{text}"
heldout = 0.05

[train]
steps = {steps}
global_batch = 16
seq_len = 32
seed = {seed}
clip_norm = 1.0
checkpoint_every = {every}
log_samples = true
on_save_error = "continue"
timeout_s = {timeout_s}
restarts = 100000
restart_wait_s = 0.1
schedule = {{ kind = "cosine", warmup = 20 }}

[cluster]
cpu_processes = {processes}

[parallel]
pp = 1

[data_parallel]
rule = {{ kind = "AdamW", lr = 3e-3 }}
"""


@dataclass(kw_only=True)
class Setting:
    """What is trained, and how hard it blows.

    In the storm a step takes `pace_s` at least, so that a fast machine is not through before it.
    """

    home: Path
    steps: int
    seconds: float
    n_events: int
    seed: int
    processes: int = 4
    every: int = 20
    timeout_s: float = 4.0
    pace_s: float = 0.06


def write_spec(setting: Setting, seed: int) -> Path:
    """The spec of a run with that seed, and its text: a part of Python's standard library."""
    text = setting.home / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
            (text / f"{path.stem}.txt").write_bytes(path.read_bytes())
    spec = setting.home / f"seed-{seed}.toml"
    spec.write_text(
        _SPEC.format(
            text=text,
            steps=setting.steps,
            seed=seed,
            every=setting.every,
            timeout_s=setting.timeout_s,
            processes=setting.processes,
        )
    )
    return spec


def start(
    setting: Setting,
    spec: Path,
    folder: Path,
    mark: str,
    *,
    skip: Sequence[int] = (),
    pace_s: float = 0.0,
) -> subprocess.Popen[bytes]:
    """The command, going on where it was; its ranks obey `storm_faults`."""
    faults = setting.home / "faults"
    faults.mkdir(exist_ok=True)
    command = [sys.executable, str(_COMMAND), "--child", "train", str(spec), "--json"]
    command += ["--out", str(folder), "--resume", "auto"]
    with (setting.home / f"{mark}.stderr").open("ab") as errors:
        return subprocess.Popen(
            command,
            env=os.environ
            | {FOLDER: str(faults), MARK: mark, SKIP: ",".join(map(str, skip)), PACE: str(pace_s)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def quiet(setting: Setting, seed: int, skip: Sequence[int] = ()) -> Path:
    """A run that nothing disturbs, but for steps that are skipped."""
    for order in (setting.home / "faults").glob("rank-*"):
        order.unlink()  # a storm's last one, which its run did not live to obey
    name = f"quiet-{seed}" if not skip else f"quiet-{seed}-skipping"
    spec = write_spec(setting, seed)
    process = start(setting, spec, setting.home / name, name, skip=skip)
    try:
        code = process.wait(PATIENCE_S)
    finally:
        process.terminate()
    assert code == 0, (setting.home / f"{name}.stderr").read_text()
    return setting.home / name


def final_loss(folder: Path) -> float:
    """What a run ended with."""
    loss: float = summary(folder)["metrics"]["heldout_loss"]
    return loss


def summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Events by step; of a step done twice, that of the later attempt."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {event["step"]: event for event in events if event["kind"] == "step"}


def marked(mark: str) -> list[psutil.Process]:
    """Processes of a run that are alive, the first command first."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found, key=lambda process: process.create_time())


def ranks(mark: str) -> list[psutil.Process]:
    """Ranks of a run: those without children whose grandparent is the command."""
    processes = marked(mark)
    return [p for p in processes if p.ppid() != os.getpid() and _depth(p, processes) == 2]


def _depth(process: psutil.Process, known: list[psutil.Process]) -> int:
    pids = {each.pid: each for each in known}
    depth = 0
    while (above := pids.get(process.ppid())) is not None:
        process, depth = above, depth + 1
    return depth


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """Make the folder a small file system of its own, if that is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
