"""One process of many plays training steps on torch's fake process group, and is listened to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme.runtime.driver import Driver
from polyreme.runtime.loop import Run
from polyreme.runtime.mesh import World
from tiny import Case

# (operation, ranks of its group, bytes of its full tensor)
Heard = Counter[tuple[str, int, int]]
_FULL = {  # the argument that holds the full tensor
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("reduce_scatter", 1),  # how gradients are scattered on host memory
    "c10d::send": ("send", 0),
}


class Listening(TorchDispatchMode):
    """Hears what torch itself hands to its process groups, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Heard = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._hear(name, args)
        return func(*args, **(kwargs or {}))

    def _hear(self, name: str, args: Any) -> None:
        if name == "c10d::recv_":
            torch._foreach_zero_(args[0])  # nothing comes: what a sender's zeros would bring
            return
        operation, at = _FULL.get(name, (name, None))
        if at is None:  # what no step should call: heard under its own name
            self.heard[operation, 0, 0] += 1
            return
        tensors = args[at] if isinstance(args[at], list | tuple) else [args[at]]
        groups = [each for each in args if isinstance(each, torch.ScriptObject)]
        n_ranks = 2 if operation == "send" else dist.ProcessGroup.unbox(groups[0]).size()
        for tensor in tensors:
            self.heard[operation, n_ranks, tensor.nbytes] += 1


def _agreeing(driver: Driver) -> None:
    """Have others tell of a step like any other: of losses, labels and gradients."""
    agree = driver._agree

    def agreed(*args: Any) -> Any:
        found = agree(*args)
        no = (False,) * len(found.bad_loss)
        return replace(
            found,
            loss_sum=1.0,
            weight=1.0,
            square_sum=1.0,
            bad_loss=no,
            bad_gradient=no,
            used=(True,) * len(found.used),
        )

    driver._agree = agreed


def step_heard(
    world: World, case: Case, n_ranks: int, ranks: Sequence[int], n_steps: int = 2
) -> list[tuple[list[Heard], list[int]]]:
    """Of each of these ranks of so many, what was heard in each step, and bytes that it counted."""
    found = []
    job = case.job()
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
        try:
            here = replace(
                world, rank=rank, n_ranks=n_ranks, n_local=n_ranks, group=dist.group.WORLD
            )
            run = Run(job, here)
            run.applied.stage.train()
            _agreeing(run.route._driver)
            heard, counted = [], []
            for step in range(n_steps):
                before = run.route.sent_bytes
                with Listening() as listening:
                    run.route._step(step, run.feed.read(step))
                heard.append(listening.heard)
                counted.append(run.route.sent_bytes - before)
            found.append((heard, counted))
        finally:
            dist.destroy_process_group()
    return found
