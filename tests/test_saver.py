"""Saving while training goes on: what fails, what stays, what a run that broke off goes on with."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import subprocess
import threading
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyreme.algo.rule import AdamW
from polyreme.errors import RunError
from polyreme.runlog import CheckpointEvent, EvalEvent, FaultEvent, StepEvent
from polyreme.runtime import checkpoint, checkpoints, loop, making, tensorfile
from polyreme.runtime.final import save_final
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.saver import Saver
from test_runtime import Record
from tiny import Case, Model

SHARDED = {"shard": 2, "level": "params"}
STEPS = 8


def _case(layout=SHARDED, **settings):
    return Case(Model(tied=True, batch_norm=True), layout, rule=AdamW(lr=0.01), steps=STEPS), {
        "checkpoint_every": 2,
        "log_samples": True,
        **settings,
    }


def _train(world, case, run, *, resume=False, until=None, on_error="stop"):
    """Weights, status and events of a run that breaks off after `until` steps."""
    case, settings = case
    job = replace(case, settings=settings).job()
    record = Record()
    saver = Saver(
        run,
        job.graph,
        world,
        keep=job.train.keep,
        best=job.train.keep_best,
        on_error=on_error,
        log=record,
    )
    newest = checkpoints.newest(run) if resume else None
    done = [checkpoint.read_meta(newest).progress.step if newest else 0]

    def stop():
        done[0] += 1
        return world.rank == world.n_ranks - 1 and done[0] == until

    outcome = loop.train(
        job,
        world,
        log=record,
        stop=None if until is None else stop,
        save=saver,
        load=None if newest is None else lambda s: checkpoint.load(s, newest, graph=job.graph),
    )
    weights = dict(full_parameters(outcome.state))
    return weights, (outcome.status, outcome.steps), record.events


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@contextmanager
def _full_disk(world, *, rank, which):
    """Plants an error in the `which`-th file that a rank writes."""
    write, calls = tensorfile.write, [0]

    def failing(path, *args):
        calls[0] += 1
        if calls[0] == which and world.rank == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args)

    tensorfile.write = failing
    try:
        yield
    finally:
        tensorfile.write = write


@pytest.mark.parametrize("layout", [SHARDED, {"replica": 2}], ids=str)
def test_a_disk_that_is_full_on_one_rank_ends_the_run_on_all(pool, tmp_path, layout):
    for failure in pool(2).outcomes(_stopped, _case(layout), tmp_path):
        assert isinstance(failure.error, RunError)
        said = str(failure.error)
        assert "step 4 failed on rank 1" in said
        assert "No space left" in said
        assert "it needs " in said
        assert " are free" in said
        assert "step-2 stays the newest" in said
    assert _names(tmp_path) == ["latest", "step-2"]
    checkpoint.verify(tmp_path / "checkpoints" / "step-2")


def _stopped(world, case, run):
    with _full_disk(world, rank=1, which=2):
        return _train(world, case, run)


def _continued(world, case, run):
    with _full_disk(world, rank=1, which=2):
        return _train(world, case, run, on_error="continue")


def test_training_goes_on_after_a_failed_save_if_told_so(pool, tmp_path):
    calm, _, _ = pool(2).run(_train, _case(), tmp_path / "calm")[0]
    weights, ended, events = pool(2).run(_continued, _case(), tmp_path / "run")[0]
    assert ended == ("done", STEPS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in calm.items())
    (fault,) = [event for event in events if isinstance(event, FaultEvent)]
    assert (fault.op, fault.rank) == ("save", 1)
    saved = [event.step for event in events if isinstance(event, CheckpointEvent)]
    assert saved == [2, 6, 8]
    assert _names(tmp_path / "run") == ["latest", "step-6", "step-8"]


def _last_fails(world, case, run):
    with _full_disk(world, rank=1, which=STEPS // 2):
        return _train(world, case, run, on_error="continue")


def test_a_last_checkpoint_that_failed_is_tried_again(pool, tmp_path):
    _, ended, events = pool(2).run(_last_fails, _case(), tmp_path)[0]
    assert ended == ("done", STEPS)
    assert sum(isinstance(event, FaultEvent) for event in events) == 1
    assert _names(tmp_path) == ["latest", "step-6", "step-8"]


def _longer(world, case, run):
    """A run of all steps, then the same of half of them."""
    _train(world, case, run)
    with redirect_stderr(io.StringIO()) as said:
        _, ended, _ = _train(world, (replace(case[0], steps=STEPS // 2), case[1]), run, resume=True)
    return ended, said.getvalue()


def test_a_run_that_is_past_its_last_step_is_done_and_says_so(pool, tmp_path):
    [(ended, said)] = pool(1).run(_longer, _case({}), tmp_path)
    assert ended == ("done", STEPS)
    assert f"nothing to do: of {STEPS // 2} steps {STEPS} are done" in said


def _on_small_disk(world, case, run):
    return _train(world, case, run, on_error="continue")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_real_full_disk_leaves_no_half_checkpoint_behind(pool, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (disk / "filler").write_bytes(bytes(500 * 2**10))
        _, ended, events = pool(2).run(_on_small_disk, _case(), disk)[0]
        assert ended == ("done", STEPS)
        said = [event.what for event in events if isinstance(event, FaultEvent)]
        assert len(said) == 5  # the last is tried twice
        assert all("No space left" in what and "there is none before it" in what for what in said)
        assert checkpoints.newest(disk) is None
        assert [path for path in (disk / "checkpoints").iterdir() if path.is_dir()] == []
        (disk / "filler").unlink()
        pool(2).run(_on_small_disk, _case(keep=1), disk)
        assert checkpoints.newest(disk).name == "step-8"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_cannot_be_made_is_one_error(pool, tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    for failure in pool(2).outcomes(_train, _case(), tmp_path):
        assert isinstance(failure.error, RunError)
        said = str(failure.error)
        assert "step 2 failed on rank 0" in said
        assert re.search(r"partial: Not a directory; it needs [\d,]+ bytes, [\d,]+ are free", said)
        assert "there is none before it" in said


def _slow_disk(world, case, run):
    """A rank's second checkpoint is written once the run has taken two more steps."""
    write, calls, go = tensorfile.write, [0], threading.Event()

    def slow(*args):
        calls[0] += 1
        if calls[0] == 2:
            assert go.wait(60)
        return write(*args)

    if world.rank == 1:
        tensorfile.write = slow
    case, settings = case
    settings = {**settings, "checkpoint_every": 3}
    seen = []

    class Watching(Record):
        def write(self, event):
            super().write(event)
            seen.append((type(event).__name__, event.step))

    job = replace(case, settings=settings).job()
    record = Watching()
    saver = Saver(run, job.graph, world, keep=5, log=record)
    steps = [0]

    def counted():
        steps[0] += 1
        if steps[0] == STEPS:
            go.set()
        return False

    try:
        loop.train(job, world, log=record, stop=counted, save=saver)
    finally:
        tensorfile.write = write
    return seen


