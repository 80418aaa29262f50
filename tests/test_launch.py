"""The launcher: ranks start, end, and never outlive their job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import launch_entries as entries
from polyreme.errors import ConfigError, Infeasible, RunError, Violation
from polyreme.runtime.launch import PRELOAD, Launcher, RankFailed
from polyreme.runtime.place import is_launched

ENTRIES = entries.__file__


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def _gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _start(name: str, folder: Path, extra: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher in a process of its own, and the process ids of its ranks."""
    command = [sys.executable, ENTRIES, name, str(folder), extra]
    job = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)})
    notes = [folder / f"{rank}.pid" for rank in range(2)]
    _until(lambda: all(note.exists() and note.read_text() for note in notes))
    return job, [int(note.read_text()) for note in notes]


def test_results_come_in_rank_order(launcher: Launcher) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT")
    seen = launcher.run(entries.environment, names, n_processes=3, attempt=2)
    assert [list(one.values()) for one in seen] == [
        [str(rank), str(rank), "3", "1", "2"] for rank in range(3)
    ]


def test_each_rank_has_further_variables_before_the_launcher_s_and_the_next_run_has_none(
    launcher: Launcher,
) -> None:
    names = ("RANK", "LOCAL_RANK", "POLYREME_TEST_HOST")
    given = [{"LOCAL_RANK": "0", "POLYREME_TEST_HOST": f"host-{rank}"} for rank in range(2)]
    seen = launcher.run(entries.environment, names, n_processes=2, environment=given)
    assert [list(one.values()) for one in seen] == [
        [str(rank), "0", f"host-{rank}"] for rank in range(2)
    ]
    after = launcher.run(entries.environment, names, n_processes=2)
    assert [list(one.values()) for one in after] == [["0", "0", None], ["1", "1", None]]


def test_one_process_is_a_group_too(launcher: Launcher) -> None:
    assert launcher.run(entries.summed, n_processes=1) == [0.0]


def test_ranks_can_use_the_device_after_all_imports_of_training() -> None:
    """Importing must not open the device: a forked process could not use it any more."""
    with Launcher(preload=(*PRELOAD, "polyreme.api.ranks")) as trainer:
        assert trainer.run(entries.computes, n_processes=1) == [4.0]


