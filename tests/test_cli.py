"""The commands: what they print, write and exit with is a contract with outside readers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import safetensors
import torch

import refusals
from devices import TWO
from polyreme import runlog, spec
from polyreme.plan import store as plans
from polyreme.plan.order import ORDERS

SPEC = """
[model]
kind = "mlp"
hidden = [32]

[data]
kind = "digits"

[train]
steps = 12
global_batch = 64
eval_every = 6
checkpoint_every = 6
clip_norm = 1.0

[cluster]
cpu_processes = 2

[data_parallel]
rule = { kind = "SGD", lr = 0.1, momentum = 0.9 }
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "spec.toml").write_text(SPEC)
    return folder


def environment(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }


def polyreme(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "polyreme", *arguments],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def within(home: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> refusals.Said:
    """The command in this process, which has imported everything.

    Ranks of `warm` runs are forked elsewhere: `--out` must be absolute.
    """
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    return refusals.command(arguments)


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    done = polyreme(home, "train", "spec.toml", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["status"] == "done"
    return home / "runs" / "spec"


def test_a_run_folder_holds_what_readers_expect(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "spec.toml",
        "profile.json",
        "plan.json",
        "log.jsonl",
        "summary.json",
        "report.html",
        "checkpoints",
        "final.safetensors",
    }
    newest = (run / "checkpoints" / "latest").read_text()
    assert newest == "step-12"
    assert (run / "checkpoints" / newest).is_dir()
    assert spec.load(run / "spec.toml").train.steps == 12
    assert plans.load(run / "plan.json").global_batch == 64
    with safetensors.safe_open(run / "final.safetensors", "np") as final:
        sizes = {name: final.get_tensor(name).size for name in final.keys()}  # noqa: SIM118
    assert sum(sizes.values()) == (3 * 32 * 32 + 1) * 32 + (32 + 1) * 10


def test_a_log_has_every_step_and_evaluation(run: Path) -> None:
    events = list(runlog.read(run / "log.jsonl"))
    steps = [event for event in events if isinstance(event, runlog.StepEvent)]
    assert [event.step for event in steps] == list(range(1, 13))
    for event in steps:
        total_s = event.compute_s + event.comm_s + event.wait_s
        assert total_s == pytest.approx(event.step_s, rel=1e-6)
        assert event.samples == 64
    assert [e.step for e in events if isinstance(e, runlog.EvalEvent)] == [6, 12]
    assert [e.step for e in events if isinstance(e, runlog.CheckpointEvent)] == [6, 12]


def test_a_summary_says_what_w_is_made_of(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    expected = {field.name for field in msgspec.structs.fields(runlog.Summary)}
    assert set(summary) == expected
    assert summary["steps"] == 12
    known = summary["basis"]["utilisation"] == "peak"
    assert (summary["mfu"] is not None) is known  # null where the device's peak is not known
    product = summary["utilisation"] * summary["effectiveness"] * summary["goodput"]
    assert summary["w"] == pytest.approx(product)
    assert set(summary["basis"]) == {"utilisation", "effectiveness", "goodput"}
    assert summary["basis"]["effectiveness"] == "assumed"
    assert 0 <= summary["metrics"]["test_accuracy"] <= 1
    assert summary["devices"] == n_devices(run)
    if not torch.accelerator.is_available():
        assert summary["devices"] == 2  # cluster.cpu_processes


def n_devices(run: Path) -> int:
    """Devices of the plan in a run folder."""
    return len(plans.load(run / "plan.json").order)


def test_resuming_goes_on_where_the_run_ended(
    home: Path, run: Path, monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    more = ("--resume", "auto", "--set", "train.steps=15", "--out", str(run))
    said = within(home, monkeypatch, "train", "spec.toml", "--json", *more)
    assert said.code == 0, said.err
    events = list(runlog.read(run / "log.jsonl"))
    again = [e for e in events if isinstance(e, runlog.StepEvent) and e.attempt == 1]
    assert [event.step for event in again] == [13, 14, 15]
    restart = next(event for event in events if isinstance(event, runlog.RestartEvent))
    assert (restart.step, restart.devices) == (12, n_devices(run))


def test_a_new_run_never_overwrites_an_old_one(home: Path, run: Path) -> None:
    old = (run / "log.jsonl").read_bytes()
    done = polyreme(home, "train", "spec.toml", "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "is kept as" in done.stderr
    kept = [path for path in run.parent.iterdir() if path != run]
    assert [(path / "log.jsonl").read_bytes() for path in kept] == [old]


def test_one_page_compares_runs(home: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [path for path in run.parent.iterdir() if path != run]
    folders = map(str, (run, *kept))
    said = within(home, monkeypatch, "report", *folders, "--out", "both.html", "--json")
    assert said.code == 0, said.err
    assert len(json.loads(said.out)["runs"]) == 1 + len(kept)
    assert (home / "both.html").stat().st_size > 0


@pytest.fixture(scope="module")
def printed(home: Path) -> dict[str, Any]:
    """What `plan` prints; it also writes plan.json."""
    with pytest.MonkeyPatch.context() as patch:
        planned = within(
            home, patch, "plan", "spec.toml", "--fix", "shard=2",
            "--set", 'parallel.level="params"', "--out", "plan.json", "--json",
        )  # fmt: skip
    assert planned.code == 0, planned.err
    found: dict[str, Any] = json.loads(planned.out)
    return found


@TWO
def test_a_given_plan_is_the_plan_that_runs(
    home: Path, printed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    assert printed["top"][0]["plan"]["layer_plans"] == printed["layer_plans"]
    assert {"solver", "objective_s", "bound_s", "proved", "candidates", "rejected"} <= set(
        printed["search"]
    )
    given = ("--plan", "plan.json", "--out", str(home / "sharded"))
    said = within(home, monkeypatch, "train", "spec.toml", *given)
    assert said.code == 0, said.err
    ran = plans.load(home / "sharded" / "plan.json")
    assert {layer.level for layer in ran.layer_plans.values()} == {"params"}


@TWO
def test_a_plan_is_priced_as_it_was_when_found(
    home: Path, printed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = within(home, monkeypatch, "plan", "spec.toml", "--price", "plan.json", "--json")
    assert again.code == 0, again.err
    found = json.loads(again.out)
    assert found["layer_plans"] == printed["layer_plans"]
    assert found["estimate"]["memory"] == printed["estimate"]["memory"]


def test_a_plan_is_searched_by_the_solver_that_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ("--assume", "--cluster", "preset:2xH100", "--fix", "pp=2")
    said = within(home, monkeypatch, "plan", "spec.toml", *there, "--solver", "piper", "--json")
    assert said.code == 0, said.err
    record = json.loads(said.out)["search"]
    assert (record["solver"], record["proved"]) == ("piper", False)


@pytest.mark.usefixtures("printed")
@TWO
def test_a_stale_plan_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, warm: None) -> None:
    said = within(
        home, monkeypatch, "train", "spec.toml", "--plan", "plan.json",
        "--set", "train.global_batch=32", "--json", "--out", str(home / "stale"),
    )  # fmt: skip
    assert said.code == 2
    (error,) = json.loads(said.out)["errors"]
    assert (error["path"], error["rule"]) == ("plan.global_batch", "is 32 in the spec")


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("check", "absent.toml"), "absent.toml"),
        (("check", "spec.toml", "--set", "train.stepz=1"), "train.stepz"),
        (("train", "spec.toml", "--set", "data_parallel.rule={kind='SDG'}"), "data_parallel.rule"),
        (("plan", "spec.toml", "--cluster", "preset:4xH1000"), "--cluster"),
        (("plan", "spec.toml", "--fix", "tp"), "--fix"),
        (("plan", "spec.toml", "--solver", "galvatorn"), "--solver"),
        (("plan", "spec.toml", "--fix", "tp=1", "--price", "plan.json"), "--fix"),
        (("plan", "spec.toml", "--assume", "--profile", "profile.json"), "--assume"),
        (("report", "nowhere"), "run"),
        (("train", "spec.toml", "--resume", "nowhere"), ""),
        (("train", "spec.toml", "--out", "spec.toml/run"), "--out"),
        (
            (
                "plan",
                "spec.toml",
                "--assume",
                "--cluster",
                "preset:1xH100",
                "--out",
                "spec.toml/a/plan.json",
            ),
            "file",
        ),
        (("train",), "command line"),
        (("fly", "spec.toml"), "command line"),
    ],
)
def test_what_is_wrong_is_said_as_json(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], path: str
) -> None:
    said = within(home, monkeypatch, *arguments, "--json")
    assert said.code == 2, said.err
    errors = json.loads(said.out)["errors"]
    assert all(set(error) == {"path", "value", "rule", "legal"} for error in errors)
    assert path in errors[0]["path"]
    assert "Traceback" not in said.err


def test_a_plan_that_cannot_fit_exits_3_and_says_what_would(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "large.toml").write_text(
        '[model]\npreset = "llama3-70b"\n[data]\nkind = "python_source"\n'
        "[train]\nsteps = 10\nglobal_batch = 8\nseq_len = 4096\n"
    )
    preset = ("--cluster", "preset:1xH100", "--assume")
    said = within(home, monkeypatch, "plan", "large.toml", *preset, "--json")
    assert said.code == 3, said.err
    found: dict[str, Any] = json.loads(said.out)["infeasible"]
    assert sum(found["need_bytes"].values()) > found["have_bytes"]
    assert found["layer"]
    assert found["ways_out"]


def asked(process: subprocess.Popen[str], who: str) -> psutil.Process:
    """The process of a run that gets the signal."""
    command = psutil.Process(process.pid)
    (zygote,) = (each for each in command.children() if each.children())
    return {"command": command, "zygote": zygote, "rank": zygote.children()[-1]}[who]


@pytest.mark.slice("command")
@pytest.mark.parametrize("who", ["command", "zygote", "rank"])
def test_an_interrupted_run_leaves_a_checkpoint_and_exits_130(home: Path, who: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "polyreme", "train", "spec.toml", "--set", "train.steps=100000",
         "--set", "train.eval_every=100000", "--set", "train.checkpoint_every=100000",
         "--out", who],
        cwd=home, env=environment(home), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = home / who / "log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size > 0):
        time.sleep(0.1)
    asked(process, who).send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    summary = json.loads((home / who / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (home / who / "checkpoints" / "latest").read_text() == f"step-{summary['steps']}"
    assert (home / who / "report.html").exists()
    saved = f"step-{summary['steps']} is saved in {who}/checkpoints; the same command with --resume"
    assert said.count(saved) == 1, said


def test_two_commands_never_write_one_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = subprocess.Popen(
        [sys.executable, "-m", "polyreme", "train", "spec.toml", "--out", "shared"],
        cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (home / ".shared.lock").exists():
        time.sleep(0.02)
    second = within(home, monkeypatch, "train", "spec.toml", "--out", "shared", "--json")
    _, said = first.communicate(timeout=120)
    assert first.returncode == 0, said
    assert second.code == 2, second.err
    assert "another command" in json.loads(second.out)["errors"][0]["rule"]
    assert not (home / ".shared.lock").exists()


def visible(node: int) -> dict[str, str]:
    """Agents stand for hosts of their own: each sees one GPU, or none where there are too few."""
    enough = torch.cuda.device_count() > 1
    return {"CUDA_VISIBLE_DEVICES": str(node) if enough else ""}


@pytest.mark.long
def test_two_agents_of_torchrun_train_one_run(home: Path) -> None:
    with socket.socket() as picked:
        picked.bind(("127.0.0.1", 0))
        port = picked.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node",
             "1", "--node-rank", str(node), "--rdzv-backend", "c10d", "--rdzv-id", "test",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
             "-m", "polyreme", "train", "spec.toml", "--out", "agents", "--json"],
            cwd=home, env=environment(home) | visible(node), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    said = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(err for _, err in said)
    summary = json.loads((home / "agents" / "summary.json").read_text())
    assert (summary["status"], summary["devices"], summary["steps"]) == ("done", 2, 12)
    printed = [out for out, _ in said if out.strip()]
    assert [json.loads(out)["status"] for out in printed if out.strip() != "null"] == ["done"]


def test_a_list_that_goes_into_a_pipe_is_a_line_each() -> None:
    said = refusals.command(("list", "algorithms"))
    assert said.code == 0
    (line,) = [line for line in said.out.splitlines() if line.startswith("compress: TopK\t")]
    assert line.endswith("Stich, Cordonnier and Jaggi 2018, section 2")


def test_orders_are_listed_with_what_they_cost_and_whether_they_train_alike() -> None:
    said = refusals.command(("list", "orders"))
    assert said.code == 0
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[0] for row in rows] == list(ORDERS)
    assert all(len(row) == 6 and all(row) for row in rows)
    (row,) = [row for row in rows if row[0] == "gpipe"]
    assert row[2:] == ["(p-1)(F+B)", "m", "synchronous training", "Huang et al. 2019"]
