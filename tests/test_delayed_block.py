"""Blocks of features in turn: which iterations are waited for, and what a bad or lost one does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lasso import L1, LASSO, WORKERS, D, X, clock_of, excess, model_of, shard_of, theirs
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import ProximalSGD
from polyreme.algo.sync import (
    SSP,
    DelayedBlockProximal,
)
from polyreme.convex import kernels
from polyreme.convex.loss import sharpest
from polyreme.convex.problem import Penalty
from polyreme.convex.task import LinearTask
from polyreme.sim.faults import Crash
from served_members import members, whole

torch.set_num_threads(1)

RULE = ProximalSGD(l1=L1)


def test_an_iteration_with_a_bad_block_changes_nothing() -> None:
    """Rows of one worker left out of a sum are another problem."""

    class Bad(LinearTask):
        n_asked = 0

        def at(self, w: torch.Tensor) -> Any:
            found = super().at(w)
            Bad.n_asked += 1
            if Bad.n_asked % 3 == 1:
                found.gradient.fill_(math.nan)
            return found

    clock = clock_of(DataParallel(rule=RULE, sync=DelayedBlockProximal(ahead=1)), 0.3)
    player = clock._players[1]
    task: Any = player.me.task
    player.me = replace(player.me, task=Bad(shard=task.shard, batch=task.batch))
    clock.play(700)
    assert Bad.n_asked > 600
    assert excess(model_of(clock), theirs(), LASSO) < 1e-9


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_worker_begins_an_iteration_before_all_but_the_last_are_done(ahead: int) -> None:
    records: list[Any] = []
    clock = clock_of(
        DataParallel(rule=RULE, sync=DelayedBlockProximal(ahead=ahead)),
        0.1,
        on_record=lambda _me, record, _s: records.append(record),
    )
    begun: list[int] = []
    for _ in range(40):
        clock.play(len(records) // WORKERS + 1)
        version = clock.states[WORKERS]["version"]
        begun += [each["pushes"] - version for each in clock.states[:WORKERS]]
    assert max(begun) <= ahead + 1
    delays = [delay for record in records for delay in record.delays]
    assert min(delays) >= 0
    assert max(delays) <= ahead
    assert (max(delays) > 0) == (ahead > 0)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("back_s", [3.0, 40.3])
def test_a_worker_that_crashed_is_not_waited_for_and_counts_once_it_is_back(ahead, back_s) -> None:
    """One whose part of an iteration is there twice, or that is a block apart, moves the model."""
    clock = clock_of(
        DataParallel(rule=RULE, sync=DelayedBlockProximal(ahead=ahead, blocks=3)),
        0.1,
        faults=[
            Crash(worker=1, at_s=2.5, back_s=back_s),
            Crash(worker=0, at_s=60.1, back_s=60.2, detect_s=0.5),
        ],
    )
    clock.play(30)
    alone = clock.states[WORKERS]["version"]
    assert alone > 15
    clock.play(900)
    assert all(clock.states[WORKERS]["present"].values())
    assert excess(model_of(clock), theirs(), LASSO) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("sync", [DelayedBlockProximal(), DelayedBlockProximal(ahead=2), SSP()])
def test_members_that_are_killed_lose_no_push_and_go_on(sync, tmp_path: Path) -> None:
    with members(DataParallel(rule=ProximalSGD(l1=0.01), sync=sync), 3, tmp_path) as run:
        run.storm(1, 25)
        run.pushed(300)
    whole(tmp_path, 1)


def test_bounds_of_curvature_are_above_it_and_of_the_block_alone() -> None:
    """A bound that is too small lets steps diverge."""
    rng = np.random.default_rng(1)
    rows = shard_of(slice(None), Penalty())
    for start, stop in ((0, D), (3, 7), (5, 6), (4, 4)):
        block = X[:, start:stop]
        for w in rng.normal(size=(3, D)):
            bend = kernels.bends(*rows.given, w)
            hessian = block.T * bend @ block
            least = np.linalg.eigvalsh(np.diag(rows.bounds(start, stop)) - hessian)
            assert (least >= -1e-9).all()
        expected = sharpest(*rows.given[:2]) * (np.abs(block).T @ np.abs(block)).sum(1)
        np.testing.assert_allclose(rows.bounds(start, stop), expected, rtol=1e-12)
