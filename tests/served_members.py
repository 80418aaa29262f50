"""Members of a run in processes of their own, on gradients of a quadratic: for tests of these."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, Numbers
from polyreme.algo.push import Push
from polyreme.algo.rule import SGD
from polyreme.algo.sync import Hogwild
from polyreme.algo.sync.peers import Peers
from polyreme.algo.vector import Layout
from polyreme.runtime.served.among import counts
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.served.home import Home, Told, loaded
from polyreme.runtime.served.memory import Memory, shared
from polyreme.runtime.served.nursery import Nursery
from polyreme.runtime.served.peer import Peer
from polyreme.runtime.served.shared import roles
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
    snapshot_s: float,
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
            state = sync.anew(algorithm, {**state, "step": step + 1})
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
    served = sync.init(algorithm, START.clone(), players[n])
    work, serve = roles(sync, address, players[n], served)
    if rank >= n:
        serve(
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
        counts = {"step": step, "pushes": step // sync.per_push}
        state = sync.anew(algorithm, {**state, **counts})

    work(
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
    left: dict[str, Any] = field(default_factory=dict)
    """What the memory held once all had ended, where they shared one."""

    def pushed(self, count: int, limit_s: float = 60.0) -> list[Told]:
        """What was told, once there are so many pushes."""
        rows: list[Told] = []
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
        before = dict[int, dict[str, int]]()
        for asked in range(1, 1000):
            letters = {rank: Letter(Kind.REST, HOME, covered=asked) for rank in self.home.members}
            told = {rank: loaded(letter) for rank, letter in self._asked(letters, 60).items()}
            if before == counts(told):
                return told
            before = counts(told)
        raise AssertionError("they do not come to rest")

    def model(self, rank: int) -> torch.Tensor:
        """What a worker or keeper has for a model now."""
        state = loaded(self._asked({rank: Letter(Kind.SEND, HOME)}, 60)[rank])
        weight = state.get("worker/0/weight", torch.tensor(1.0))
        return state["worker/0/params"] / weight

    def rest(self, limit_s: float = 60.0) -> None:
        """Have workers stop between rounds, and the server hear of all that they did."""
        asked = {rank: Letter(Kind.REST, HOME, covered=1) for rank in range(self.home.n)}
        rested = self._asked(asked, limit_s)
        lasts = [
            [rank, self.home.members[rank].life, int(loaded(letter)[f"last/{self.home.n}"])]
            for rank, letter in rested.items()
        ]
        body = json.dumps(lasts).encode()
        self._asked({self.home.n: Letter(Kind.SEND, HOME, 0, 1, 2, body)}, limit_s)

    def _asked(self, letters: dict[int, Letter], limit_s: float) -> dict[int, Letter]:
        found: dict[int, Letter] = {}
        end_s = time.monotonic() + limit_s
        while len(found) < len(letters):
            self.home.check()
            assert time.monotonic() < end_s, f"{sorted(letters.keys() - found.keys())} are silent"
            for rank in letters.keys() - found.keys():
                self.home.send(rank, letters[rank])
            time.sleep(0.1)
            while not self.home.here.empty():
                came = self.home.here.get()
                if came.source in letters and came.covered == letters[came.source].covered:
                    found[came.source] = came
        return found

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a member a signal, if it is there."""
        process = self.nursery.processes.get(rank)
        if process is not None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(process, number)

    def storm(
        self, seed: int, n_moments: int, *, apart_s: float = 0.15, stopped_s: float = 0.15
    ) -> None:
        """Kill or stop one of them at so many random moments, and forget what was told."""
        drawn, n_members = random.Random(seed), len(self.home.members)
        for _ in range(n_moments):
            time.sleep(drawn.uniform(0.0, apart_s))
            member = drawn.randrange(n_members)
            if drawn.random() < 0.5:
                self.kill(member)
            else:
                self.kill(member, signal.SIGSTOP)
                time.sleep(drawn.uniform(0.0, stopped_s))
                self.kill(member, signal.SIGCONT)
        while not self.home.told.empty():
            self.home.told.get()


def whole(folder: Path, servers: int) -> None:
    """Of each life of each worker the list has every push from the first to the last, once."""
    for server in range(servers):
        numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row in read_applied(folder / f"applied-{server}.bin"):
            numbers[int(row["worker"]), int(row["life"])].append(int(row["number"]))
        assert numbers
        for who, found in numbers.items():
            assert found == list(range(len(found))), (server, who)


@contextmanager
def members(
    algorithm: DataParallel,
    n: int,
    folder: Path,
    *,
    lr: float = 0.05,
    pause_s: float = 0.001,
    timeout_s: float = 30.0,
    snapshot_s: float = 0.2,
) -> Iterator[Members]:
    """Workers and servers of an algorithm, ended at the end."""
    with tempfile.TemporaryDirectory(prefix="polyreme-") as sockets, ExitStack() as stack:
        files: tuple[int, ...] = ()
        if algorithm.sync.in_memory:
            me = team(algorithm, Layout.of({"w": (12,)}), n)[n]
            state = algorithm.sync.init(algorithm, START.clone(), me)
            files = (stack.enter_context(shared(state, n)),)
        address = Address(
            folder=Path(sockets), token=os.urandom(16), memory=next(iter(files), None)
        )
        with Nursery(("torch", "served_members"), Path(sockets), files=files) as nursery:
            entry = partial(be, algorithm, n, lr, pause_s)

            def begin(rank: int, life: int, step: int) -> None:
                nursery.begin(rank, entry, (rank, life, step, address, folder, snapshot_s))

            home = Home(
                nursery,
                address,
                n=n,
                servers=algorithm.sync.n_servers(n),
                begin=begin,
                timeout_s=timeout_s,
            )
            run = Members(home=home, nursery=nursery, address=address, folder=folder)
            try:
                yield run
            finally:
                home.close()
        for file in files:
            run.left.update(Memory(file, state, n).state())


def hammer(sync: Hogwild, file: int, n: int, rank: int, count: int, size: int) -> None:
    """Take 1 off every n-th entry of a memory so often, from the worker's number on."""
    torch.set_num_threads(1)
    algorithm = DataParallel(sync=sync, rule=SGD())
    server = team(algorithm, Layout.of({"w": (size,)}), n, lr=1.0)[n]
    start = torch.zeros(size, dtype=torch.float64)
    memory = Memory(file, sync.init(algorithm, start, server), n)
    found = start.clone()
    found[rank::n] = 1.0
    row = Numbers(0.0, 1.0, 1.0, 1.0)
    for number in range(count):
        push = Push(worker=rank, number=number, version=0, lr=1.0, vectors=(found,), rows=(row,))
        memory.update(sync, algorithm, push, server)
        while memory.state()["version"] < n:  # until all are there
            time.sleep(0.001)
