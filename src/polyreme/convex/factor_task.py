"""Pairs of users and items as algorithms ask for them: vectors of torch, over the same memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..algo.task import Steps
from ..data.source import Source
from . import factors
from .factors import Block, joined
from .problem import Certificate
from .sums import Unbounded
from .task import Here


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """The objective of a matrix factorisation, see `factors`."""

    rank: int
    l2: float = 0.0

    @property
    def figures(self) -> tuple[str, ...]:
        """What an evaluation tells of a certificate."""
        return ("objective", "gradient")

    def samples(self, source: Source) -> FactorSamples:
        """All training pairs."""
        fields = source.train(np.arange(source.n_train))
        users, items, y = (fields[name].numpy() for name in ("users", "items", "labels"))
        n_users = source.sample.numbered["users"]
        block = Block(users=users, items=items, y=y, n_users=n_users, rank=self.rank)
        return FactorSamples(objective=self, block=block)


@dataclass(frozen=True, kw_only=True)
class FactorSamples:
    """See `sums.Samples`."""

    objective: Factorization
    block: Block

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """None."""
        return {}

    def task(self, which: np.ndarray, batch: int) -> FactorTask:
        """Of these pairs."""
        return FactorTask(objective=self.objective, block=self.block.take(which), batch=batch)

    def gradient(self, which: np.ndarray, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """With that of l2; zero of no pair."""
        here, n = self.task(which, 1).at(w), len(which)
        if n:
            here.gradient.div_(n).add_(w, alpha=self.objective.l2)
        return here.gradient, here.loss


@dataclass(frozen=True, kw_only=True)
class FactorTask(Unbounded):
    """See `algo.task.Sum`. `batch` are the pairs of one of the worker's batches."""

    objective: Factorization
    block: Block
    batch: int

    @property
    def n_own(self) -> int:
        """Pairs of this worker."""
        return len(self.block)

    @property
    def l2(self) -> float:
        """Weight of |w|^2 / 2."""
        return self.objective.l2

    def batches(self, n_samples: int) -> float:
        """Of so many pairs."""
        return n_samples / self.batch

    def at(self, w: torch.Tensor) -> Here:
        """One pass over the pairs."""
        du, dv, slopes, loss = factors.gradient(*self.block.given, *self.block.parts(w.numpy()))
        gradient = torch.from_numpy(joined((du, dv)))
        return Here(gradient=gradient, slopes=torch.from_numpy(slopes), loss=float(loss))

    def loss(self, w: torch.Tensor) -> float:
        """One pass over the pairs."""
        return float(factors.losses(*self.block.given, *self.block.parts(w.numpy())))

    def prox(self, w: torch.Tensor, eta: float) -> torch.Tensor:
        """Of l2: smaller by a factor."""
        return w / (1.0 + eta * self.l2)

    def nearest(self, w: torch.Tensor) -> torch.Tensor:
        """All models are allowed."""
        return w

    def certificate(
        self, w: torch.Tensor, z: torch.Tensor, mean_loss: float, conjugates: float
    ) -> Certificate:
        """The gradient's largest entry; it is 0 at the saddle at 0 too."""
        whole = z + self.l2 * w
        objective = mean_loss + self.l2 / 2 * float(w @ w)
        return Certificate(objective=objective, gap=math.inf, gradient=float(whole.abs().max()))

    def steps(self, asked: Steps) -> torch.Tensor:
        """Pairs are drawn with replacement."""
        if not self.n_own:
            return asked.start
        order = np.random.default_rng(asked.seed).integers(0, self.n_own, asked.n)
        anchor = asked.start if asked.anchor is None else asked.anchor
        found = self.block.walked(
            asked.start.numpy(),
            anchor.numpy(),
            asked.slopes.numpy(),
            asked.b.numpy(),
            order,
            asked.eta,
            mu=asked.mu,
            l2=self.l2 if asked.exact else 0.0,
            mean=asked.mean,
        )
        return torch.from_numpy(found)

    def penalty(self, w: torch.Tensor) -> float:
        """Of l2."""
        return self.l2 / 2 * float(w @ w)

    def few(self, n: int, *, heavier: float = 1.0) -> FactorTask:
        """Those where steps are least stable."""
        objective = replace(self.objective, l2=heavier * self.l2)
        return FactorTask(objective=objective, block=self.block.busiest(n), batch=self.batch)

    def smoothness(self, w: torch.Tensor) -> float:
        """See `factors.curvature`."""
        return float(factors.curvature(*self.block.given, *self.block.parts(w.numpy())))
