"""Process groups over host memory must not carry out two collectives at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from polyreme.runtime import host_groups, mesh

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads and interfaces are those of Linux"
)


@pytest.fixture
def fresh(pool):
    """Processes of no other test: those of earlier groups keep their threads."""
    fresh = type(pool)()
    yield fresh
    fresh.close()


def _threads(world) -> tuple[int, int]:
    """Threads that carry out collectives, before and after there is a second group."""

    def count() -> int:
        names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
        return sum("runloop" in name.read_text() for name in names if name.exists())

    dist.barrier(world.group)
    before = count()
    dist.barrier(dist.new_group([0, 1]))
    return before, count()


def test_one_thread_a_group_carries_out_collectives(fresh):
    """Two of them write one string without a lock, and a run in a thousand dies of it."""
    assert fresh(2).run(_threads) == [(1, 2)] * 2


def _over(_, interface: str) -> str:
    host_groups.use_one_thread([interface])
    try:
        dist.barrier(dist.new_group([0, 1]))
    except RuntimeError as error:
        return str(error)
    return ""


def test_groups_go_over_the_interfaces_that_the_user_names(fresh, monkeypatch):
    assert fresh(2).run(_over, "lo") == [""] * 2
    assert all("none0" in said for said in fresh(2).run(_over, "none0"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert mesh._interfaces() == ["eth0", "eth1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert mesh._interfaces() == []
