"""What the ranks of test_launch run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def summed() -> float:
    """The sum of all ranks, over a real process group."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def computes() -> float:
    """A sum on this machine's device, which no process before this one may have touched."""
    import torch

    from polyreme.cluster.accelerator import detect

    accelerator = detect()
    accelerator.set(0)
    return torch.ones(4, device=accelerator.device(0)).sum().item()


def raises_on(rank: int, error: Exception) -> None:
    if int(os.environ["RANK"]) == rank:
        sys.stderr.write("last words\n")
        raise error


def raise_together(error: Exception) -> None:
    """All raise the same, the last rank first."""
    time.sleep(0.1 * (int(os.environ["WORLD_SIZE"]) - 1 - int(os.environ["RANK"])))
    raise error


def calls_more_than_others(rank: int) -> None:
    """A step whose trails differ."""
    from polyreme.cluster.accelerator import HostAccelerator
    from polyreme.runtime import mesh
    from polyreme.runtime.verdict import diverged

    world = mesh.open(HostAccelerator(), timeout_s=2)
    world.record.begin("all_gather" if world.rank == rank else "barrier", None, world.n_ranks)
    raise diverged(world)


def dies_in_a_collective(rank: int, how: str) -> None:
    """One rank dies by a signal, an exit code or an error while the others wait for it."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        if how == "raise":
            raise ValueError("the cause")
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.zeros(1))


def misbehaves(rank: int, how: str) -> list[float]:
    """All ranks sum vectors; in the third round one of them does otherwise."""
    import torch

    from polyreme.cluster.accelerator import HostAccelerator
    from polyreme.runtime import mesh
    from polyreme.runtime.timing import Traffic

    torch.set_num_threads(1)
    world = mesh.open(HostAccelerator(), timeout_s=2)
    traffic = Traffic(world.record)
    found: list[float] = []
    with world.record.doing("counting"):
        for number in range(6):
            length = 4 + number % 3
            if world.rank == rank and number == 2:
                if how == "skip":
                    continue
                if how == "op":
                    world.barrier()
                    continue
                length += 3 * (how == "shape")
                _misbehave(how)
            found = traffic.sums(torch.ones(length), world.group)
    mesh.close(world)
    return found


def passes_round(rank: int, how: str) -> None:
    """Workers send a large message to the next and await the one before; one does otherwise."""
    import torch

    from polyreme.algo.compose import DataParallel
    from polyreme.algo.effects import Recv, Send
    from polyreme.algo.exchange import dense
    from polyreme.algo.vector import Layout
    from polyreme.algo.worker import Worker
    from polyreme.cluster.accelerator import HostAccelerator
    from polyreme.runtime import mesh
    from polyreme.runtime.player import Player

    torch.set_num_threads(1)
    world = mesh.open(HostAccelerator(), timeout_s=2)
    n, message = world.n_ranks, dense([torch.zeros(2**23)])
    me = Worker(rank=world.rank, n=n, layout=Layout.of({"w": (1,)}), seed=0, lr=lambda _: 0.1)

    class Passing:
        def round(self, algorithm: Any, state: dict[str, Any], me: Worker) -> Any:
            """Worker 1 waits for the one that does otherwise, worker 0 sends to it."""
            if world.rank == rank and state["step"] == 1:
                _misbehave(how)
            yield Send(to=(me.rank - 1) % n, message=message)
            yield Recv(source=(me.rank + 1) % n, kinds=message.kinds)
            return {**state, "step": state["step"] + 1}

    class Algorithm(DataParallel, frozen=True):
        sync: Any = Passing()

    state = {"params": torch.zeros(1), "step": 0}
    player = Player(
        algorithm=Algorithm(), me=me, state=state, gradients=lambda *_: None, world=world
    )
    for _ in range(3):
        player.round()
    mesh.close(world)


def _misbehave(how: str) -> None:
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "sleep":
        time.sleep(1000)
    while how == "spin":
        pass
    if how == "exit":
        os._exit(0)
    if how == "raise":
        raise ValueError("the cause")


def saves_on_a_slow_disk(folder: Path, seconds: float, timeout_s: float, fails: bool) -> str:
    """How a run ends whose rank 1 takes so long to write; with `fails` rank 0 cannot write."""
    import torch

    from polyreme.cluster.accelerator import HostAccelerator
    from polyreme.runtime import loop, mesh, tensorfile
    from polyreme.runtime.saver import Saver
    from tiny import Case

    torch.set_num_threads(1)
    world = mesh.open(HostAccelerator(), timeout_s=timeout_s)
    write = tensorfile.write

    def slow(*args: Any) -> Any:
        if world.rank:
            time.sleep(seconds)
        elif fails:
            raise OSError(28, "No space left on device")
        return write(*args)

    tensorfile.write = slow
    job = Case(plan={"replica": 2}, steps=1).job()
    saver = Saver(folder, job.graph, world, keep=1, timeout_s=timeout_s)
    status = loop.train(job, world, save=saver).status
    mesh.close(world)
    return status


def fails_beside_a_stopped_rank() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(0.2)
        raise ValueError("the cause")
    os.kill(os.getpid(), signal.SIGSTOP)


def store_key_of_an_earlier_attempt() -> bool:
    """Whether a key that every attempt sets is there before this one sets it."""
    from torch import distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    found = store.check(["attempt"])
    dist.barrier()
    store.set("attempt", "0")
    dist.destroy_process_group()
    return found


def prints(text: str) -> None:
    sys.stdout.write(text)


def waits(folder: Path, heed: bool) -> None:
    """Note the process id, then wait for a minute; without `heed` SIGTERM is ignored."""
    if not heed:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    time.sleep(60)


def trains_on(folder: Path) -> None:
    """A rank that trains and takes long to end once it was asked to."""
    from polyreme.runtime.record import RECORD, Record

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    Record(Path(os.environ[RECORD]), rank).enter("training")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(15)
    (folder / f"{rank}.done").write_text("late")


def stops_on_sigterm(folder: Path) -> str:
    """A rank that ends in order when asked to."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    (folder / f"{os.environ['RANK']}.done").write_text("saved")
    return "stopped"


def twice(value: Any) -> Any:
    return value, value


def main() -> None:
    """Launch `waits` or another entry from a process of its own: entry name, JSON arguments."""
    from polyreme.runtime.launch import Launcher

    folder = Path(sys.argv[2])
    extra = json.loads(sys.argv[3])
    with Launcher(preload=()) as launcher:
        try:
            launcher.run(globals()[sys.argv[1]], (folder, *extra), n_processes=2, grace_s=1.0)
        except KeyboardInterrupt:
            sys.exit(130)


def joins() -> None:
    """What a rank of torchrun does: rank 0 leaves the sum beside the script."""
    from polyreme.runtime.place import is_launched

    assert is_launched()
    total = summed()
    Path(sys.argv[2], f"rank-{os.environ['RANK']}").write_text(str(total))


if __name__ == "__main__":
    joins() if sys.argv[1] == "joins" else main()
