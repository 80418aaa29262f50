"""The pool of processes: what comes back, and what is said of those that fail."""

from __future__ import annotations

import os
import time

import pytest
import torch

from pool import Failure, ProcessFailed


def _sum_of_ranks(world, offset):
    total = torch.tensor(float(world.rank + offset))
    torch.distributed.all_reduce(total)
    return world.rank, world.n_ranks, total.item()


def _raise_on_one(world):
    if world.rank == 1:
        raise KeyError("only here")
    return world.rank


def _die_on_one(world):
    if world.rank == 1:
        os._exit(7)
    torch.distributed.barrier()


def _sleep_on_one(world):
    if world.rank == 0:
        time.sleep(100)
    return world.rank


def test_results_come_in_rank_order_from_new_groups(pool):
    assert pool(2).run(_sum_of_ranks, 1) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert pool(3).run(_sum_of_ranks, 0) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    assert pool(1).run(_lone) == [(0, True)]


def _lone(world):
    return world.rank, world.group is None


def test_an_exception_comes_back_with_its_rank_and_traceback(pool):
    with pytest.raises(ProcessFailed, match=r"rank 1:[\s\S]*_raise_on_one[\s\S]*only here"):
        pool(2).run(_raise_on_one)
    first, second = pool(2).outcomes(_raise_on_one)
    assert first == 0
    assert isinstance(second.error, KeyError)


def test_a_dead_process_is_reported_and_replaced(pool):
    outcomes = pool(2).outcomes(_die_on_one)
    assert isinstance(outcomes[1], Failure)
    assert "exit code 7" in outcomes[1].text
    assert pool(2).run(_sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_hung_process_is_reported_with_its_stack(pool):
    outcomes = pool(2).outcomes(_sleep_on_one, timeout_s=0.5)
    assert outcomes[1] == 1
    assert "_sleep_on_one" in outcomes[0].text
