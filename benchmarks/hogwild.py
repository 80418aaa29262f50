"""Updates a second of workers that share memory (Hogwild), and of workers that send letters (ASGD).

Both teams train the same model on random samples, in processes that are there at the same time; one
rests while the other works, in turns of some seconds, so that what else the machine does meets
both. Updates are those that the log is told of. Beside seconds stand those of processors, which
others on the machine do not change much. Ratios are of memory over letters: the median over turns,
the least and the largest.

    python benchmarks/hogwild.py [--workers 2] [--batch 16] [--turns 7] [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from queue import Empty

import psutil
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, Hogwild
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.runtime.served.home import Home
from polyreme.runtime.served.memory import shared
from polyreme.runtime.served.nursery import Nursery
from polyreme.runtime.served.shared import roles
from polyreme.runtime.transport.letters import TOKEN_BYTES, Kind, Letter
from polyreme.runtime.transport.local import HOME, Address

N_IN, N_OUT = 64, 10
MODELS: dict[str, tuple[int, ...]] = {
    "logistic regression": (),
    "MLP 128": (128,),
    "MLP 512, 512": (512, 512),
}
SYNCS = (ASGD(), Hogwild())


def model(hidden: Sequence[int]) -> nn.Sequential:
    """A perceptron; without hidden layers a logistic regression."""
    widths = [N_IN, *hidden, N_OUT]
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def player(rank: int, n: int, hidden: Sequence[int]) -> Worker:
    """One of the workers, or the server behind them."""
    shapes = {name: tuple(each.shape) for name, each in model(hidden).named_parameters()}
    return Worker(rank=rank, n=n, layout=Layout.of(shapes), seed=0, lr=lambda _step: 1e-3)


def start(hidden: Sequence[int]) -> torch.Tensor:
    """Parameters to begin with."""
    torch.manual_seed(0)
    return nn.utils.parameters_to_vector(model(hidden).parameters()).detach()


def be(
    algorithm: DataParallel,
    hidden: Sequence[int],
    batch: int,
    n: int,
    address: Address,
    folder: Path,
    rank: int,
    life: int,
) -> None:
    """Be a worker or the server."""
    torch.set_num_threads(1)
    sync, me, server = algorithm.sync, player(rank, n, hidden), player(n, n, hidden)
    begun = sync.init(algorithm, start(hidden), server)
    work, serve = roles(sync, address, server, begun)
    if rank == n:
        more = {"state": begun, "folder": folder, "snapshot_s": 5.0}
        serve(algorithm=algorithm, me=me, address=address, life=life, **more).play()
        return
    net = model(hidden)
    samples, labels = torch.randn(4096, N_IN), torch.randint(N_OUT, (4096,))

    def gradient(params: torch.Tensor, number: int) -> Computed:
        nn.utils.vector_to_parameters(params, net.parameters())
        at = torch.arange(number * batch, (number + 1) * batch) % len(samples)
        loss = cross_entropy(net(samples[at]), labels[at])
        found = torch.autograd.grad(loss, list(net.parameters()))
        flat = torch.cat([each.reshape(-1) for each in found])
        return Computed(gradient=flat, loss=float(loss), weight=float(batch), n_samples=batch)

    work(
        algorithm=algorithm,
        me=me,
        state=sync.init(algorithm, start(hidden), me),
        gradients=gradient,
        buffers=tuple,
        address=address,
        life=life,
    ).play()


class Group:
    """Members of one sync, which rest until it is their turn."""

    def __init__(self, sync: ASGD, hidden: Sequence[int], args: argparse.Namespace) -> None:
        self.n, self._stack = args.workers, ExitStack()
        algorithm = DataParallel(rule=SGD(), sync=sync)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hogwild-")))
        files: tuple[int, ...] = ()
        if sync.in_memory:
            state = sync.init(algorithm, start(hidden), player(self.n, self.n, hidden))
            files = (self._stack.enter_context(shared(state, self.n)),)
        token, file = os.urandom(TOKEN_BYTES), files[0] if files else None
        address = Address(folder=folder, token=token, memory=file)
        self._nursery = nursery = self._stack.enter_context(
            Nursery((Path(__file__).stem,), folder, files=files)
        )
        ours = import_module(Path(__file__).stem)  # not __main__, which processes have another of
        entry = partial(ours.be, algorithm, hidden, args.batch, self.n, address, folder)
        self.home = Home(
            nursery,
            address,
            n=self.n,
            servers=1,
            begin=lambda rank, life, _step: nursery.begin(rank, entry, (rank, life)),
            timeout_s=600.0,
        )
        self._stack.callback(self.home.close)
        self._hear()
        self.rest()

    def _hear(self) -> None:
        """Wait until something is told."""
        while self.home.told.empty():
            self.home.check()
            time.sleep(0.01)

    def _say(self, kind: Kind) -> None:
        for rank in range(self.n):
            self.home.send(rank, Letter(kind, HOME))

    def rest(self) -> None:
        """Have all workers stop, and all that they did be told."""
        rested: set[int] = set()
        while len(rested) < self.n:
            self.home.check()
            self._say(Kind.REST)  # again, to those that were not there yet
            with suppress(Empty):
                while True:
                    rested.add(self.home.here.get(timeout=0.5).source)
        before = -1
        while before != (before := self.home.told.qsize()):
            time.sleep(0.3)

    def _cpu_s(self) -> float:
        """Of all members and of this process so far."""
        members = [psutil.Process(pid).cpu_times() for pid in self._nursery.processes.values()]
        return sum(each.user + each.system for each in members) + time.process_time()

    def turn(self, seconds: float) -> tuple[float, float]:
        """Updates a second, and milliseconds of processors for one."""
        while not self.home.told.empty():
            self.home.told.get()
        start_s, cpu_s = time.perf_counter(), self._cpu_s()
        self._say(Kind.GO)
        time.sleep(seconds)
        n_updates, took_s = self.home.told.qsize(), time.perf_counter() - start_s
        self.home.check()
        self.rest()
        return n_updates / took_s, 1000 * (self._cpu_s() - cpu_s) / self.home.told.qsize()

    def close(self) -> None:
        """End them."""
        self._stack.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Take turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="samples of a gradient")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    args = parser.parse_args(argv)
    print(f"{'':20} {'updates/s':^32} | {'processor ms an update':^32}")
    print(f"{'model':20}" + f" {'letters':>8} {'memory':>8} {'ratio':>5}  from    to |" * 2)
    for name, hidden in MODELS.items():
        groups = [Group(sync, hidden, args) for sync in SYNCS]
        turns = [[each.turn(args.seconds) for each in groups] for _ in range(args.turns)]
        for each in groups:
            each.close()
        print(f"{name:20}", end="")
        for found in zip(*(zip(*turn, strict=True) for turn in turns), strict=True):
            letters, memory = (statistics.median(each) for each in zip(*found, strict=True))
            ratios = [mine / theirs for theirs, mine in found]
            spread = f"{statistics.median(ratios):5.2f} {min(ratios):5.2f} {max(ratios):5.2f}"
            print(f" {letters:8.4g} {memory:8.4g} {spread} |", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
