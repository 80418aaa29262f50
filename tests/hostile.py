"""Workers of which some are hostile, on the virtual clock, and what their aggregate is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from polyreme.algo.aggregate.kind import AggregatorKind, Combined, State
from polyreme.algo.attack import Attack
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, Record, Split, SumShards
from polyreme.algo.rule import SGD
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.sim.driver import Simulation

N, D = 6, 4
SEEN: list[np.ndarray] = []
"""Rows of every aggregate that was made, in order, with those of trials."""


class Middle(AggregatorKind, frozen=True, kw_only=True, tag="Middle", tag_field="kind"):
    """The row in the middle by its finite sum over all shards; those set aside are suspects."""

    robust: ClassVar[bool] = True

    @property
    def bears(self) -> int:
        return 3

    def combine(
        self, rows: Sequence[torch.Tensor], state: State, absent: int = 0
    ) -> Split[Combined]:
        del absent
        SEEN.append(torch.stack(list(rows)).numpy())
        sums = yield SumShards(partial=torch.stack([row.sum() for row in rows]))
        finite = [row for row in sums.argsort().tolist() if torch.isfinite(sums[row])]
        aside = tuple(row for row in range(len(rows)) if row not in finite)
        return rows[finite[len(finite) // 2]].clone(), state, aside


def vectors(step: int) -> np.ndarray:
    """The gradients of all workers in a step: one row each."""
    return np.random.default_rng(step).normal(size=(N, D)).astype(np.float32) + 1


def played(
    attack: Sequence[Attack],
    *,
    steps: int = 1,
    given: Callable[[int], np.ndarray] = vectors,
    **members: Any,
) -> tuple[list[dict[str, Any]], list[Record]]:
    """States of all workers after these steps, and what the first recorded."""
    algorithm = DataParallel(**{"rule": SGD(lr=1.0), "aggregate": Middle(), **members})
    SEEN.clear()
    layout = Layout.of({"w": (D,)})
    team = [
        Worker(rank=rank, n=N, layout=layout, seed=3, lr=lambda _: 1.0, attack=tuple(attack))
        for rank in range(N)
    ]
    states = [algorithm.sync.init(algorithm, torch.zeros(D), me) for me in team]
    records: list[Record] = []

    def gradient(rank: int, params: torch.Tensor, batch: int) -> Computed:
        del params
        found = torch.from_numpy(given(batch)[rank].copy())
        return Computed(gradient=found, loss=1.0, weight=1.0, n_samples=1)

    def first(me: Worker, record: Record, now_s: float) -> None:
        del now_s
        if me.rank == 0:
            records.append(record)

    simulation = Simulation(algorithm, team, states, gradient, on_record=first)
    simulation.play(steps)
    return simulation.states, records


def of(rows: np.ndarray, hostile: Mapping[int, np.ndarray]) -> np.ndarray:
    """Rows with others in the place of some."""
    found = rows.copy()
    for rank, row in hostile.items():
        found[rank] = row
    return found
