"""The process that members are forked from: what it leaves when its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from polyreme.runtime.served.nursery import Nursery

PARENT = """
import sys, time
from pathlib import Path
from polyreme.runtime.served.nursery import Nursery

nursery = Nursery((), Path(sys.argv[1]))
for member in range(2):
    nursery.begin(member, time.sleep, (1000,))
print(nursery._process.pid, *nursery.processes.values(), flush=True)
time.sleep(1000)
"""


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_parent_that_is_killed_leaves_no_member_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "home").touch()
    command = [sys.executable, "-c", PARENT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(_runs, pids))
        assert folder.is_dir()
        os.kill(parent.pid, signal.SIGKILL)
    end_s = time.monotonic() + 60
    while (folder.exists() or any(map(_runs, pids))) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not folder.exists()
    assert not [pid for pid in pids if _runs(pid)]


def test_the_folder_is_the_parents_where_that_lives_on(tmp_path: Path) -> None:
    with Nursery((), tmp_path) as nursery:
        nursery.begin(0, time.sleep, (1000,))
        (pid,) = nursery.processes.values()
        end_s = time.monotonic() + 60
        while not (tmp_path / "0.stderr").exists() and time.monotonic() < end_s:
            time.sleep(0.01)  # else it may be killed before it has begun
        for member in range(1, 20):  # some of which are told of while it closes
            nursery.begin(member, int, ())
    assert not _runs(pid)
    assert (tmp_path / "0.stderr").exists()
