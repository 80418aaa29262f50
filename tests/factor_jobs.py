"""Jobs of models that see the whole sum, from a spec's own parts, for both clocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from both_clocks import on_the_clock
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync.kind import SyncKind
from polyreme.algo.train import Train
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.convex.factor_task import Factorization
from polyreme.convex.pca_task import Components
from polyreme.data.options import Ratings
from polyreme.graph.options import PCA, MatrixFactorization
from polyreme.runtime import loop, mesh
from polyreme.runtime.job import Job
from tiny import plan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FactorCase:
    """A model, its data and objective, and who trains it; sent to processes as it is."""

    model: Any
    data: Any
    objective: Any
    algorithm: DataParallel
    n: int
    steps: int

    @staticmethod
    def ratings(
        path: Path,
        *,
        rank: int,
        l2: float,
        sync: SyncKind,
        n: int,
        steps: int,
        lr: float = 0.1,
        negatives: int = 0,
    ) -> FactorCase:
        """A matrix factorisation of a file's pairs."""
        return FactorCase(
            model=MatrixFactorization(rank=rank, l2=l2),
            data=Ratings(path=str(path), negatives=negatives),
            objective=Factorization(rank=rank, l2=l2),
            algorithm=DataParallel(rule=SGD(lr=lr), sync=sync),
            n=n,
            steps=steps,
        )

    @staticmethod
    def pca(
        data: Any,
        *,
        k: int,
        sync: SyncKind,
        n: int,
        steps: int,
        lr: float = 0.1,
        center: bool = False,
    ) -> FactorCase:
        """Leading directions of the data's features."""
        return FactorCase(
            model=PCA(components=k, center=center),
            data=data,
            objective=Components(components=k, center=center),
            algorithm=DataParallel(rule=SGD(lr=lr), sync=sync),
            n=n,
            steps=steps,
        )

    @staticmethod
    def still(case: FactorCase) -> FactorCase:
        """The same for one step that leads nowhere."""
        return replace(case, algorithm=DataParallel(rule=SGD(lr=1e-12)), steps=1)

    def job(self) -> Job:
        source = self.data.open(None, 0)
        graph = self.model.graph(source.sample)
        return Job(
            graph=graph,
            plan=plan(graph, replica=self.n, global_batch=8 * self.n),
            source=source,
            train=Train(global_batch=8 * self.n, steps=self.steps, precision="fp64"),
            algorithm=self.algorithm,
            general=True,
            objective=self.objective,
        )


def virtually(case: FactorCase) -> dict[str, torch.Tensor]:
    """What the parameters are after the run, on the virtual clock."""
    with mesh.watched(HostAccelerator(), 0.0, [0]) as world:
        return on_the_clock(world, case, case.n)[0]


def solved(case: FactorCase) -> dict[str, float]:
    """The metrics at the end of the run, on the virtual clock."""
    from polyreme.api.virtual import Virtual
    from polyreme.sim.options import Simulate

    def make_route(*args: Any, **more: Any) -> Virtual:
        return Virtual(Simulate(workers=case.n), *args, **more)

    with mesh.watched(HostAccelerator(), 0.0, [0]) as world:
        return dict(loop.train(case.job(), world, make_route=make_route).metrics)


def pairs_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a file that are trained on, and their values."""
    with np.load(path) as packed:
        return packed["train"], packed["train_values"]