@pytest.mark.long
def test_two_jobs_at_once_do_not_collide(launcher: Launcher) -> None:
    found: dict[str, list[float]] = {}
    with Launcher() as second:
        jobs = [
            threading.Thread(
                target=lambda name, with_: found.update(
                    {name: with_.run(entries.summed, n_processes=2)}
                ),
                args=job,
            )
            for job in (("first", launcher), ("second", second))
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    assert found == {"first": [1.0, 1.0], "second": [1.0, 1.0]}


def test_an_attempt_does_not_see_the_store_of_the_one_before(launcher: Launcher) -> None:
    for attempt in range(2):
        found = launcher.run(
            entries.store_key_of_an_earlier_attempt, n_processes=2, attempt=attempt
        )
        assert found == [False, False]


def test_a_raising_rank_is_named_with_its_traceback_once(launcher: Launcher) -> None:
    with pytest.raises(RunError) as caught:
        launcher.run(entries.raises_on, (1, ValueError("boom")), n_processes=2)
    said = str(caught.value)
    assert said.startswith("rank 1 of 2 ended with exit code 1")
    assert said.count("ValueError: boom") == 1
    assert said.count("Traceback") == 1
    assert "last words" in said


def test_own_errors_arrive_as_they_were_raised(launcher: Launcher) -> None:
    violation = Violation(path="resume", value=1, rule="is wrong", legal="2")
    with pytest.raises(ConfigError) as caught:
        launcher.run(entries.raises_on, (0, ConfigError([violation])), n_processes=2)
    assert caught.value.violations == (violation,)
    tight = Infeasible(
        plan="1 replica",
        layer="head",
        layer_bytes=2,
        device="a",
        have_bytes=1,
        need_bytes={"logits": 2},
        ways_out=["shard"],
    )
    with pytest.raises(Infeasible, match='its largest layer is "head"') as told:
        launcher.run(entries.raises_on, (1, tight), n_processes=2)
    assert told.value.need_bytes == {"logits": 2}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGKILL", "was ended by SIGKILL"),
        ("SIGSEGV", "was ended by SIGSEGV"),
        ("exit", "ended with exit code 7"),
        ("raise", "ValueError: the cause"),
    ],
)
def test_the_rank_that_died_is_blamed_not_those_that_lost_it(
    launcher: Launcher, how: str, said: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        launcher.run(entries.dies_in_a_collective, (1, how), n_processes=3)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("rank 1 of 3 ")
    assert said in str(caught.value)


def test_a_stopped_rank_does_not_outlive_a_failure(launcher: Launcher) -> None:
    with pytest.raises(RunError, match=r"(?s)rank 0 of 2 .*the cause"):
        launcher.run(entries.fails_beside_a_stopped_rank, n_processes=2)


def test_a_launcher_serves_again_after_a_failure(launcher: Launcher) -> None:
    with pytest.raises(RunError):
        launcher.run(entries.raises_on, (0, ValueError("boom")), n_processes=2)
    assert launcher.run(entries.twice, (b"x" * 1_000_000,), n_processes=1) == [
        (b"x" * 1_000_000, b"x" * 1_000_000)
    ]


def test_logs_of_silent_ranks_are_not_kept(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        launcher.run(
            entries.raises_on, (2, ValueError("boom")), n_processes=3, attempt=4, logs=tmp_path
        )
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-4.rank-2.txt"]
    launcher.run(entries.twice, (1,), n_processes=2, logs=tmp_path / "silent")
    assert not (tmp_path / "silent").exists()


def test_stdout_belongs_to_the_launcher(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    with Launcher(preload=()) as fresh:
        fresh.run(entries.prints, ("model talk",), n_processes=2)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("model talk") == 1


def test_an_interpreter_that_cannot_start_is_reported() -> None:
    with (
        Launcher(preload=("no_such_module",)) as broken,
        pytest.raises(RunError, match="ended with exit code 1"),
    ):
        broken.run(entries.summed, n_processes=1)


def test_killing_the_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    job, ranks = _start("waits", tmp_path, "[false]")
    family = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    assert set(ranks) < set(family)
    job.kill()
    job.wait()
    _until(lambda: all(map(_gone, family)))


def test_killing_the_middle_process_leaves_no_orphan(tmp_path: Path) -> None:
    job, ranks = _start("waits", tmp_path, "[false]")
    (zygote,) = psutil.Process(job.pid).children()
    zygote.kill()
    _until(lambda: all(map(_gone, ranks)))
    assert job.wait(30) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_ends_ranks_that_ignore_it(tmp_path: Path, number: int) -> None:
    job, ranks = _start("waits", tmp_path, "[false]")
    os.kill(job.pid, number)
    assert job.wait(30) == 130
    assert all(map(_gone, ranks))


def test_a_second_signal_kills_ranks_that_train(launcher: Launcher, tmp_path: Path) -> None:
    def ask() -> None:
        _until(lambda: all((tmp_path / f"{rank}.pid").exists() for rank in range(2)))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(KeyboardInterrupt):
        launcher.run(entries.trains_on, (tmp_path,), n_processes=2, grace_s=60.0)
    asking.join()
    assert not list(tmp_path.glob("*.done"))


def test_a_rank_may_end_in_order_when_interrupted(tmp_path: Path) -> None:
    job, _ = _start("stops_on_sigterm", tmp_path, "[]")
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(30) == 130
    assert [(tmp_path / f"{rank}.done").read_text() for rank in range(2)] == ["saved", "saved"]


@pytest.mark.long
def test_two_torchrun_agents_make_one_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "one"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += [ENTRIES, "joins", str(tmp_path)]
    agents = [subprocess.Popen(command) for _ in range(2)]
    assert [agent.wait(120) for agent in agents] == [0, 0]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank-0": "1.0",
        "rank-1": "1.0",
    }


@pytest.mark.parametrize(
    ("environment", "is_rank"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, True),
    ],
)
def test_only_a_rank_joins(environment: dict[str, str], is_rank: bool) -> None:
    assert is_launched(environment) is is_rank
