"""Waiting for a checkpoint, or for its folder: what is said, and that all ranks end alike."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path

from polyreme.errors import RunError
from polyreme.runtime import saver, tensorfile
from polyreme.runtime.saver import Saver
from polyreme.runtime.state import State
from tiny import Case


def _unseen(world, run):
    """A rank of another host that does not share the run folder."""
    is_dir = Path.is_dir
    if world.rank == 1:
        Path.is_dir = lambda path: path.name != "checkpoints" and is_dir(path)
    try:
        Saver(run, Case().job().graph, world, keep=1, timeout_s=0.4)
    finally:
        Path.is_dir = is_dir


def test_a_folder_that_one_rank_does_not_see_is_one_error(pool, tmp_path):
    for failure in pool(2).outcomes(_unseen, tmp_path):
        assert isinstance(failure.error, RunError)
        assert "rank 1 does not see" in str(failure.error)
        assert (failure.error.rank, failure.error.op) == (1, "save")


def _waited_for(world, run, say_s):
    """What is said while rank 1 writes for half a second."""
    from polyreme.runtime.making import apply

    write, before = tensorfile.write, saver._SAY_S

    def slow(*args):
        time.sleep(0.5 * world.rank)
        return write(*args)

    job = Case(plan={"replica": 2}).job()
    state = State(apply(job.graph, job.plan, world, seed=0), (), world)
    tensorfile.write, saver._SAY_S = slow, say_s
    try:
        with redirect_stderr(io.StringIO()) as said:
            saving = Saver(run, job.graph, world, keep=1, timeout_s=0.4)
            saving.begin(state, {})
            assert saving.finish() == 0
    finally:
        tensorfile.write, saver._SAY_S = write, before
    return said.getvalue()


def test_a_long_wait_is_said_once_by_the_first(pool, tmp_path):
    first, second = pool(2).run(_waited_for, tmp_path, 0.0)
    assert first.count("waiting until the checkpoint before is written") == 1
    assert second == ""
    assert pool(2).run(_waited_for, tmp_path, 60.0) == ["", ""]
