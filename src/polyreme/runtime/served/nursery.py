"""Forks members from a process that has imported everything, and tells when they end.

Members are no ranks of a group: one that ends takes no other with it. The process that forks stays
single-threaded. It outlives a parent that is killed for as long as it takes to kill all members and
to remove the folder, which nobody else would.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..zygote import die_with

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from polyreme.runtime.served.nursery import main; "
    "main(int(sys.argv[1]), int(sys.argv[3]), sys.argv[4])"
)
_LOOK_S = 0.05
_CLOSE_S = 5.0
_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a member ended: `code` as of `subprocess`, and its last words."""

    member: int
    process: int
    code: int
    words: str


class Nursery:
    """Begins members; a context manager that ends all of them.

    `preload` are modules that members need, `warm` is a call that has what they need made before
    they are forked; what it gives is forgotten. `files` are descriptors that members have too.
    `folder` takes members' last words; it goes when this process is killed.
    """

    def __init__(
        self,
        preload: Sequence[str],
        folder: Path,
        warm: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        self._folder = folder
        self._link, other = multiprocessing.Pipe()
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START),
                    *(str(other.fileno()), json.dumps(sys.path), str(os.getpid()), str(folder)),
                ],
                pass_fds=[other.fileno(), *files],
                stdin=subprocess.DEVNULL,
            )
        self._link.send((tuple(preload), None if warm is None else pickle.dumps(warm)))
        self.processes: dict[int, int] = {}
        self._ended: list[Ended] = []

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, member: int, entry: Callable[..., Any], args: Sequence[Any]) -> None:
        """Fork a member that calls `entry`, a function that can be imported."""
        words = self._folder / f"{member}.stderr"
        self._link.send((member, pickle.dumps((entry, tuple(args))), str(words)))
        answer = self._link.recv()
        while isinstance(answer, Ended):
            self._ended.append(self._with_words(answer))
            answer = self._link.recv()
        self.processes[member] = answer

    def ended(self) -> list[Ended]:
        """Those that ended since it was asked last. Raises EOFError if the nursery itself has."""
        found, self._ended = self._ended, []
        while self._link.poll():
            found.append(self._with_words(self._link.recv()))
        for each in found:
            if self.processes.get(each.member) == each.process:
                del self.processes[each.member]
        return found

    def close(self) -> None:
        """Kill all members that are left."""
        with contextlib.suppress(OSError):  # it has ended already
            self._link.send(None)
        self._link.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _with_words(self, ended: Ended) -> Ended:
        path = self._folder / f"{ended.member}.stderr"
        words = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""
        return Ended(
            member=ended.member, process=ended.process, code=ended.code, words=words.strip()
        )


def main(link_fd: int, parent: int, folder: str) -> None:
    """Fork members as asked until the parent says that all end, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent says when all end
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    link = Connection(link_fd)
    members: dict[int, int] = {}
    try:
        gone = not _serve(link, parent, members)
    except (EOFError, ConnectionError):  # it was killed, and so said nothing
        gone = True
    for process in members:
        os.kill(process, signal.SIGKILL)
    for process in members:
        os.waitpid(process, 0)
    if gone:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _serve(link: Connection, parent: int, members: dict[int, int]) -> bool:
    """Whether the parent said that all end; it is gone otherwise."""
    preload, warm = link.recv()
    for name in preload:
        import_module(name)
    if warm is not None:
        call, args = pickle.loads(warm)
        with contextlib.suppress(Exception):  # members meet the same, and say so
            call(*args)
    while os.getppid() == parent:
        if link.poll(_LOOK_S):
            asked = link.recv()
            if asked is None:
                return True
            member, call, words = asked
            process = os.fork()
            if not process:
                link.close()
                _be(call, words, os.getppid())
            members[process] = member
            _answer(link, process)
        _tell(link, members)
    return False


def _tell(link: Connection, members: dict[int, int]) -> None:
    """Of members that ended."""
    while members:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        code = os.waitstatus_to_exitcode(status)
        _answer(link, Ended(member=members.pop(process), process=process, code=code, words=""))


def _answer(link: Connection, what: int | Ended) -> None:
    """One that does not listen any more has said why, or will never."""
    with contextlib.suppress(ConnectionError):
        link.send(what)


def _be(call: bytes, words: str, parent: int) -> None:
    """Be a member; never returns."""
    die_with(parent)
    sink = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 2)
    os.dup2(2, 1)
    code = 1
    try:
        entry, args = pickle.loads(call)
        entry(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
