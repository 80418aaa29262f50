"""Finds ranks that stand still where another launcher than polyreme's started them.

Each rank runs a thread. When its rank has waited for too long in a collective it raises an alarm
in the store; then every rank that can gives its account there, and those of a host also that of
a neighbour that cannot. One rank, the first to claim it, judges and writes; then all end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec

from . import stacks
from .record import Account, Record, read, waiting
from .verdict import Verdict, stall

_MOST_LOOK_S = 1.0
_STORE_S = 2.0
_ANSWER_S = 1.5  # for others to give their accounts
_STACKS_S = 0.3
_WRITE_S = 2.5  # for the one that judges to leave its record; then all end
_EXIT_CODE = 1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Store(Protocol):
    """What the threads share: a store of torch, on a connection of its own."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long each call may take."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that is not there (`expected` empty); what it is then."""


OnVerdict = Callable[[Verdict, Sequence[Account]], None]


def home(store: Store, boot: Path = _BOOT) -> Path:
    """A folder for the records of this host's ranks, the same for all of them.

    Hosts may share a name; what `boot` holds sets them apart, where there is such a file.
    """
    made = tempfile.mkdtemp(prefix="polyreme-")
    identity = boot.read_text().strip() if boot.exists() else ""
    key = f"records/{socket.gethostname()}/{identity}"
    found = Path(store.compare_set(key, "", made).decode())
    if found != Path(made):
        Path(made).rmdir()
    return found


class Watchdog:
    """The thread of one rank. `on_verdict` is called on one rank before all end."""

    def __init__(
        self, store: Store, box: Path, record: Record, n_ranks: int, timeout_s: float
    ) -> None:
        self.on_verdict: OnVerdict = lambda *_: None
        self._store, self._box, self._record = store, box, record
        self._n_ranks, self._timeout_s = n_ranks, timeout_s
        self._interval_s = min(1.0, timeout_s / 4)
        self._ended = threading.Event()
        self._stack = stacks.answer(box, record.rank)
        store.set_timeout(timedelta(seconds=_STORE_S))
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no more; the last of this host takes the folder away."""
        self._ended.set()
        for name in ("record", "stack"):
            (self._box / f"{self._record.rank}.{name}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it
            self._box.rmdir()

    def give_way(self) -> None:
        """After an error: where an alarm was raised, wait for the judgement, which ends this rank.

        A stopped rank that is woken for its stack goes on, finds the others gone, and would tell of
        that beside the judge.
        """
        if self._is_alarmed():
            self._ended.wait(self._interval_s + 2 * _ANSWER_S + _WRITE_S)

    def _run(self) -> None:
        path = self._box / f"{self._record.rank}.record"
        stood, seconds, looked_s = 0, 0.0, time.monotonic()
        while not self._ended.wait(self._interval_s):
            now = time.monotonic()
            since_s, looked_s = min(now - looked_s, _MOST_LOOK_S), now
            seq, _ = waiting(path)
            seconds = seconds + since_s if seq and seq == stood else 0.0
            stood = seq
            if seconds >= self._timeout_s or self._is_alarmed():
                self._end()

    def _is_alarmed(self) -> bool:
        try:
            return self._store.check(["alarm"])
        except Exception:  # whoever holds the store is gone; own patience decides
            return False

    def _end(self) -> None:
        try:
            self._settle()
        except Exception as error:
            sys.stderr.write(f"polyreme: rank {self._record.rank} cannot ask others: {error}\n")
            here = {account.rank: account for account in self._here(range(self._n_ranks))}
            self._say(stall(list(self._with_stacks(here).values()), self._timeout_s))
        finally:
            sys.stderr.flush()
            os._exit(_EXIT_CODE)

    def _settle(self) -> None:
        """Exchange accounts and judge, or wait for the judgement."""
        store, rank = self._store, self._record.rank
        store.set("alarm", str(rank))
        self._give([rank])
        end_s = time.monotonic() + _ANSWER_S
        while self._missing() and time.monotonic() < end_s:
            time.sleep(0.05)
        self._give(self._missing())
        judge = int(store.compare_set("judge", "", str(rank)))
        if judge != rank:
            end_s = time.monotonic() + _ANSWER_S + _WRITE_S
            while not store.check(["written"]) and time.monotonic() < end_s:
                time.sleep(0.05)
            return
        # Others may just be adding their stacks, or their neighbours' accounts.
        time.sleep(_ANSWER_S if self._missing() else _STACKS_S)
        accounts = [
            msgspec.json.decode(store.get(f"account/{each}"), type=Account)
            if store.check([f"account/{each}"])
            else Account(rank=each)
            for each in range(self._n_ranks)
        ]
        verdict = stall(accounts, self._timeout_s)
        self._say(verdict)
        writer = threading.Thread(target=self.on_verdict, args=(verdict, accounts), daemon=True)
        writer.start()
        writer.join(_WRITE_S)
        store.set("written", "")

    def _missing(self) -> list[int]:
        ranks = range(self._n_ranks)
        return [rank for rank in ranks if not self._store.check([f"account/{rank}"])]

    def _give(self, ranks: Sequence[int]) -> None:
        """Put accounts into the store: how they were found, then with what woke and answered.

        Who gives a rank's account first goes on; a stopped one that is woken would say it runs.
        """
        mine = {}
        for account in self._here(ranks):
            told = msgspec.json.encode(account).decode()
            if self._store.compare_set(f"account/{account.rank}", "", told).decode() == told:
                mine[account.rank] = account
        for rank, account in self._with_stacks(mine).items():
            self._store.set(f"account/{rank}", msgspec.json.encode(account).decode())

    def _here(self, ranks: Sequence[int]) -> list[Account]:
        """Those that are on this host."""
        found = [read(self._box / f"{rank}.record", rank) for rank in ranks]
        return [account for account in found if account.pid]

    def _with_stacks(self, accounts: dict[int, Account]) -> dict[int, Account]:
        found = stacks.ask({rank: account.pid for rank, account in accounts.items()}, self._box)
        return {
            rank: msgspec.structs.replace(account, stack=found.get(rank))
            for rank, account in accounts.items()
        }

    def _say(self, verdict: Verdict) -> None:
        stack = f"\nits stack:\n{verdict.stack}" if verdict.stack else ""
        sys.stderr.write(f"polyreme: {verdict.what}{stack}\n")
