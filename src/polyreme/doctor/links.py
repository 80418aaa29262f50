"""Links: network interfaces, and a trial of two processes of this host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cluster.accelerator import Accelerator
from ..errors import PolyremeError
from ..units import show_bytes_s, show_seconds
from .readings import Interface
from .row import Row

N_PROCESSES = 2
_SMALL, _LARGE = 1, 2**22  # float32 elements
_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 5
_TIMEOUT_S = 20.0
_SLOW_S = 0.005
_SLOW_BIT_S = 1e10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Median seconds of an all-reduce of one number, and bytes per second of a large one."""

    latency_s: float
    bandwidth_bytes_s: float


def interfaces(found: Sequence[Interface]) -> Iterator[Row]:
    """Findings about network interfaces, the loop to this machine itself left out."""
    there = [each for each in found if each.up and not each.name.startswith("lo")]
    for each in there:
        known = each.bit_s > 0
        slow = known and each.bit_s < _SLOW_BIT_S
        yield Row(
            group="links",
            what=f"interface {each.name}",
            value=f"{each.bit_s / 1e9:g} Gbit/s" if known else "up; speed not told",
            status="note" if slow else "ok",
            remedy="train on one machine, or over a faster network" if slow else "",
        )
    if not there:
        remedy = "bring a network interface up to train over several machines"
        yield Row(group="links", what="interfaces", value="none up", status="note", remedy=remedy)


def two_processes(entry: Accelerator) -> Row:
    """Whether two processes of this host find each other and sum what they hold."""
    from ..runtime.launch import Launcher

    what = f"all-reduce, 2 processes ({entry.backend})"
    try:
        with Launcher(preload=("torch.distributed",)) as launcher:
            trial: Trial = launcher.run(exchange, (entry,), n_processes=N_PROCESSES)[0]
    except (PolyremeError, OSError) as error:
        value = " ".join(str(error).split())[:300]
        remedy = "let processes of this host meet on 127.0.0.1 (firewall, settings of sockets)"
        return Row(
            group="links", what=what, value=value, status="missing", needed=True, remedy=remedy
        )
    slow = trial.latency_s > _SLOW_S
    rate, latency = show_bytes_s(trial.bandwidth_bytes_s), show_seconds(trial.latency_s)
    return Row(
        group="links",
        what=what,
        value=f"{rate}, latency {latency}",
        status="note" if slow else "ok",
        remedy="end other processes that hold the cores" if slow else "",
    )


def exchange(entry: Accelerator) -> Trial:
    """What one of the processes does. Raises RunError where a sum is wrong."""
    import torch
    import torch.distributed as dist

    from ..errors import RunError
    from ..runtime import mesh

    torch.set_num_threads(1)
    world = mesh.open(entry, timeout_s=_TIMEOUT_S)
    try:
        medians = []
        for n_elements, n_rounds in ((_SMALL, _SMALL_ROUNDS), (_LARGE, _LARGE_ROUNDS)):
            seconds = []
            for _ in range(n_rounds):
                held = torch.full((n_elements,), float(world.rank + 1), device=world.device)
                entry.synchronize()
                start_s = time.perf_counter()
                dist.all_reduce(held, group=world.group)
                entry.synchronize()
                seconds.append(time.perf_counter() - start_s)
                if held[-1].item() != N_PROCESSES * (N_PROCESSES + 1) / 2:
                    raise RunError(f"rank {world.rank} got a wrong sum from {entry.backend}")
            medians.append(statistics.median(seconds))
    finally:
        mesh.close(world)
    share = 2 * (N_PROCESSES - 1) / N_PROCESSES
    return Trial(latency_s=medians[0], bandwidth_bytes_s=share * 4 * _LARGE / medians[1])
