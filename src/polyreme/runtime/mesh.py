"""The processes of a run: this one's device and its group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..cluster.accelerator import HOST_BACKEND, Accelerator
from ..errors import RunError
from . import watchdog as watchdogs
from .host_groups import use_one_thread
from .place import Place, is_watched, read_place
from .record import RECORD, Record
from .watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all: its rank, device and group (None for a single process).

    `record` keeps what it does; every collective goes into it. `watchdog` is there where ranks
    watch each other.
    """

    rank: int
    n_ranks: int
    local_rank: int
    n_local: int
    device: torch.device
    accelerator: Accelerator
    group: Any = None  # dist.ProcessGroup | None
    record: Record = field(default_factory=Record)
    watchdog: Watchdog | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the log."""
        return self.rank == 0

    def apart(self) -> World:
        """This process as if it were alone, with the same device and record."""
        return replace(self, rank=0, n_ranks=1, group=None, watchdog=None)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.group is not None:
            with self.record.inside("barrier", n_ranks=self.n_ranks):
                dist.barrier(self.group)

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; all call it together."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.n_ranks
        with self.record.inside("all_gather_object", n_ranks=self.n_ranks):
            dist.all_gather_object(found, value, group=self.group)
        return found


def open(  # noqa: A001
    accelerator: Accelerator,
    timeout_s: float = 600.0,
    devices: Sequence[int] | None = None,
    *,
    watch: bool = False,
) -> World:
    """Take this process's device and join the others; `close` undoes it.

    `devices` are indices of the host's devices by local rank, unless it is the first ones. With
    `watch` ranks that nobody else watches watch each other.

    `timeout_s` is how long a collective may wait for a process that does not come. Whoever
    watches the ranks ends them then; the backend's own limit is longer, so that they are named
    first. Raises RunError if the others cannot be reached.
    """
    place = read_place()
    record, watchdog = _record(place), None
    limit = timedelta(seconds=2 * timeout_s + 30)
    index = place.local_rank if devices is None else devices[place.local_rank]
    device = accelerator.device(index)
    accelerator.set(index)
    group = None
    if place.n_ranks > 1:
        try:
            store = _store(place, limit)
            if watch and not is_watched():
                apart = store.clone()  # type: ignore[attr-defined]
                box = watchdogs.home(apart)
                record = Record(box / f"{place.rank}.record", place.rank)
                watchdog = Watchdog(apart, box, record, place.n_ranks, timeout_s)
            record.lags = not accelerator.on_host
            use_one_thread(_interfaces())
            with record.inside("init_process_group", n_ranks=place.n_ranks):
                dist.init_process_group(
                    accelerator.backend,
                    store=store,
                    rank=place.rank,
                    world_size=place.n_ranks,
                    timeout=limit,
                    device_id=None if device.type == "cpu" else device,
                )
        except (RuntimeError, ValueError) as error:
            what = f"rank {place.rank} could not join the others: {error}"
            raise RunError(what, rank=place.rank) from error
        group = dist.group.WORLD
    return World(
        rank=place.rank,
        n_ranks=place.n_ranks,
        local_rank=place.local_rank,
        n_local=place.n_local,
        device=device,
        accelerator=accelerator,
        group=group,
        record=record,
        watchdog=watchdog,
    )


@contextmanager
def watched(
    accelerator: Accelerator, timeout_s: float, devices: Sequence[int] | None = None
) -> Iterator[World]:
    """This process among all, whose ranks watch each other if nobody else does."""
    if accelerator.on_host:
        torch.set_num_threads(1)
    world = open(accelerator, timeout_s, devices, watch=True)
    try:
        yield world
    except Exception:
        if world.watchdog is not None:
            world.watchdog.give_way()
        raise
    close(world)  # after an error it could wait for collectives that never end


def close(world: World) -> None:
    """Leave the group."""
    if world.watchdog is not None:
        world.watchdog.close()
    if world.group is not None and dist.is_initialized():
        dist.destroy_process_group()
        _forget_layouts()


def _forget_layouts() -> None:
    """Have DTensors forget what they know of layouts.

    Those of a later group that look the same would be taken for them, with the old one's parts.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _interfaces() -> list[str]:
    """Network interfaces that the user names for groups over host memory."""
    given = os.environ.get(f"{HOST_BACKEND.upper()}_SOCKET_IFNAME", "")
    return [name for name in given.split(",") if name]


def _record(place: Place) -> Record:
    path = os.environ.get(RECORD)
    return Record(None if path is None else Path(path), place.rank)


def _store(place: Place, timeout: timedelta) -> Store:
    """The store in which the processes meet.

    Its keys carry the attempt, so that a restart on the same store reads no address of the
    attempt before. Slurm names no port: one follows from the job's number.
    """
    method = "env://"
    if "MASTER_ADDR" not in os.environ and "SLURM_PROCID" in os.environ:
        host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        method = f"tcp://{host}:{port}"
    store, _, _ = next(rendezvous(method, place.rank, place.n_ranks, timeout=timeout))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", store)
