"""Small linear problems, all syncs of them played on workers, and optima of plain NumPy."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Record
from polyreme.algo.sync import Sync
from polyreme.algo.train import Train
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.convex.task import LinearTask
from polyreme.data.labelled import LabelledSource, Part
from polyreme.data.rows import Rows
from polyreme.graph.linear import linear
from polyreme.graph.options import Linear
from polyreme.runtime.job import Job
from tiny import plan
from workers import World

MEMBERS = tuple(kind for kind in typing.get_args(Sync) if kind.finite_sum)
L2, ELASTIC, L1 = Penalty(l2=0.05), Penalty(l1=0.01, l2=0.02), Penalty(l1=0.01)
GROUPS = Penalty(group_l1=0.01, group_size=3, l2=0.02)
LOGISTIC = Objective(penalty=L2)
SILENT = 4  # a feature that no row has
State = dict[str, Any]


def takes(kind: type, penalty: Penalty) -> bool:
    """Whether a sync is for such a penalty."""
    smooth = not (penalty.l1 or penalty.group_l1)
    return (
        (smooth or not kind.smooth)
        and bool(penalty.l2 or not kind.strongly)
        and not (kind.by_feature and penalty.group_l1)
    )


@dataclass(frozen=True)
class Problem:
    """Rows [N, D] and labels of -1 and 1, or numbers; some rows are empty, a feature is silent."""

    objective: Objective = LOGISTIC
    n: int = 120
    n_features: int = 11
    seed: int = 0
    sort: bool = False  # by label, so that workers have one class each

    @cached_property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        shape = (self.n, self.n_features)
        x = rng.normal(size=shape) * (rng.random(shape) < 0.4)
        x[:, SILENT] = 0.0
        x[:: self.n // 6] = 0.0
        y = x @ rng.normal(size=self.n_features) + rng.normal(size=self.n)
        if self.objective.classifies:
            y = np.where(y > 0, 1.0, -1.0)
        order = np.argsort(y, kind="stable") if self.sort else np.arange(self.n)
        return x[order], y[order]

    @cached_property
    def best(self) -> np.ndarray:
        """The optimum [D]: accelerated proximal gradient steps on dense rows, until they rest."""
        x, y = self.data
        penalty, n = self.objective.penalty, self.n
        sharp = {"logistic": 0.25, "squared_hinge": 2.0, "hinge": 2.0, "squared": 1.0}
        bound = sharp[self.objective.loss] * np.linalg.norm(x, 2) ** 2 / n
        w, u, t = np.zeros(self.n_features), np.zeros(self.n_features), 1.0
        for _ in range(200_000):
            after = prox(u - x.T @ slopes(self.objective, x @ u, y) / n / bound, 1 / bound, penalty)
            if np.abs(after - w).max() < 1e-15 and np.abs(after - u).max() < 1e-15:
                break
            if (u - after) @ (after - w) > 0:
                t = 1.0
            longer = (1 + np.sqrt(1 + 4 * t * t)) / 2
            w, u, t = after, after + (t - 1) / longer * (after - w), longer
        return w

    def value(self, w: np.ndarray) -> float:
        """P(w)."""
        x, y = self.data
        shard = Shard(objective=self.objective, rows=Rows.of(x), y=y)
        return shard.loss(w) / self.n + self.objective.penalty.value(w)

    def team(self, n: int, seed: int = 0) -> list[Worker]:
        """Workers with rows that follow each other."""
        x, y = self.data
        rows, layout = Rows.of(x), Layout.of({"w": (self.n_features,)})
        return [
            Worker(
                rank=rank,
                n=n,
                layout=layout,
                seed=seed,
                lr=lambda _: 0.1,
                task=LinearTask(
                    shard=Shard(objective=self.objective, rows=rows.take(part), y=y[part]),
                    batch=16,
                ),
            )
            for rank, part in enumerate(np.array_split(np.arange(self.n), n))
        ]


def prox(w: np.ndarray, eta: float, penalty: Penalty) -> np.ndarray:
    """Of the penalty, group by group in a loop."""
    u = np.sign(w) * np.maximum(np.abs(w) - eta * penalty.l1, 0)
    for start in range(0, len(w), penalty.group_size if penalty.group_l1 else len(w)):
        part = slice(start, start + penalty.group_size if penalty.group_l1 else len(w))
        norm = np.linalg.norm(u[part])
        u[part] *= max(0.0, 1 - eta * penalty.group_l1 / norm) if norm else 0.0
    return u / (1 + eta * penalty.l2)


def slopes(objective: Objective, p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Derivatives of each row's loss by its prediction."""
    match objective.loss:
        case "logistic":
            return -y / (1 + np.exp(y * p))
        case "squared_hinge":
            return -2 * y * np.maximum(0, 1 - y * p)
        case "hinge":
            return -y * np.clip((1 - y * p) / objective.gamma, 0, 1)
    return p - y


@dataclass
class Run:
    """A sync's rounds, on workers without a clock."""

    sync: Any
    team: Sequence[Worker]
    states: list[State] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.algorithm = DataParallel(sync=self.sync)
        start = torch.zeros(self.team[0].layout.n_entries, dtype=torch.float64)
        self.states = self.states or [
            self.sync.init(self.algorithm, start.clone(), me) for me in self.team
        ]

    def round(self) -> np.ndarray:
        """One round; the model after it, which all have."""
        world = World(n=len(self.team))
        self.states = world.run(
            [
                self.sync.round(self.algorithm, state, me)
                for state, me in zip(self.states, self.team, strict=True)
            ]
        )
        self.records += world.records[:1]
        self.nbytes += world.nbytes[0]
        first = self.states[0]["params"]
        assert all(torch.equal(first, state["params"]) for state in self.states)
        return first.numpy()

    def until(self, done: Callable[[np.ndarray], bool], most: int) -> int:
        """Rounds until something is so; -1 if it never is."""
        return next((number for number in range(1, most + 1) if done(self.round())), -1)


@dataclass(frozen=True)
class Case:
    """A job that processes and the clock make for themselves."""

    sync: Any
    n: int
    problem: Problem = Problem()
    steps: int = 5
    gap: float | None = None

    def more(self, **changed: Any) -> Case:
        return replace(self, **changed)

    def job(self) -> Job:
        x, y = self.problem.data
        penalty = self.problem.objective.penalty
        part = Part(
            read=lambda which: x[which].astype(np.float32), classes=(y > 0).astype(np.int64)
        )
        source = LabelledSource(
            part,
            part.take(np.arange(8)),
            field="features",
            shape=(x.shape[1],),
            n_classes=2,
            fingerprint="small",
        )
        model = msgspec.convert(
            {
                "kind": "linear",
                "l1": penalty.l1,
                "l2": penalty.l2,
            },
            Linear,
        )
        graph = linear(model, source.sample)
        batch = 4 * self.n
        return Job(
            graph=graph,
            plan=plan(graph, replica=self.n, precision="fp64", global_batch=batch),
            source=source,
            train=Train(global_batch=batch, steps=self.steps, gap=self.gap),
            algorithm=DataParallel(sync=self.sync),
            general=True,
            objective=self.problem.objective,
        )


def form(state: State) -> dict[str, object]:
    """What each entry is: shape and type of tensors."""
    return {
        key: (value.shape, value.dtype) if torch.is_tensor(value) else type(value)
        for key, value in state.items()
    }


def folder(path: Path, name: str) -> Path:
    """A new one."""
    found = path / name
    found.mkdir()
    return found
