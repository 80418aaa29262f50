"""Starts the processes of a run on this host, and ends them all whatever happens.

Ranks are forked from one process that has imported everything (`zygote`), because importing
torch costs seconds of processor time and a fork milliseconds. They find torchrun's variables in
their environment and a store that the launcher holds: a new one for each attempt, on a port that
the system picks while it is being bound, so jobs and attempts cannot meet.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import RunError
from .record import Account
from .verdict import Verdict
from .watch import Order, ended
from .zygote import INTERRUPTED, Failure, Outcome, Request

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_POLL_S = 0.1
_CLOSE_S = 5.0
_STANDS = ("stalled", "diverged")  # verdicts whose words do not hold the stack
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from polyreme.runtime.zygote import main; main(int(sys.argv[1]), int(sys.argv[3]))"
)


class RankFailed(RunError):
    """A rank ended otherwise than it should: which (if known), and what became of all.

    `words` is the message without the stack.
    """

    def __init__(self, message: str, *, verdict: Verdict, accounts: Sequence[Account] = ()) -> None:
        self.words = message
        self.verdict = verdict
        self.accounts = tuple(accounts)
        stack = (
            f"\nits stack:\n{verdict.stack}" if verdict.kind in _STANDS and verdict.stack else ""
        )
        super().__init__(message + stack, rank=verdict.rank, op=verdict.op)


class Launcher:
    """Runs functions in ranks; a context manager.

    Made early, it imports `preload` (modules by name) while the caller goes on with other work,
    and each run of it costs a fork.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = tuple(preload)
        self._start()
        self.outcome: Outcome | None = None

    def _start(self) -> None:
        self._link, other = multiprocessing.Pipe()
        with other:
            self._zygote = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START),
                    *(str(other.fileno()), json.dumps(sys.path), str(os.getpid())),
                ],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._link.send(self._preload)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process that ranks are forked from."""
        self._link.close()
        try:
            self._zygote.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()

    def run(
        self,
        entry: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        n_processes: int,
        attempt: int = 0,
        logs: Path | None = None,
        grace_s: float = 30.0,
        timeout_s: float | None = None,
        environment: Sequence[Mapping[str, str]] = (),
    ) -> list[Any]:
        """Results of ``entry(*args)`` by rank; `entry` is a function that can be imported.

        The first rank writes to this process's stderr, the others to files in `logs`, kept where
        anything was written. SIGINT and SIGTERM to any process of the run reach all ranks as
        SIGTERM; after `grace_s` (or a second signal) they are killed, at once if none trains yet.
        A rank for which others wait in a collective for `timeout_s` is named, and all are ended.
        `environment` has further variables of each rank, which go before the launcher's own.
        `outcome` keeps what became of them.

        Raises:
            PolyremeError: what the first failing rank raised, if it is one.
            RankFailed: a rank failed otherwise; names it, its exit or where it stands, and its
                last words. Or the process that ranks are forked from was killed, and them all.
            RunError: the ranks could not be started.
            KeyboardInterrupt: a signal ended the run.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        assert len(environment) in (0, n_processes), "variables are given for all ranks or none"
        more = environment or ({},) * n_processes
        call = pickle.dumps((entry, tuple(args)))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        request = Request(
            call=call,
            environment=tuple(
                _variables(rank, n_processes, store.port, attempt) | dict(more[rank])
                for rank in range(n_processes)
            ),
            stderr=_log_files(logs, n_processes, attempt),
            grace_s=grace_s,
            timeout_s=timeout_s,
            main=_main_script(call),
        )
        self.outcome = None
        outcome, interrupted = self._exchange(request)
        self.outcome = outcome
        del store
        if logs is not None and not any(logs.iterdir()):
            logs.rmdir()
        verdict = outcome.verdict
        error = None if verdict is None else _as_error(verdict, outcome, n_processes)
        if interrupted or outcome.interrupted:
            if error is not None:
                sys.stderr.write(f"polyreme: while it was asked to end: {error}\n")
            raise KeyboardInterrupt
        if error is not None:
            raise error
        return [pickle.loads(outcome.results[rank]) for rank in range(n_processes)]

    def _exchange(self, request: Request) -> tuple[Outcome, bool]:
        with _signals_counted() as signals:
            obeyed = 0
            try:
                self._link.send(request)
                while not self._link.poll(_POLL_S):
                    if len(signals) > obeyed:
                        order: Order = "kill" if obeyed else "end"
                        obeyed = len(signals)
                        self._link.send(order)
                return self._link.recv(), bool(signals)
            except (EOFError, OSError):
                code = self._zygote.wait()
                if code == INTERRUPTED or signals:
                    raise KeyboardInterrupt from None
                how = f"the process that ranks are forked from {ended(code)}"
                what = f"{how}; all ranks were killed"
                if code >= 0:  # what it imports fails
                    raise RunError(what) from None
                self._link.close()
                self._start()
                verdict = Verdict(kind="died", rank=None, op=None, what=what)
                raise RankFailed(what, verdict=verdict) from None


def launch(
    entry: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    n_processes: int,
    attempt: int = 0,
    logs: Path | None = None,
) -> list[Any]:
    """`Launcher.run` once."""
    with Launcher() as launcher:
        return launcher.run(entry, args, n_processes=n_processes, attempt=attempt, logs=logs)


def _variables(rank: int, n_processes: int, port: int, attempt: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_processes),
        "LOCAL_WORLD_SIZE": str(n_processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _log_files(logs: Path | None, n_processes: int, attempt: int) -> tuple[Path | None, ...]:
    if logs is None:
        return (None,) * n_processes
    logs.mkdir(parents=True, exist_ok=True)
    return (
        None,
        *(logs / f"attempt-{attempt}.rank-{rank}.txt" for rank in range(1, n_processes)),
    )


def _main_script(call: bytes) -> str | None:
    """The running script's path if what is sent refers to things defined in it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return str(path) if path is not None and b"__main__" in call else None


@contextmanager
def _signals_counted() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted instead of raised (in the main thread, where they arrive)."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    before = {
        number: signal.signal(number, lambda got, _: seen.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_error(verdict: Verdict, outcome: Outcome, n_processes: int) -> Exception:
    if not outcome.failures or verdict.kind == "diverged":
        return RankFailed(verdict.what, verdict=verdict, accounts=outcome.accounts)
    first = outcome.failures[0]
    if first.error is not None:
        return first.error
    message = _words(outcome.failures, verdict, n_processes)
    return RankFailed(message, verdict=verdict, accounts=outcome.accounts)


def _words(failures: Sequence[Failure], verdict: Verdict, n_processes: int) -> str:
    first = failures[0]
    if first.signal is not None:
        how = f"was ended by {signal.Signals(first.signal).name}"
        if first.signal == signal.SIGKILL:
            how += " (a person, or the system when memory ran out)"
    else:
        early = "" if first.exit_code else " before its work was done"
        how = f"ended with exit code {first.exit_code}{early}"
    parts = [f"rank {first.rank} of {n_processes} {how}"]
    if verdict.op is not None:
        parts[0] += f"; its last collective was {verdict.op}"
    if first.traceback:
        parts.append(first.traceback.rstrip())
    if first.stderr_tail:
        parts.append(f"its last lines on stderr:\n{first.stderr_tail}")
    others = sorted(failure.rank for failure in failures[1:])
    if others:
        parts.append(f"then failed: rank {', '.join(map(str, others))}")
    return "\n".join(parts)
