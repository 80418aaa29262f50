"""Numbers on which all processes agree, so that they measure the same things and report the same.

A lone process agrees with itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.mesh import World

WARM_UPS = 1
REPEATS = 5


def mean(world: World, values: Sequence[float]) -> tuple[float, ...]:
    """Means over processes, the same bits on each."""
    if world.group is None:
        return tuple(values)
    return tuple(value / world.n_ranks for value in _reduced(world, values, "SUM"))


def largest(world: World, value: float) -> float:
    """The largest over processes."""
    return value if world.group is None else _reduced(world, [value], "MAX")[0]


def usual(world: World, seconds: Sequence[float]) -> float:
    """The median; in host memory, where others take the cores now and then, the least."""
    return min(seconds) if world.accelerator.on_host else statistics.median(seconds)


def usual_s(world: World, work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Usual seconds of a piece of work, mean over processes, which all start together."""
    for _ in range(WARM_UPS):
        work()
    world.barrier()
    world.accelerator.synchronize()
    seconds = []
    for _ in range(repeats):
        with world.accelerator.timer() as timer:
            work()
        seconds.append(timer.seconds)
    return mean(world, [usual(world, seconds)])[0]


@contextmanager
def no_garbage() -> Iterator[None]:
    """The collector of cycles waits meanwhile; its pauses are no part of what is measured."""
    import gc

    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _reduced(world: World, values: Sequence[float], op: str) -> tuple[float, ...]:
    import torch
    from torch import distributed

    numbers = torch.tensor(list(values), dtype=torch.float64, device=world.device)
    with world.record.inside(f"all_reduce {op.lower()}", numbers, world.n_ranks):
        distributed.all_reduce(numbers, getattr(distributed.ReduceOp, op), group=world.group)
        return tuple(float(number) for number in numbers.tolist())