def test_steps_go_on_while_a_rank_still_writes(pool, tmp_path):
    seen, _ = pool(2).run(_slow_disk, _case(), tmp_path)
    assert seen.index(("CheckpointEvent", 6)) > seen.index(("StepEvent", 8))
    assert _names(tmp_path) == ["latest", "step-3", "step-6", "step-8"]
    for step in (3, 6, 8):
        checkpoint.verify(tmp_path / "checkpoints" / f"step-{step}")


def test_a_checkpoint_is_of_its_step_though_training_went_on(pool, tmp_path):
    """What is written later is what was copied then: resuming gives the unbroken run's bits."""
    case = _case(checkpoint_every=3)  # every save makes the ranks' buffers equal
    unbroken, _, _ = pool(2).run(_train, case, tmp_path / "a")[0]
    pool(2).run(_slow_disk, case, tmp_path / "b")
    (tmp_path / "b" / "checkpoints" / "latest").write_text("step-6")
    resumed, _, _ = pool(2).run(_resumed, case, tmp_path / "b")[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())


def _resumed(world, case, run):
    return _train(world, case, run, resume=True)


def _part(world, case, run, until):
    return _train(world, case, run, resume=True, until=until)


def test_a_run_that_broke_off_twice_sees_the_samples_of_the_unbroken_one(pool, tmp_path):
    """On two, then three, then one process."""
    ids = []
    for layout, until in (({"replica": 2}, 3), (SHARDED | {"shard": 3}, 5), ({}, None)):
        n = layout.get("replica", 1) * layout.get("shard", 1)
        _, _, events = pool(n).run(_part, _case(layout), tmp_path / "b", until)[0]
        ids += [(e.step, e.sample_ids) for e in events if isinstance(e, StepEvent)]
    _, _, events = pool(2).run(_train, _case(), tmp_path / "a")[0]
    assert ids == [(e.step, e.sample_ids) for e in events if isinstance(e, StepEvent)]
    assert len(ids) == STEPS


