"""Matrices as a product of two thin ones, by one step of power iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ..packet import Like
from .kind import Combining, CompressorKind, State
from .low_rank import LowRank
from .matrices import directions, gains, matrix, orthonormal, product, times, turned_times

if TYPE_CHECKING:
    import torch

    from ..draw import Draw
    from ..effects import Program
    from ..worker import Worker


class PowerSGD(CompressorKind, frozen=True, kw_only=True, tag="PowerSGD", tag_field="kind"):
    """The mean over workers at a low rank: P Q^T, with P orthonormal; both factors add.

    Tensors are matrices of their first dimension by all others. Vectors, and matrices whose
    factors would be no smaller than they are, go dense. Entries that are not finite make the
    whole matrix so, and the next step starts from new directions.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD", algorithm 1; a worker's own share is
    P Q_k^T of its own factor Q_k, as in algorithm 2.
    Differs: P is made orthonormal by Householder reflections instead of Gram-Schmidt, which spans
    the same space. Directions that the last step left at zero are drawn anew.

    Attributes:
        rank: Columns of the factors.
        warm: Whether a step starts from the last one's directions; if not, from drawn ones.
        per: Tensors alone, as a vector of all of them has no rows.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    in_rounds: ClassVar[bool] = True
    rank: Annotated[int, msgspec.Meta(ge=1)] = 2
    warm: bool = True
    per: Literal["tensor"] = "tensor"

    @property
    def apart(self) -> LowRank:
        """The same of one worker's matrix."""
        return LowRank(rank=self.rank, warm=self.warm, dense_below=self.dense_below)

    def init(self, like: Like) -> State:
        """No directions yet."""
        import torch

        if not gains(like.shape, self.rank):
            return {}
        columns = like.n_entries // like.shape[0]
        return {"directions": torch.zeros(columns, self.rank, dtype=getattr(torch, like.dtype))}

    def exchange(
        self,
        xs: Sequence[torch.Tensor],
        states: Sequence[State],
        draws: Sequence[Draw],
        combining: Combining,
        me: Worker,
    ) -> Program[tuple[list[torch.Tensor], list[torch.Tensor], list[State]]]:
        """P of all workers and what goes dense, then Q of all workers."""
        outs, own, after = list(xs), list(xs), [dict(state) for state in states]
        low = [i for i, x in enumerate(xs) if gains(tuple(x.shape), self.rank)]
        plain = [i for i in range(len(xs)) if i not in set(low)]
        matrices = [matrix(xs[i]) for i in low]
        starts = [
            directions(states[i]["directions"], draws[i], warm=self.warm, device=m.device).to(m)
            for i, m in zip(low, matrices, strict=True)
        ]
        lefts = [times(m, q).to(xs[0].dtype) for m, q in zip(matrices, starts, strict=True)]
        first = yield from combining([*lefts, *(xs[i] for i in plain)])
        for i, mean in zip(plain, first[len(low) :], strict=True):
            outs[i] = mean
        if not low:
            return outs, own, after
        bases = [orthonormal(p.to(m)) for p, m in zip(first[: len(low)], matrices, strict=True)]
        rights = [turned_times(m, p).to(xs[0].dtype) for m, p in zip(matrices, bases, strict=True)]
        means = yield from combining(rights)
        for i, p, q, mean in zip(low, bases, rights, means, strict=True):
            outs[i] = product(p, mean.to(p)).to(xs[i].dtype).view(xs[i].shape)
            own[i] = product(p, q.to(p)).to(xs[i].dtype).view(xs[i].shape)
            after[i] = {"directions": mean}
        return outs, own, after
