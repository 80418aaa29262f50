"""A worker's rows as algorithms ask for them: vectors of torch, over the same memory."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..algo.task import DualSteps, Steps
from . import choice, columns, dual, mixtures, passes, steps
from .loss import sharpest
from .problem import Certificate, certificate
from .shard import Shard


@dataclass(frozen=True, kw_only=True)
class Here:
    """At a model: the gradient [D] of the summed loss, each row's slope [N], the summed loss."""

    gradient: torch.Tensor
    slopes: torch.Tensor
    loss: float


@dataclass(frozen=True, kw_only=True)
class LinearTask:
    """See `algo.task.Task`. `batch` are the rows of one of the worker's batches."""

    shard: Shard
    batch: int

    @property
    def n_own(self) -> int:
        """Rows of this worker."""
        return len(self.shard)

    @property
    def l1(self) -> float:
        """Weight of |w|_1."""
        return self.shard.objective.penalty.l1

    @property
    def l2(self) -> float:
        """Weight of |w|^2 / 2."""
        return self.shard.objective.penalty.l2

    def batches(self, n_samples: int) -> float:
        """Of so many rows."""
        return n_samples / self.batch

    def at(self, w: torch.Tensor) -> Here:
        """One pass over the rows."""
        found = self.shard.at(w.numpy())
        gradient, slopes = torch.from_numpy(found.gradient), torch.from_numpy(found.slopes)
        return Here(gradient=gradient, slopes=slopes, loss=found.loss)

    def curvature(self) -> float:
        """See `choice.smoothness`."""
        return choice.smoothness(self.shard)

    def bounds(self, start: int, stop: int) -> torch.Tensor:
        """See `Shard.bounds`; found once."""
        held = self.__dict__.setdefault("_bounds", {})
        if (start, stop) not in held:
            held[start, stop] = torch.from_numpy(self.shard.bounds(start, stop))
        found: torch.Tensor = held[start, stop]
        return found

    def loss(self, w: torch.Tensor) -> float:
        """One pass over the rows."""
        return self.shard.loss(w.numpy())

    def conjugates(self, slopes: torch.Tensor, c: float) -> float:
        """The summed conjugates at c times the slopes."""
        return self.shard.conjugates(slopes.numpy(), c)

    def penalty(self, w: torch.Tensor) -> float:
        """R there."""
        return self.shard.objective.penalty.value(w.numpy())

    def penalty_conjugate(self, g: torch.Tensor) -> float:
        """See `Penalty.conjugate`."""
        return self.shard.objective.penalty.conjugate(g.numpy())

    def shrink(self, z: torch.Tensor) -> float:
        """See `Penalty.shrink`."""
        return self.shard.objective.penalty.shrink(z.numpy())

    @property
    def shrinks(self) -> bool:
        """Where there is a penalty, and no l2."""
        penalty = self.shard.objective.penalty
        return penalty.bounds and not penalty.l2

    @property
    def number(self) -> int:
        """Of all that is minimised, in 32 bits; found once."""
        held = self.__dict__.setdefault("_number", [])
        if not held:
            rows, found = self.shard.rows, zlib.crc32(repr(self.shard.objective).encode())
            for each in (rows.indptr, rows.indices, rows.values, self.shard.y):
                found = zlib.crc32(np.ascontiguousarray(each).data, found)
            held.append(found)
        number: int = held[0]
        return number

    def mixtures(self, w: torch.Tensor, z: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """See `mixtures.mixtures`."""
        penalty = self.shard.objective.penalty
        given = w.numpy(), z.numpy(), earlier.numpy()
        return torch.from_numpy(mixtures.mixtures(penalty, *given))

    def prox(self, w: torch.Tensor, eta: float) -> torch.Tensor:
        """See `Penalty.prox`."""
        return torch.from_numpy(self.shard.objective.penalty.prox(w.numpy(), eta))

    def nearest(self, w: torch.Tensor) -> torch.Tensor:
        """All models are allowed."""
        return w

    def certificate(
        self, w: torch.Tensor, z: torch.Tensor, mean_loss: float, conjugates: float
    ) -> Certificate:
        """See `problem.certificate`."""
        return certificate(self.shard.objective, w.numpy(), z.numpy(), mean_loss, conjugates)

    def steps(self, asked: Steps) -> torch.Tensor:
        """Rows are drawn with replacement."""
        if not self.n_own:
            return asked.start
        order = np.random.default_rng(asked.seed).integers(0, self.n_own, asked.n)
        return torch.from_numpy(
            steps.walked(
                self.shard,
                asked.start.numpy(),
                asked.slopes.numpy(),
                asked.b.numpy(),
                order,
                asked.eta,
                mu=asked.mu,
                exact=asked.exact,
                mean=asked.mean,
            )
        )

    def few(self, n: int, *, heavier: float = 1.0) -> LinearTask:
        """Evenly spread."""
        some = self.shard.some(n)
        objective = replace(some.objective, penalty=some.objective.penalty.times(heavier))
        return LinearTask(shard=replace(some, objective=objective), batch=self.batch)

    def smoothness(self, w: torch.Tensor) -> float:
        """See `choice.smoothness`."""
        return choice.smoothness(self.shard)

    def dual_steps(self, asked: DualSteps) -> tuple[torch.Tensor, torch.Tensor]:
        """Each pass goes over all rows once, in an order of its own."""
        draw, n = np.random.default_rng(asked.seed), self.n_own
        passes = [draw.permutation(n) for _ in range(-(-asked.n // max(1, n)))]
        order = np.concatenate([np.zeros(0, np.int64), *passes])[: asked.n]
        after, change = dual.climbed(
            self.shard, asked.dual.numpy(), asked.v.numpy(), order, asked.n_all, asked.sigma
        )
        return torch.from_numpy(after), torch.from_numpy(change)

    def margins(self, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """One pass for each."""
        rows = self.shard.rows
        found = passes.predictions(rows.indptr, rows.indices, rows.values, w.numpy())
        return torch.from_numpy(found), self.loss(w)

    def partial(self, margins: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `columns.gradient`."""
        given = (*self.shard.by_feature, margins.numpy(), features.numpy())
        return torch.from_numpy(columns.gradient(*given))

    def shifted(
        self, margins: torch.Tensor, features: torch.Tensor, change: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """See `columns.moved`."""
        given = (*self.shard.by_feature, margins.numpy(), features.numpy(), change.numpy())
        after, loss = columns.moved(*given)
        return torch.from_numpy(after), float(loss)

    def n_touched(self, features: torch.Tensor) -> int:
        """Rounded up."""
        counts = np.diff(self.shard.columns[0])[features.numpy()]
        return -(-self.n_own * int(counts.sum()) // max(1, self.shard.rows.n_stored))

    def curvatures(self, block: torch.Tensor) -> torch.Tensor:
        """See `columns.curvatures`."""
        code, gamma, indptr, indices, values, _ = self.shard.given
        found = columns.curvatures(indptr, indices, values, block.numpy())
        return torch.from_numpy(found * sharpest(code, gamma))

    def meetings(self, block: torch.Tensor, n_blocks: int) -> torch.Tensor:
        """See `columns.meetings`."""
        _, _, indptr, indices, _, _ = self.shard.given
        found = columns.meetings(indptr, indices, block.numpy(), n_blocks)
        return torch.from_numpy(np.packbits(found))