class Metrics:
    """Evaluations with values that are known beforehand."""

    def __init__(self, values):
        self._values = list(values)

    def __call__(self, *_, **__):
        return {"heldout_loss": self._values.pop(0)}


def _with_metrics(world, case, run, values):
    evaluate = loop.evaluate
    loop.evaluate = Metrics(values)
    try:
        return _train(world, case, run)
    finally:
        loop.evaluate = evaluate


@pytest.mark.parametrize(
    ("values", "stay"),
    [
        ([3.0, 1.0, 2.0, 2.5], ["step-4", "step-8"]),
        ([math.nan, 2.0, math.inf, math.nan], ["step-4", "step-8"]),
        ([math.nan] * 4, ["step-8"]),
        ([1.0, 1.0, 3.0, 2.0], ["step-4", "step-8"]),
        ([4.0, 3.0, 2.0, 1.0], ["step-8"]),
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(pool, tmp_path, values, stay):
    case = _case({}, keep=1, keep_best="heldout_loss")
    _, _, events = pool(1).run(_with_metrics, case, tmp_path, values)[0]
    assert [e.step for e in events if isinstance(e, EvalEvent)] == [2, 4, 6, 8]
    assert _names(tmp_path) == ["latest", *stay]


def _ask_in_evaluation(world, case, run):
    """One rank is asked to stop while it evaluates."""
    case, settings = case
    job = replace(case, settings=settings).job()
    evaluating, asked = [False], [False]
    evaluate = loop.evaluate

    def watched(*args, **more):
        evaluating[0] = True
        try:
            return evaluate(*args, **more)
        finally:
            evaluating[0] = False

    def stop():
        asked[0] |= evaluating[0]
        return world.rank == 1 and asked[0]

    loop.evaluate = watched
    saver = Saver(run, job.graph, world, keep=2)
    try:
        outcome = loop.train(job, world, stop=stop, save=saver)
    finally:
        loop.evaluate = evaluate
    return outcome.status, outcome.steps, outcome.metrics


@pytest.mark.parametrize("layout", [SHARDED, {"replica": 2}], ids=str)
@pytest.mark.parametrize(("eval_every", "steps"), [(3, 3), (None, STEPS)])
def test_asked_to_stop_while_it_evaluates_a_run_saves_and_ends(
    pool, tmp_path, layout, eval_every, steps
):
    case = _case(layout, eval_every=eval_every)
    found = pool(2).run(_ask_in_evaluation, case, tmp_path)
    assert found == [("interrupted", steps, {})] * 2
    assert checkpoints.newest(tmp_path).name == f"step-{steps}"
    _, ended, _ = pool(2).run(_resumed, case, tmp_path)[0]
    assert ended == ("done", STEPS)


def _ask_in_step(world, case, run, at):
    """One rank is asked to stop while it computes step `at`."""
    case, settings = case
    job = replace(case, settings=settings).job()
    cross_entropy, steps = making.cross_entropy, [0]

    def counted(*args):
        steps[0] += 1
        return cross_entropy(*args)

    making.cross_entropy = counted
    saver = Saver(run, job.graph, world, keep=2)
    try:
        outcome = loop.train(
            job, world, stop=lambda: world.rank == 1 and steps[0] == at, save=saver
        )
    finally:
        making.cross_entropy = cross_entropy
    return outcome.status, outcome.steps


def test_asked_to_stop_within_a_step_a_run_ends_with_it(pool, tmp_path):
    assert pool(2).run(_ask_in_step, _case(), tmp_path, 3) == [("interrupted", 3)] * 2
    assert checkpoints.newest(tmp_path).name == "step-3"


def _final_on_full_disk(world, case, run):
    case, settings = case
    job = replace(case, settings=settings).job()
    outcome = loop.train(job, world)
    with _full_disk(world, rank=0, which=1):
        save_final(outcome.state, run, graph=job.graph)


def test_final_weights_that_find_no_room_are_an_error_on_all_ranks(pool, tmp_path):
    for failure in pool(2).outcomes(_final_on_full_disk, _case(), tmp_path):
        assert isinstance(failure.error, RunError)
        assert "final.safetensors: No space left" in str(failure.error)
    assert not list(tmp_path.iterdir())
