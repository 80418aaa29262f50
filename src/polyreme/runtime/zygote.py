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
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Literal

import msgspec

from ..errors import PolyremeError
from . import stacks
from .record import RECORD, Account, failed
from .verdict import Verdict, difference, last_op, named
from .watch import Watch, ended, results

_TAIL_BYTES = 4000
_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_ASKED = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # what this process ends with when it is asked to end while no rank runs


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attempt. `call` is a pickled (entry, args), `environment` and `stderr` are by rank.

    With `timeout_s` a rank that others wait for so long is named and all are ended. `main` is the
    script of the launcher, needed where the call's pickle refers to it.
    """

    call: bytes
    environment: tuple[Mapping[str, str], ...]
    stderr: tuple[Path | None, ...]
    grace_s: float
    timeout_s: float | None = None
    main: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed; `error` is what it raised if that is one of polyreme's own.

    `backend` marks what communication or the device raised.
    """

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    t: float
    traceback: str = ""
    error: PolyremeError | None = None
    backend: bool = False
    stderr_tail: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """Likelier causes sort first.

        A rank that ended without a word takes the others' connections with it, who then raise
        (or abort, as some backends do), maybe before the system is done with the first.
        """
        follows = self.backend or self.signal == signal.SIGABRT
        return 2 if follows else int(bool(self.traceback)), self.t


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Pickled results by rank, and the failures with the likely cause first.

    `interrupted` says that a signal asked for the end. Where the run failed there is a verdict.
    """

    results: Mapping[int, bytes]
    failures: tuple[Failure, ...]
    interrupted: bool
    verdict: Verdict | None
    accounts: tuple[Account, ...]


def main(link_fd: int, parent: int) -> None:
    """Serve requests until the link closes."""
    for number in _ASKED:
        signal.signal(number, _end)
    die_with(parent)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    link = Connection(link_fd)
    try:
        for name in link.recv():
            importlib.import_module(name)
        while True:
            _serve(link, link.recv())
    except EOFError:
        os._exit(0)  # nothing of its own to tear down, and that would take a second


def _end(*_: object) -> None:
    """Asked to end while no rank runs: the launcher learns it by the exit code."""
    os._exit(INTERRUPTED)


def _serve(link: Connection, request: Request) -> None:
    box = Path(tempfile.mkdtemp(prefix="polyreme-"))
    wake, wake_end = _pipe()
    asked, asked_end = _pipe()
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    for number in (*_ASKED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    parent = os.getpid()
    ranks: dict[int, int] = {}
    for rank in range(len(request.environment)):
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)  # until the fork has its own handlers
        process = os.fork()
        if not process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in _ASKED:
                signal.signal(number, lambda *_: _tell(asked_end))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKED)
            for end in (wake, wake_end, asked, link.fileno()):
                os.close(end)
            _be(request, rank, box, parent)
        ranks[process] = rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKED)
    watch = Watch(
        ranks,
        link,
        wake,
        asked,
        box=box,
        grace_s=request.grace_s,
        timeout_s=request.timeout_s,
    )
    watch.run()
    outcome = _outcome(request, watch, box)
    shutil.rmtree(box, ignore_errors=True)
    with contextlib.suppress(OSError):
        link.send(outcome)
    signal.set_wakeup_fd(-1)
    for number in _ASKED:
        signal.signal(number, _end)
    for end in (wake, wake_end, asked, asked_end):
        os.close(end)


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def _tell(asked_end: int) -> None:
    """A rank passes on that it was asked to end."""
    with contextlib.suppress(OSError):
        os.write(asked_end, b"x")


def _be(request: Request, rank: int, box: Path, parent: int) -> None:
    """Be a rank; never returns. The interpreter is not torn down: libraries crash or hang there."""
    die_with(parent)
    os.environ.update(request.environment[rank])
    os.environ[RECORD] = str(box / f"{rank}.record")
    stack = stacks.answer(box, rank)
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
        (box / f"{rank}.result").write_bytes(pickle.dumps(None))
    except BaseException as error:
        backend = _is_backend(error.__cause__ or error, box / f"{rank}.record")
        failure = Failure(
            rank=rank,
            t=time.monotonic(),
            exit_code=1,
            traceback=traceback.format_exc(),
            error=error if isinstance(error, PolyremeError) and not backend else None,
            backend=backend,
        )
        (box / f"{rank}.error").write_bytes(pickle.dumps(failure))
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            stack.close()
        os._exit(code)


def _is_backend(error: BaseException, record: Path) -> bool:
    """Whether communication or the device failed, not the program."""
    import torch

    kinds: list[type[BaseException]] = [torch.distributed.DistError]
    kinds += [kind] if (kind := getattr(torch, "AcceleratorError", None)) else []
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, tuple(kinds)) or (isinstance(error, RuntimeError) and failed(record))


def die_with(parent: int) -> None:
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


def _outcome(request: Request, watch: Watch, box: Path) -> Outcome:
    failures = [_failure(request, rank, watch, box) for rank in watch.failed_at]
    failures.sort(key=lambda failure: failure.order)
    for log in request.stderr:
        if log is not None and log.exists() and not log.stat().st_size:
            log.unlink()
    accounts = watch.accounts or tuple(map(watch.account, range(len(request.environment))))
    return Outcome(
        results=results(watch.code, box),
        failures=tuple(failures),
        interrupted=watch.interrupted,
        verdict=watch.verdict or (_verdict(failures, accounts) if failures else None),
        accounts=accounts,
    )


def _verdict(failures: Sequence[Failure], accounts: tuple[Account, ...]) -> Verdict:
    """What the first failure means; ranks that called different things fail in the backend."""
    first = failures[0]
    if first.error is not None:
        found = named(first.error)  # whom it names, not who was first to raise it
        alike = [failure for failure in failures if str(failure.error) == found.what]
        if found.rank is not None or found.op is not None or len(alike) > 1:
            return found
    in_backend = first.backend or first.signal == signal.SIGABRT
    different = difference(accounts) if in_backend else None
    if different is not None:
        return msgspec.structs.replace(different, stack=first.traceback or None)
    how = ended(-first.signal if first.signal is not None else first.exit_code)
    kind: Literal["backend", "error", "died"] = "error" if first.traceback else "died"
    return Verdict(
        kind="backend" if first.backend else kind,
        rank=first.rank,
        op=last_op(accounts[first.rank]),
        what=str(first.error) if first.error is not None else f"rank {first.rank} {how}",
        stack=first.traceback or None,
    )


def _failure(request: Request, rank: int, watch: Watch, box: Path) -> Failure:
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
        backend=failure.backend,
        stderr_tail=tail,
    )
