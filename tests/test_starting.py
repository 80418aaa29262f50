"""What a run is begun from, and what one that broke off leaves behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polyreme as pr
from devices import TWO
from polyreme import ending, runlog
from polyreme.api import aftermath, folders, starting, training
from polyreme.errors import ConfigError, RunError
from polyreme.runtime import checkpoint, checkpoints, driver, place
from polyreme.runtime.saver import Saver

SPEC: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [4]},
    "data": {"kind": "digits"},
    "train": {"steps": 3, "global_batch": 8, "checkpoint_every": 1, "keep": 3},
}
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """This process as the only one of torchrun: `job(name, n_restarts)` sets which."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)

    def become(name: str, n_restarts: int = 0) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(n_restarts))

    become("first")
    return become


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with three checkpoints, by the only process of torchrun."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("TORCHELASTIC_RUN_ID", "first")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        for name, value in ALONE.items():
            patch.setenv(name, value)
        pr.train(SPEC, out=home / "run")
    return home


@pytest.fixture
def run(job: Any, whole: Path, tmp_path: Path) -> Path:
    """A run that a test may change, and what was measured for it."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def _restarts(folder: Path) -> list[int]:
    events = runlog.read(folder / "log.jsonl")
    return [event.step for event in events if isinstance(event, runlog.RestartEvent)]


def _fail_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole, done = driver.Driver.step, [0]

    def failing(self: Any, *args: Any, **said: Any) -> Any:
        done[0] += 1
        if done[0] == step:
            raise RuntimeError("the card fell off")
        return whole(self, *args, **said)

    monkeypatch.setattr(driver.Driver, "step", failing)


def test_a_failed_rank_of_torchruns_leaves_a_trace_and_goes_on_from_where_it_began(
    job: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, out = run / "checkpoints" / "step-2", tmp_path / "other"
    job("second")
    with monkeypatch.context() as patch:
        _fail_at(patch, 1)
        with pytest.raises(RuntimeError, match="fell off"):
            pr.train(SPEC, out=out, resume=str(start))
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    assert "the card fell off" in (out / "report.html").read_text()
    (fault,) = [e for e in runlog.read(out / "log.jsonl") if isinstance(e, runlog.FaultEvent)]
    assert (fault.attempt, fault.what) == (0, "the card fell off")
    job("second", 1)
    found = pr.train(SPEC, out=out)
    assert found is not None
    assert (found.status, _restarts(out)) == ("done", [2, 2])


def test_an_attempt_of_another_job_does_not_go_on_with_the_run_that_is_there(
    job: Any, run: Path, tmp_path: Path
) -> None:
    job("second", 1)  # its first attempt died before it had a folder
    pr.train(SPEC, out=run)
    assert _restarts(run) == []
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("run-")]) == 1
    pr.train(SPEC | {"train": SPEC["train"] | {"steps": 4}}, out=run)
    assert _restarts(run) == [3]


def test_imported_weights_in_the_folder_are_not_begun_from_unless_asked(run: Path) -> None:
    start = starting.begin(None, run, "a")
    assert start.again(run) == ()
    (run / "checkpoints" / "step-3" / "meta.json").touch()
    assert start.again(run) == (run / "checkpoints" / "step-3",)


def test_a_relative_folder_and_an_absolute_checkpoint_are_one_run(
    job: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    pr.train(SPEC, out=Path("run"), resume=str(run / "checkpoints" / "step-2"))
    assert _restarts(run) == [2]


def test_auto_sets_a_damaged_checkpoint_aside_and_a_named_one_is_refused(
    job: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-3"
    with (newest / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match="is damaged"):
        pr.train(SPEC, out=run, resume=str(newest))
    assert newest.is_dir()
    pr.train(SPEC, out=run, resume="auto")
    assert _restarts(run)[-1] == 2
    assert "it is kept as damaged.step-3, going on from step-2" in capsys.readouterr().err
    assert checkpoint.verify(newest).progress.step == 3


def test_a_damaged_checkpoint_that_cannot_be_renamed_ends_the_run_with_words(
    job: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "step-3" / "index.json").write_text("{")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError, match=r"renamed to damaged\.step-3: Read-only.*--resume"):
        pr.train(SPEC, out=run, resume="auto")


def test_a_checkpoint_that_is_not_there_is_refused_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "Launcher", None)
    with pytest.raises(ConfigError, match='resume: "nowhere" is no folder'):
        pr.train(SPEC, out=tmp_path / "run", resume="nowhere")


def test_a_checkpoint_without_its_meta_is_damaged_and_not_passed_over(
    job: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = [run / "checkpoints" / f"step-{step}" for step in (3, 2, 1)]
    (homes[0] / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"step-3.* is damaged: meta\.json is missing"):
        pr.train(SPEC, out=run, resume=str(homes[0]))
    pr.train(SPEC, out=run, resume="auto")
    assert (run / "checkpoints" / "damaged.step-3").is_dir()
    assert "going on from step-2" in capsys.readouterr().err
    for home in homes:
        (home / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"meta\.json is missing"):
        pr.train(SPEC, out=run, resume="auto")
    assert (run / "log.jsonl").exists()  # nothing began anew


def test_when_no_checkpoint_is_whole_a_run_does_not_begin_anew(job: Any, run: Path) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step-1\" is damaged"):
        pr.train(SPEC, out=run, resume="auto")


def test_steps_that_a_run_went_back_from_are_no_candidates(job: Any, run: Path) -> None:
    home = run / "checkpoints"
    (home / "latest").write_text("step-2")
    shutil.copytree(home / "step-1", home / "step-1.bak")
    assert [path.name for path in checkpoints.candidates(run)] == ["step-2", "step-1"]


def test_a_checkpoint_whose_replacement_never_came_is_gone_on_from(job: Any, run: Path) -> None:
    home = run / "checkpoints"
    (home / "step-3").rename(home / ".step-3.replaced")
    more = SPEC | {"train": SPEC["train"] | {"steps": 4}}
    pr.train(more, out=run, resume="auto")
    assert _restarts(run) == [3]


def test_a_changed_order_of_samples_is_said(
    job: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pr.train(SPEC, out=run, resume="auto")
    assert "was written" not in capsys.readouterr().err
    changed = SPEC | {"train": SPEC["train"] | {"global_batch": 4, "steps": 4}}
    pr.train(changed, out=run, resume="auto")
    said = capsys.readouterr().err
    assert "was written under train.global_batch = 8, and it is 4 now" in said
    assert "train.seed" not in said


def test_a_broken_meta_spoils_neither_the_best_nor_the_newest(run: Path) -> None:
    home = run / "checkpoints"
    (home / "step-3" / "meta.json").write_text("{")
    (home / "latest").unlink()
    assert checkpoints.newest(run) == home / "step-3"
    assert checkpoints.best_of(sorted(home.glob("step-*")), "heldout_loss") is None
    checkpoints.prune(run, 1, "heldout_loss")


def test_older_checkpoints_that_cannot_be_removed_do_not_fail_the_new_one(
    job: Any,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(checkpoints, "prune", refuse)
    more = SPEC | {"train": SPEC["train"] | {"steps": 4}}
    found = pr.train(more, out=run, resume="auto")
    assert found is not None
    assert found.status == "done"
    assert "older checkpoints cannot be removed" in capsys.readouterr().err


def test_a_disk_that_is_dead_to_questions_too_still_gives_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints, "newest", refuse)
    asked: Any = SimpleNamespace(_needed_bytes=7, _partial=tmp_path / "x", _run_folder=tmp_path)
    said = Saver._in_words(asked, OSError(5, "Input/output error"))
    assert "it needs 7 bytes" in said
    assert "what was there before it is unknown" in said


def test_a_new_attempt_takes_back_what_the_one_before_came_to(
    job: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that then ends without a word must not look done."""
    monkeypatch.setattr(aftermath, "conclude", lambda *_: None)
    _fail_at(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="fell off"):
        pr.train(SPEC | {"train": SPEC["train"] | {"steps": 4}}, out=run, resume="auto")
    assert not (run / "summary.json").exists()
    assert not (run / "report.html").exists()


