"""Members of a run in processes of their own, on gradients of a quadratic: for tests of these."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty

import torch
from safetensors.torch import load

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed
from polyreme.algo.sync.peers import Peers
from polyreme.algo.vector import Layout
from polyreme.runtime.served.among import counts
from polyreme.runtime.served.home import Home, loaded
from polyreme.runtime.served.nursery import Nursery
from polyreme.runtime.served.peer import Peer
from polyreme.runtime.served.server import Server
from polyreme.runtime.served.worker import Player
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import HOME, Address
from served import team

START = torch.linspace(-1, 1, 12, dtype=torch.float64)
TARGET = torch.sin(torch.arange(12).double())


def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    """Of a quadratic whose minimum all workers share, with noise that is a worker's and batch's."""
    noise = torch.sin(torch.arange(12).double() * (1 + rank) + batch)
    return w - TARGET + 0.01 * noise


def be(
    algorithm: DataParallel,
    n: int,
    lr: float,
    pause_s: float,
    rank: int,
    life: int,
    step: int,
    address: Address,
    folder: Path,
    snapshot_s: float = 0.2,
) -> None:
    """Be one of them."""
    torch.set_num_threads(1)
    players = team(algorithm, Layout.of({"w": (12,)}), n, lr=lr)
    sync, me = algorithm.sync, players[rank]
    state = sync.init(algorithm, START.clone(), me)

    def found(params: torch.Tensor, batch: int) -> Computed:
        time.sleep(pause_s * (1 + rank % 3))
        return Computed(gradient=gradient(rank, batch, params), loss=0.0, weight=1.0, n_samples=1)

    if isinstance(sync, Peers):
        if rank < n and life:
            state = sync.anew({**state, "step": step + 1})
        Peer(
            sync=sync,
            algorithm=algorithm,
            me=me,
            state=state,
            gradients=found,
            buffers=tuple,
            address=address,
            folder=folder,
            life=life,
            snapshot_s=snapshot_s,
        ).play()
        return
    if rank >= n:
        Server(
            sync=sync,
            algorithm=algorithm,
            me=me,
            state=state,
            address=address,
            folder=folder,
            life=life,
            snapshot_s=snapshot_s,
        ).play()
        return
    if life:
        step += sync.per_push
        state = sync.anew({**state, "step": step, "pushes": step // sync.per_push})

    Player(
        sync=sync,
        algorithm=algorithm,
        me=me,
        state=state,
        gradients=found,
        buffers=tuple,
        address=address,
        life=life,
    ).play()


@dataclass(frozen=True, kw_only=True)
class Members:
    """A run of them; `folder` has the lists of what was applied."""

    home: Home
    nursery: Nursery
    address: Address
    folder: Path

    def pushed(self, count: int, limit_s: float = 60.0) -> list[tuple[float, ...]]:
        """What was told, once there are so many pushes."""
        rows: list[tuple[float, ...]] = []
        end_s = time.monotonic() + limit_s
        while len(rows) < count:
            self.home.check()
            assert time.monotonic() < end_s, f"{len(rows)} pushes of {count} came"
            while not self.home.told.empty():
                rows.append(self.home.told.get())
            time.sleep(0.005)
        return rows

    def until(self, worker: int) -> None:
        """Until a push of that worker comes."""
        end_s = time.monotonic() + 120
        while all(int(row[0]) != worker for row in self.pushed(1)):
            assert time.monotonic() < end_s, f"worker {worker} pushes nothing"

    def all_push(self) -> None:
        """Until each worker has pushed."""
        for worker in range(self.home.n):
            self.until(worker)

    def rested(self) -> dict[int, Mapping[str, torch.Tensor]]:
        """States of all, between rounds, once nothing is under way."""
        before, asked, end_s = dict[int, dict[str, int]](), 0, time.monotonic() + 60
        while time.monotonic() < end_s:
            asked += 1
            for rank in self.home.members:
                self.home.send(rank, Letter(Kind.REST, HOME, 0, 0, asked))
            told: dict[int, Mapping[str, torch.Tensor]] = {}
            turn_s = time.monotonic() + 1.0  # who has just begun is asked again
            while len(told) < len(self.home.members) and time.monotonic() < turn_s:
                self.home.check()
                with suppress(Empty):
                    letter = self.home.here.get(timeout=0.05)
                    if letter.covered == asked:
                        told[letter.source] = loaded(letter)
            if len(told) == len(self.home.members) and before == counts(told):
                return told
            before = counts(told)
        raise AssertionError("they do not come to rest")

    def model(self, rank: int) -> torch.Tensor:
        """What a worker or keeper has for a model now."""
        self.home.send(rank, Letter(Kind.SEND, HOME, 0, 0, 7))
        state = load(bytes(self.home.here.get(timeout=30).body))
        weight = state.get("worker/0/weight", torch.tensor(1.0))
        return state["worker/0/params"] / weight

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a member a signal, if it is there."""
        process = self.nursery.processes.get(rank)
        if process is not None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(process, number)


@contextmanager
def members(
    algorithm: DataParallel,
    n: int,
    folder: Path,
    *,
    lr: float = 0.05,
    pause_s: float = 0.001,
    timeout_s: float = 30.0,
) -> Iterator[Members]:
    """Workers and servers of an algorithm, ended at the end."""
    with tempfile.TemporaryDirectory(prefix="polyreme-") as sockets:
        address = Address(folder=Path(sockets), token=os.urandom(16))
        with Nursery(("torch", "served_members"), Path(sockets)) as nursery:
            entry = partial(be, algorithm, n, lr, pause_s)

            def begin(rank: int, life: int, step: int) -> None:
                nursery.begin(rank, entry, (rank, life, step, address, folder))

            home = Home(
                nursery,
                address,
                n=n,
                servers=algorithm.sync.n_servers(n),
                begin=begin,
                timeout_s=timeout_s,
            )
            try:
                yield Members(home=home, nursery=nursery, address=address, folder=folder)
            finally:
                home.close()
