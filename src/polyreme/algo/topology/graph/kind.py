"""What every gossip graph has: how much a worker takes of each other's model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ....errors import Violation, undefined

if TYPE_CHECKING:
    import torch

_CLOSE = 1e-9


class GraphKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph gives weights W: worker i takes W[i, j] of the model of worker j.

    Rows and columns sum to 1 unless said otherwise, so that the mean of models stays. Between
    neighbours that have d_i and d_j of them the weight is 1 / (1 + max(d_i, d_j)).

    Source: Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square
    deviation" (Metropolis-Hastings weights).
    """

    symmetric: ClassVar[bool] = True
    """Whether W[i, j] is W[j, i]."""

    def period(self, n: int) -> int | None:
        """Steps after which weights come again; 1 if they stay, None if they are drawn."""
        return 1

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """Of whom each worker takes."""
        raise undefined(self, "neighbours")

    def weights(self, n: int, step: int, seed: int = 0) -> torch.Tensor:
        """W of a step, in float64."""
        import torch

        near = self.neighbours(n, step, seed)
        weights = [[0.0] * n for _ in range(n)]
        for i, others in enumerate(near):
            for j in sorted(others):
                weights[i][j] = 1 / (1 + max(len(others), len(near[j])))
            weights[i][i] = 1 - sum(weights[i])
        return torch.tensor(weights, dtype=torch.float64)

    def ever(self, n: int) -> torch.Tensor:
        """Whether worker i takes of j at any step, as booleans."""
        import torch

        period = self.period(n)
        if period is None:
            return torch.ones(n, n, dtype=torch.bool)
        steps = [self.weights(n, step) != 0 for step in range(period)]
        return torch.stack(steps).any(0)

    def spectral_gap(self, n: int) -> float:
        """1 - |lambda_2| of the product over a period: 1 averages at once, 0 never mixes."""
        import torch

        product = torch.eye(n, dtype=torch.float64)
        for step in range(self.period(n) or 1):
            product = self.weights(n, step) @ product
        sizes = torch.linalg.eigvals(product).abs().sort(descending=True).values
        return 1.0 if n == 1 else max(0.0, 1 - float(sizes[1]))

    def refused(self, n: int, *, columns_only: bool = False) -> list[Violation]:
        """Faults of the weights; push-sum wants columns that sum to 1 alone."""
        return []


def shares(graph: GraphKind, n: int, step: int, seed: int) -> torch.Tensor:
    """Weights of a step, which all workers of a process ask for: made once, not to be changed."""
    period = graph.period(n)
    return _shares(graph, n, step if period is None else step % period, seed)


@lru_cache(maxsize=64)
def _shares(graph: GraphKind, n: int, step: int, seed: int) -> torch.Tensor:
    return graph.weights(n, step, seed)


@lru_cache(maxsize=64)
def ever(graph: GraphKind, n: int) -> torch.Tensor:
    """Who takes of whom at any step: made once, not to be changed."""
    return graph.ever(n)


def faults(weights: torch.Tensor, *, columns_only: bool = False) -> list[tuple[str, str]]:
    """What keeps a matrix from mixing models: (rule, legal)."""
    import torch

    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        return [("has entries that are negative or not finite", "entries in [0, 1]")]
    found = []
    for dim, name in ((0, "column"), (1, "row")):
        if dim == 1 and columns_only:
            continue
        sums = weights.sum(dim)
        worst = int((sums - 1).abs().argmax())
        if not math.isclose(float(sums[worst]), 1.0, rel_tol=0, abs_tol=_CLOSE):
            whole = "column stochastic" if columns_only else "doubly stochastic"
            total = float(sums[worst])
            found.append(
                (f"is not {whole}: {name} {worst} sums to {total:.9g}", f"each {name} sums to 1")
            )
    cut = unreached(weights != 0)
    if cut is not None:
        heard, deaf = cut
        found.append(
            (
                f"is not connected: nothing of worker {heard} ever reaches worker {deaf}",
                "weights on a way from every worker to every other",
            )
        )
    elif not found and not _mixes(weights):
        found.append(
            (
                "never mixes: models go round for ever (spectral gap 0)",
                "weights above 0 on the diagonal",
            )
        )
    return found


def unreached(takes: torch.Tensor) -> tuple[int, int] | None:
    """A worker and one that nothing of it reaches, if there are such."""
    import torch

    n = takes.shape[0]
    reach = takes.double() + torch.eye(n, dtype=torch.float64)
    for _ in range(n.bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    lost = (reach == 0).nonzero()
    return None if not len(lost) else (int(lost[0, 1]), int(lost[0, 0]))


def _mixes(weights: torch.Tensor) -> bool:
    import torch

    sizes = torch.linalg.eigvals(weights).abs().sort(descending=True).values
    return len(sizes) == 1 or float(sizes[1]) < 1 - _CLOSE
