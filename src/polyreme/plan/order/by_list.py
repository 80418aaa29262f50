"""Orders that a list scheduler finds, told apart by where stages lie and what a rank may hold."""

from __future__ import annotations

from typing import ClassVar

from ..play import Costs, play
from .kind import Order, Ranks
from .listed import Pipe, best
from .zero_bubble import ZBH1


class Listed(Order):
    """The shortest that the list scheduler finds under a cap of passes held by a rank."""

    halves: ClassVar[bool] = True
    by_costs: ClassVar[bool] = True

    def ways(self, n_ranks: int) -> tuple[tuple[int, ...], ...]:
        """The rank of each stage, for each direction: here straight on."""
        return (tuple(range(n_ranks)),)

    def cap(self, n_ranks: int) -> float:
        """How many forward passes of one stage a rank holds at most."""
        return n_ranks

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """The best of all tastes."""
        ways = self.ways(n_ranks)
        pipe = Pipe(
            ways=ways,
            n_ranks=n_ranks,
            n_microbatches=n_microbatches,
            costs=costs,
            cap=self.cap(n_ranks),
            halves=self.halves,
        )
        found = best(pipe, lambda ranks: play(ranks, len(ways[0]), costs).makespan_s)
        assert found is not None, "a cap below which nothing goes on"
        return found


class ZBAuto(Listed):
    """Zero bubble under a cap, for stages as they are."""

    name: ClassVar[str] = "zb-auto"
    source: ClassVar[str] = "Qi et al. 2023, automatic schedule"
    line: ClassVar[str] = "Halves of backward passes listed by greed, as unlike stages want it."
    bubble: ClassVar[str] = "at most that of zb-h1"
    peak: ClassVar[str] = "p"

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """The best of all tastes, or the handcrafted one that holds as much."""
        found = (
            super().actions(n_ranks, n_microbatches, costs),
            ZBH1().actions(n_ranks, n_microbatches, costs),
        )
        return min(found, key=lambda ranks: play(ranks, n_ranks, costs).makespan_s)


class ZBV(Listed):
    """Two chunks a rank that lie in a V."""

    name: ClassVar[str] = "zb-v"
    source: ClassVar[str] = "Qi et al. 2023, section 6"
    line: ClassVar[str] = "Two chunks a rank in a V: hardly a bubble with the memory of 1F1B."
    bubble: ClassVar[str] = "0 but for (p-1)F, the way down, if F = I = W"
    peak: ClassVar[str] = "p"
    chunks: ClassVar[int] = 2

    def ways(self, n_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Down the ranks and back up."""
        return ((*range(n_ranks), *reversed(range(n_ranks))),)

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """As in `ways`."""
        return self.ways(n_ranks)[copy][stage]

    def cap(self, n_ranks: int) -> float:
        """Of chunks."""
        return 2 * n_ranks


class _Both(Listed):
    copies: ClassVar[int] = 2

    def ways(self, n_ranks: int) -> tuple[tuple[int, ...], ...]:
        """From either end."""
        return (tuple(range(n_ranks)), tuple(reversed(range(n_ranks))))

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """As in `ways`."""
        return self.ways(n_ranks)[copy][stage]

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """As many microbatches either way, and no rank that holds a stage twice."""
        if n_ranks % 2:
            return f"{n_ranks} ranks are not even"
        return f"{n_microbatches} microbatches are not even" if n_microbatches % 2 else None


class Chimera(_Both):
    """Two pipelines through the same ranks from either end."""

    name: ClassVar[str] = "chimera"
    source: ClassVar[str] = "Li and Hoefler 2021"
    line: ClassVar[str] = "Two copies of each stage, microbatches from either end."
    bubble: ClassVar[str] = "share (p-2)/(2m+p-2) where F = B"
    peak: ClassVar[str] = "p/2 + 1 to p"
    halves: ClassVar[bool] = False


class DualPipe(_Both):
    """Both ends, with halves of backward passes."""

    name: ClassVar[str] = "dualpipe"
    source: ClassVar[str] = "DeepSeek-V3, 2024"
    line: ClassVar[str] = "Two copies of each stage, from either end, weight halves in the gaps."
    bubble: ClassVar[str] = "(p/2-1)(F&B + B - 3W)"
    peak: ClassVar[str] = "p + 1"

    def cap(self, n_ranks: int) -> float:
        """Of both directions."""
        return n_ranks + 1
