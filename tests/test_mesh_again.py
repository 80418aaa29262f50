"""Groups one after another in the same processes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def _doubled(world) -> tuple[list[float], bool]:
    mesh = init_device_mesh("cpu", (2,))
    doubled = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) * 2
    return doubled.full_tensor().tolist(), doubled.device_mesh is mesh


def test_what_a_later_group_computes_is_not_laid_over_one_that_is_gone(pool) -> None:
    """What looked the same was gathered over a group of the run before, with other processes."""
    group = pool(2)
    for _ in range(2):
        assert group.run(_doubled) == [([0.0, 2.0, 4.0, 6.0], True)] * 2
