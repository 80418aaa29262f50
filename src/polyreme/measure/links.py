"""Seconds of this group's collectives against size, and how far they hide behind compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..profile.assume import OPS
from ..profile.record import Collective, CollectiveTimes
from .agree import largest, usual_s

if TYPE_CHECKING:
    from ..runtime.mesh import World

SIZES = tuple(4 * 1024 * 8**power for power in range(7))  # 4 KiB to 1 GiB
ENOUGH_S = 0.05  # a collective this long tells the slope
MEMORY_SHARE = 0.2  # of what is free, for each of two buffers
HOST_BUCKET_BYTES = 8 * 2**20  # either takes about a millisecond or more
DEVICE_BUCKET_BYTES = 256 * 2**20


def measure_links(
    world: World, budget_s: float, ops: tuple[Collective, ...] = OPS
) -> Mapping[Collective, tuple[CollectiveTimes, ...]]:
    """Times over all processes, and over every even group of neighbours on a host.

    Groups of one size run at the same time, as they do in training. Empty for a lone process.
    """
    found: dict[Collective, list[CollectiveTimes]] = {op: [] for op in ops}
    if world.group is None:
        return dict.fromkeys(ops, ())
    sizes = _group_sizes(world)
    for index, n_devices in enumerate(sizes):
        group, made = _group(world, n_devices)
        share_s = budget_s / (len(sizes) - index)
        start_s = time.perf_counter()
        n_hosts = max(1, n_devices // world.n_local)
        for op in ops:
            points = _measure_op(op, world, group, n_devices, share_s / len(ops))
            found[op].append(
                CollectiveTimes(
                    n_devices=n_devices,
                    n_hosts=n_hosts,
                    size_bytes=tuple(points),
                    seconds=tuple(points.values()),
                )
            )
        _release(made)
        budget_s -= largest(world, time.perf_counter() - start_s)
    return {op: tuple(entries) for op, entries in found.items()}


def measure_overlap(world: World) -> float:
    """Share of an all-reduce's seconds that vanish behind products that take twice as long.

    Both slow each other down where they share cores or memory; that counts against the share.
    """
    if world.group is None:
        return 0.0
    import torch
    from torch import distributed

    on_host = world.accelerator.on_host
    side = 256 if on_host else 2048
    bucket_bytes = HOST_BUCKET_BYTES if on_host else DEVICE_BUCKET_BYTES
    left = torch.randn(side, side, device=world.device)
    bucket = torch.zeros(bucket_bytes // 4, device=world.device)

    def reduce() -> None:
        with world.record.inside("all_reduce sum", bucket, world.n_ranks, settles=False):
            distributed.all_reduce(bucket, group=world.group)

    def multiply(times: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                left @ left

        return work

    def both(times: int) -> Callable[[], None]:
        def work() -> None:
            with world.record.inside("all_reduce sum", bucket, world.n_ranks, settles=False):
                handle = distributed.all_reduce(bucket, group=world.group, async_op=True)
                multiply(times)()
                handle.wait()

        return work

    comm_s = usual_s(world, reduce)
    one_s = usual_s(world, multiply(1))
    times = max(1, min(1000, round(2 * comm_s / max(one_s, 1e-9))))
    compute_s = usual_s(world, multiply(times))
    both_s = usual_s(world, both(times))
    return min(1.0, max(0.0, (comm_s + compute_s - both_s) / comm_s))


def _measure_op(
    op: Collective, world: World, group: Any, n_devices: int, budget_s: float
) -> dict[int, float]:
    """Seconds by bytes of the whole tensor; the smallest size always, larger ones while quick."""
    points: dict[int, float] = {}
    start_s = time.perf_counter()
    for size in SIZES:
        whole_bytes = size - size % (4 * n_devices)
        points[whole_bytes] = usual_s(world, _call(op, world, group, n_devices, whole_bytes))
        spent_s = largest(world, time.perf_counter() - start_s)
        room = world.accelerator.free_bytes() * MEMORY_SHARE
        sharing = world.n_local if world.accelerator.on_host else 1
        full = largest(world, float(size * 8 * sharing > room))
        if points[whole_bytes] > ENOUGH_S or spent_s + 40 * points[whole_bytes] > budget_s or full:
            break
    return points


def _call(
    op: Collective, world: World, group: Any, n_devices: int, whole_bytes: int
) -> Callable[[], None]:
    import torch
    from torch import distributed

    gather = getattr(distributed, "all_gather_single", None)  # torch 2.13 renames them
    scatter = getattr(distributed, "reduce_scatter_single", None)
    gather = gather or distributed.all_gather_into_tensor
    scatter = scatter or distributed.reduce_scatter_tensor
    whole = torch.zeros(whole_bytes // 4, device=world.device)
    part = torch.zeros(whole_bytes // 4 // n_devices, device=world.device)
    dealt = torch.zeros_like(whole) if op == "all_to_all" else part
    calls: dict[Collective, Callable[[], None]] = {
        "all_reduce": lambda: distributed.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: distributed.all_to_all_single(dealt, whole, group=group),
    }

    def call() -> None:
        with world.record.inside(op, whole, n_devices, settles=False):
            calls[op]()

    return call


def _group_sizes(world: World) -> list[int]:
    """All processes, and the even groups of a host's; largest first."""
    even = world.n_ranks % world.n_local == 0
    inside = [n for n in range(2, world.n_local + 1) if world.n_local % n == 0] if even else []
    return sorted({world.n_ranks, *inside}, reverse=True)


def _group(world: World, n_devices: int) -> tuple[Any, list[Any]]:
    """This process's group of so many neighbours, and all groups that were made for it."""
    from torch import distributed

    if n_devices == world.n_ranks:
        return world.group, []
    mine, made = None, []
    for first in range(0, world.n_ranks, n_devices):
        ranks = list(range(first, first + n_devices))
        group = distributed.new_group(ranks)
        if world.rank in ranks:
            mine = group
            made.append(group)
    return mine, made


def _release(groups: list[Any]) -> None:
    from torch import distributed

    for group in groups:
        distributed.destroy_process_group(group)
