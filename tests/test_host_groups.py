"""Process groups over host memory must not carry out two collectives at once."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist


def _threads(world) -> tuple[int, int]:
    """Threads that carry out collectives, before and after there is a second group."""

    def count() -> int:
        names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
        return sum("runloop" in name.read_text() for name in names if name.exists())

    dist.barrier(world.group)
    before = count()
    dist.barrier(dist.new_group([0, 1]))
    return before, count()


def test_one_thread_a_group_carries_out_collectives(pool):
    """Two of them write one string without a lock, and a run in a thousand dies of it."""
    fresh = type(pool)()
    try:
        assert fresh(2).run(_threads) == [(1, 2)] * 2
    finally:
        fresh.close()
