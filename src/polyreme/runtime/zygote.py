"""The process that ranks are forked from: it imports once, then forks, watches and ends them.

It stays single-threaded and touches no device, so that forking is safe. Its only link to the
launcher is one pipe: a lost link means a dead launcher, and every rank is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Literal

from ..errors import PolyremeError

Order = Literal["end", "kill"]
_LINGER_S = 0.5  # after a first failure: time for the others to fail too, so that causes compare
_FAILED_GRACE_S = 2.0  # the others then hang in collectives and seldom heed SIGTERM
_TAIL_BYTES = 4000
_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attempt. `call` is a pickled (entry, args), `environment` and `stderr` are by rank.

    `main` is the script of the launcher, needed where the call's pickle refers to it.
    """

    call: bytes
    environment: tuple[Mapping[str, str], ...]
    stderr: tuple[Path | None, ...]
    grace_s: float
    main: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed; `error` is what it raised if that is one of polyreme's own."""

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    t: float
    traceback: str = ""
    error: PolyremeError | None = None
    stderr_tail: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """Likelier causes sort first.

        A rank that ended without a word takes the others' connections with it, who then raise
        (or abort, as some backends do), maybe before the system is done with the first.
        """
        return bool(self.traceback) or self.signal == signal.SIGABRT, self.t


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Pickled results by rank, and the failures with the likely cause first."""

    results: Mapping[int, bytes]
    failures: tuple[Failure, ...]


class _Watch:
    """Waits for ranks to end, and ends them: SIGTERM, then SIGKILL once their time is up."""

    def __init__(self, ranks: dict[int, int], link: Connection, wake: int, grace_s: float) -> None:
        self._running = ranks  # process id -> rank
        self._link = link
        self._heard = [link.fileno(), wake]
        self._wake = wake
        self._grace_s = grace_s
        self._due: list[tuple[float, int]] = []  # (when, signal), soonest first
        self._signalled = False
        self.code: dict[int, int] = {}  # rank -> exit code, or minus the signal
        self.failed_at: dict[int, float] = {}  # ranks that failed by themselves

    def run(self) -> None:
        """Return when no rank is left."""
        while self._running:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready, _, _ = select.select(self._heard, [], [], wait_s)
            if self._wake in ready:
                os.read(self._wake, 4096)
            if self._link.fileno() in ready:
                self._obey()
            self._reap()
            while self._due and self._due[0][0] <= time.monotonic():
                self._signal(self._due.pop(0)[1])

    def _obey(self) -> None:
        try:
            order: Order = self._link.recv()
        except (EOFError, OSError):
            order = "kill"
            self._heard = [self._wake]
        now = time.monotonic()
        if order == "kill":
            self._signal(signal.SIGKILL)
        else:
            self._due = [(now, signal.SIGTERM), (now + self._grace_s, signal.SIGKILL)]

    def _reap(self) -> None:
        for process in list(self._running):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            rank = self._running.pop(process)
            code = self.code[rank] = os.waitstatus_to_exitcode(status)
            if not code or (self._signalled and -code not in _CRASHES):
                continue
            self.failed_at[rank] = time.monotonic()
            if not self._due:
                end = time.monotonic() + _LINGER_S
                self._due = [(end, signal.SIGTERM), (end + _FAILED_GRACE_S, signal.SIGKILL)]

    def _signal(self, number: int) -> None:
        self._signalled = True
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def main(link_fd: int) -> None:
    """Serve requests until the link closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    link = Connection(link_fd)
    try:
        for name in link.recv():
            importlib.import_module(name)
        while True:
            _serve(link, link.recv())
    except EOFError:
        os._exit(0)  # nothing of its own to tear down, and that would take a second


def _serve(link: Connection, request: Request) -> None:
    box = Path(tempfile.mkdtemp(prefix="polyreme-"))
    wake, wake_end = os.pipe()
    for end in (wake, wake_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    ranks: dict[int, int] = {}
    for rank in range(len(request.environment)):
        process = os.fork()
        if not process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (wake, wake_end, link.fileno()):
                os.close(end)
            _be(request, rank, box, parent)
        ranks[process] = rank
    watch = _Watch(ranks, link, wake, request.grace_s)
    watch.run()
    signal.set_wakeup_fd(-1)
    os.close(wake)
    os.close(wake_end)
    outcome = _outcome(request, watch, box)
    shutil.rmtree(box, ignore_errors=True)
    with contextlib.suppress(OSError):
        link.send(outcome)


def _be(request: Request, rank: int, box: Path, parent: int) -> None:
    """Be a rank; never returns. The interpreter is not torn down: libraries crash or hang there."""
    _die_with(parent)
    os.environ.update(request.environment[rank])
    stderr = request.stderr[rank]
    sink = os.open(
        stderr if stderr is not None else box / f"{rank}.stderr",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )
    if stderr is not None or rank:
        os.dup2(sink, 2)
    os.dup2(2, 1)  # stdout belongs to the launcher
    code = 1
    try:
        if request.main is not None:
            _adopt_main(request.main)
        entry, args = pickle.loads(request.call)
        (box / f"{rank}.result").write_bytes(pickle.dumps(entry(*args)))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        failure = Failure(
            rank=rank,
            t=time.monotonic(),
            exit_code=1,
            traceback=traceback.format_exc(),
            error=error if isinstance(error, PolyremeError) else None,
        )
        (box / f"{rank}.error").write_bytes(pickle.dumps(failure))
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere the parent does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _adopt_main(path: str) -> None:
    """Make the classes of the launcher's script known, without running its guarded part."""
    module = ModuleType("__main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _outcome(request: Request, watch: _Watch, box: Path) -> Outcome:
    results: dict[int, bytes] = {}
    failures: list[Failure] = []
    for rank, code in watch.code.items():
        if not code:
            result = box / f"{rank}.result"
            results[rank] = result.read_bytes() if result.exists() else pickle.dumps(None)
        elif rank in watch.failed_at:
            failures.append(_failure(request, rank, watch, box))
    for log in request.stderr:
        if log is not None and log.exists() and not log.stat().st_size:
            log.unlink()
    failures.sort(key=lambda failure: failure.order)
    return Outcome(results=results, failures=tuple(failures))


def _failure(request: Request, rank: int, watch: _Watch, box: Path) -> Failure:
    code, t = watch.code[rank], watch.failed_at[rank]
    stderr = request.stderr[rank] or box / f"{rank}.stderr"
    text = stderr.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if stderr.exists() else ""
    tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
    if code < 0:
        return Failure(rank=rank, t=t, signal=-code, stderr_tail=tail)
    said = box / f"{rank}.error"
    if not said.exists():
        return Failure(rank=rank, t=t, exit_code=code, stderr_tail=tail)
    failure: Failure = pickle.loads(said.read_bytes())
    return Failure(
        rank=rank,
        exit_code=code,
        t=failure.t,
        traceback=failure.traceback,
        error=failure.error,
        stderr_tail=tail,
    )