@TWO
def test_a_given_plan_for_fewer_devices_than_processes_is_refused(
    job: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (pr.train, pr.verify):
        with pytest.raises(ConfigError, match=r"plan: 1 uses fewer devices .* processes: 2"):
            command(SPEC, plan=run / "plan.json", **({"out": run} if command is pr.train else {}))


def test_what_cannot_be_written_at_the_end_does_not_hide_the_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "x")

    monkeypatch.setattr(aftermath, "_summarise", refuse)
    aftermath.conclude(None, run, "failed", (None, None))  # type: ignore[arg-type]
    assert "Read-only file system" in capsys.readouterr().err
    logs = run.parent / "logs"
    logs.mkdir()
    (logs / "a").touch()
    monkeypatch.setattr(Path, "replace", refuse)
    folders.take_logs(logs, run)
    assert "Read-only file system" in capsys.readouterr().err


def test_a_lock_whose_holder_just_removed_it_locks_nobody_out_and_lets_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it the last holder may have removed it."""
    mark, lock, removed = tmp_path / ".run.lock", fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not removed:
            removed.append(True)
            mark.unlink()
        lock(file, operation)

    monkeypatch.setattr(folders.fcntl, "flock", late)
    folder = tmp_path / "run"
    with (
        folders.claimed(folder),
        pytest.raises(ConfigError, match="another command"),
        folders.claimed(folder),
    ):
        pass
    assert not mark.exists()


@pytest.mark.parametrize("name", ["nope", "nope/deep/run"])
def test_a_run_folder_that_cannot_be_made_is_named_as_it_was_given(name: str) -> None:
    folder = Path("/proc") / name
    with (
        pytest.raises(ConfigError, match=rf'--out: "{folder}" cannot be written \(No such file'),
        folders.claimed(folder),
    ):
        pass


def test_a_process_without_a_result_prints_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ending.typer.Exit):
        ending.end(lambda: None, True)
    assert capsys.readouterr().out == ""


def test_jobs_without_a_name_are_told_apart_by_who_started_them() -> None:
    assert place.launch_name({"TORCHELASTIC_RUN_ID": "job"}) == "job"
    assert place.launch_name({"TORCHELASTIC_RUN_ID": "none"}).endswith(f":{os.getppid()}")
