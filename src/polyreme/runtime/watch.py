"""Waits for the ranks of a host to end, finds those that stand still, and ends them all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec

from . import stacks
from .record import Account, process_state, read, waiting
from .verdict import Verdict, stall

Order = Literal["end", "kill"]
LINGER_S = 0.5  # after a first failure: time for the others to fail too, so that causes compare
_START_GRACE_S = 0.5  # for ranks that have nothing to save yet
_LOOK_S = 0.25
_MOST_LOOK_S = 1.0  # what one look may add: the watch itself may have been stopped meanwhile
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class Watch:
    """Ranks by process id, until none is left.

    `link` brings orders, `wake` the numbers of signals that this process got, `asked` a byte
    for each that a rank got. With `timeout_s` a rank that others wait for so long is found.
    """

    def __init__(
        self,
        ranks: dict[int, int],
        link: Connection,
        wake: int,
        asked: int,
        *,
        box: Path,
        grace_s: float,
        timeout_s: float | None,
    ) -> None:
        self._running = ranks
        self._n_ranks = len(ranks)
        self._link = link
        self._wake, self._asked = wake, asked
        self._heard = [link.fileno(), wake, asked]
        self._box = box
        self._grace_s = grace_s
        self._timeout_s = timeout_s if self._n_ranks > 1 else None
        self._due: list[tuple[float, int]] = []  # (when, signal), soonest first
        self._signalled = False
        self._end_s = 0.0  # when ranks that were asked to end are killed
        self._looked_s = time.monotonic()
        self._stood: dict[int, tuple[int, float]] = {}  # rank -> collective, seconds in it
        self.interrupted = False
        self.verdict: Verdict | None = None
        self.accounts: tuple[Account, ...] = ()
        self.code: dict[int, int] = {}  # rank -> exit code, or minus the signal
        self.failed_at: dict[int, float] = {}  # ranks that failed by themselves

    def run(self) -> None:
        """Return when no rank is left."""
        while self._running:
            until = [self._due[0][0]] if self._due else []
            if self._timeout_s is not None:
                until.append(self._looked_s + _LOOK_S)
            wait_s = max(0.0, min(until) - time.monotonic()) if until else None
            ready, _, _ = select.select(self._heard, [], [], wait_s)
            if self._wake in ready and set(os.read(self._wake, 4096)) - {signal.SIGCHLD}:
                self._interrupt()
            if self._asked in ready:
                os.read(self._asked, 4096)
                self._interrupt()
            if self._link.fileno() in ready:
                self._obey()
            self._reap()
            self._look()
            while self._due and self._due[0][0] <= time.monotonic():
                self._signal(self._due.pop(0)[1])

    def account(self, rank: int, pid: int = 0) -> Account:
        """What a rank's record says, and how its process is."""
        found = read(self._box / f"{rank}.record", rank)
        pid = found.pid or pid
        state = process_state(pid) if pid and rank not in self.code else ended(self.code.get(rank))
        return msgspec.structs.replace(found, pid=pid, state=state)

    def _obey(self) -> None:
        try:
            order: Order = self._link.recv()
        except (EOFError, OSError):
            order = "kill"
            self._heard = [self._wake, self._asked]
        if order == "kill":
            self._end_s = 0.0  # patience is over, also with ranks that train
            self._signal(signal.SIGKILL)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """Ask all ranks to end; those that train may save first."""
        if self.interrupted:
            return
        self.interrupted = True
        now = time.monotonic()
        self._end_s = now + self._grace_s
        if not self.failed_at:
            kill_s = now + min(self._grace_s, _START_GRACE_S)
            self._due = [(now, signal.SIGTERM), (kill_s, signal.SIGKILL)]

    def _reap(self) -> None:
        for process in list(self._running):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            rank = self._running.pop(process)
            code = self.code[rank] = os.waitstatus_to_exitcode(status)
            if not code and (self._box / f"{rank}.result").exists():
                continue
            now = time.monotonic()
            if code and self.interrupted:  # those that are left wait for it in vain
                self._end_s = min(self._end_s, now + LINGER_S)
                self._due = [(self._end_s, signal.SIGKILL)]
                if (self._box / f"{rank}.error").exists():
                    self.failed_at[rank] = now
                continue
            if self._signalled and -code not in _CRASHES:
                continue
            self.failed_at[rank] = now
            if len(self.failed_at) == 1:
                self._due = [(now + LINGER_S, signal.SIGKILL)]

    def _look(self) -> None:
        """Add up for how long ranks stand in a collective, and judge when it is too long."""
        now = time.monotonic()
        if self._timeout_s is None or now < self._looked_s + _LOOK_S:
            return
        since_s = min(now - self._looked_s, _MOST_LOOK_S)
        self._looked_s = now
        for rank in self._running.values():
            seq, _ = waiting(self._box / f"{rank}.record")
            before, seconds = self._stood.get(rank, (0, 0.0))
            self._stood[rank] = (seq, seconds + since_s if seq and seq == before else 0.0)
        longest_s = max((self._stood[rank][1] for rank in self._running.values()), default=0.0)
        if longest_s >= self._timeout_s and not self.failed_at:
            self._judge(self._timeout_s)

    def _judge(self, timeout_s: float) -> None:
        accounts = [self.account(rank, pid) for pid, rank in self._running.items()]
        accounts += [self.account(rank) for rank in self.code]
        stacks_of = stacks.ask({rank: pid for pid, rank in self._running.items()}, self._box)
        self.accounts = tuple(
            msgspec.structs.replace(account, stack=stacks_of.get(account.rank))
            for account in sorted(accounts, key=lambda account: account.rank)
        )
        self.verdict = stall(self.accounts, timeout_s)
        self._end_s = 0.0
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if self.interrupted and number == signal.SIGKILL and now < self._end_s and self._training():
            self._due = [(self._end_s, signal.SIGKILL)]
            number = signal.SIGTERM  # again: it began to train after the first
        self._signalled = True
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _training(self) -> bool:
        ranks = self._running.values()
        return any(waiting(self._box / f"{rank}.record")[1] == "training" for rank in ranks)


def ended(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "gone"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def results(codes: Mapping[int, int], box: Path) -> dict[int, bytes]:
    """Pickled results of the ranks that have one."""
    paths = {rank: box / f"{rank}.result" for rank, code in codes.items() if not code}
    return {rank: path.read_bytes() for rank, path in paths.items() if path.exists()}
