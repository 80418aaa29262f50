"""The mean of the n - f rows that lie closest together."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .robust import RobustKind

if TYPE_CHECKING:
    from .geometry import Array, Points

_MOST_SUBSETS = 10**6


class MinimumDiameterAveraging(
    RobustKind, frozen=True, kw_only=True, tag="MinimumDiameterAveraging", tag_field="kind"
):
    """The mean of the n - f rows whose largest distance from each other is smallest (MDA).

    Of subsets alike it is the first in the order of indices. There may be 10^6 at most.

    Source: Rousseeuw 1985, "Multivariate Estimation with High Breakdown Point"; El Mhamdi et al.
    2021, "Distributed Momentum for Byzantine-resilient Stochastic Gradient Descent".

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    least_rule: ClassVar[str] = "n >= 2 f + 1"

    def too_many(self, n: int, f: int) -> str | None:
        """The rule that n rows of which f are hostile break, before anything is mixed."""
        broken = super().too_many(n, f)
        for each in self.before:
            n = each.rows(n)
        if broken is None and not _few_subsets(n, f):
            return f"{type(self).__name__} takes no more than 10^6 subsets of n - f = {n - f} rows"
        return broken

    exact: ClassVar[bool] = True
    time: ClassVar[str] = "n^2 d + C(n,f)"
    assumes: ClassVar[str] = "f known; few subsets"

    def epsilon(self, n: int) -> float:
        """The least that there is."""
        return self.byzantine / (n - self.byzantine)

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """The same for each row of the subset."""
        import numpy as np

        from .geometry import mean_of

        return mean_of(np.array(_closest(points.squared, f)), points.n)


def _few_subsets(n: int, f: int) -> bool:
    """Whether there are no more than 10^6; of f <= n / 2."""
    found = 1
    for k in range(f):
        found = found * (n - k) // (k + 1)
        if found > _MOST_SUBSETS:
            return False
    return True


def _closest(squared: Array, f: int) -> list[int]:
    """The first n - f rows of the smallest diameter.

    Rows farther apart than a diameter exclude each other; f of them at most are left out.
    """
    import numpy as np

    diameters = np.unique(squared)
    low, high = 0, len(diameters) - 1
    while low < high:
        middle = (low + high) // 2
        if _within(squared, diameters[middle], f) is None:
            low = middle + 1
        else:
            high = middle
    found = _within(squared, diameters[low], f)
    assert found is not None, "all rows are within the largest distance"
    return found


def _within(squared: Array, diameter: float, f: int) -> list[int] | None:
    """The first n - f rows no two of which are farther apart than that, if there are any."""
    import numpy as np

    n = len(squared)
    conflicts = [sum(1 << int(j) for j in np.flatnonzero(row > diameter)) for row in squared]

    def taken(i: int, left_out: int) -> int | None:
        """Rows left out of all, as bits, when those before i are decided."""
        if left_out.bit_count() > f:
            return None
        if i == n:
            return left_out
        if left_out >> i & 1 or not conflicts[i] & ~left_out:
            return taken(i + 1, left_out)
        kept = taken(i + 1, left_out | conflicts[i])
        return taken(i + 1, left_out | 1 << i) if kept is None else kept

    out = taken(0, 0)
    if out is None:
        return None
    rows = [i for i in range(n) if not out >> i & 1]
    return rows[: n - f]
