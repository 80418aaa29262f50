"""Workers at distances of powers of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ..cost import log2_ceil
from .kind import GraphKind

if TYPE_CHECKING:
    import torch


class Exponential(GraphKind, frozen=True, kw_only=True, tag="Exponential", tag_field="kind"):
    """Each worker takes from those 1, 2, 4, ... before it, in equal parts.

    Source: Assran et al. 2019, "Stochastic Gradient Push", section 3 and appendix A; Ying et al.
    2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training".

    Attributes:
        peers: "all" of them at each step, or "one" after another: for n a power of two, log n
            steps then give the mean exactly.
    """

    symmetric: ClassVar[bool] = False
    peers: Literal["all", "one"] = "one"

    def period(self, n: int) -> int:
        """As many steps as distances, if one after another."""
        return max(1, log2_ceil(n)) if self.peers == "one" else 1

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """All, or the step's one."""
        n_distances = log2_ceil(n)
        if self.peers == "all" or n == 1:
            distances = [1 << power for power in range(n_distances)]
        else:
            distances = [1 << step % n_distances]
        return [{(i - distance) % n for distance in distances} for i in range(n)]

    def weights(self, n: int, step: int, seed: int = 0) -> torch.Tensor:
        """Equal parts of oneself and of each other."""
        import torch

        weights = [[0.0] * n for _ in range(n)]
        for i, others in enumerate(self.neighbours(n, step, seed)):
            for j in (i, *others):
                weights[i][j] = 1 / (1 + len(others))
        return torch.tensor(weights, dtype=torch.float64)
