"""1F1B over several chunks a rank, which lie round the ranks: shorter stages, smaller bubble."""

from __future__ import annotations

from typing import ClassVar

from ..ir import Action, ActionKind
from ..play import Costs
from .kind import Order, Ranks


class Interleaved(Order):
    """1F1B over two chunks a rank."""

    name: ClassVar[str] = "interleaved"
    source: ClassVar[str] = "Megatron-LM, Narayanan et al. 2021"
    line: ClassVar[str] = "1F1B over v chunks a rank: a bubble v times smaller, more messages."
    bubble: ClassVar[str] = "(p-1)(F+B)/v"
    peak: ClassVar[str] = "p + (p-1)/v microbatches of a rank"

    def __init__(self, chunks: int = 2) -> None:
        self.chunks = chunks  # type: ignore[misc]

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """Rounds of p microbatches go through a chunk before the next."""
        if n_microbatches % n_ranks:
            return f"{n_microbatches} microbatches are not rounds of {n_ranks}"
        return None

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """Of the chunk: what has gone forward before the first of a round goes backward."""
        chunk, rank = divmod(stage, n_ranks)
        of_round = n_ranks * self.chunks
        ahead = 2 * (n_ranks - 1 - rank) + (self.chunks - 1) * n_ranks + 1
        rounds, place = divmod((self.chunks - 1 - chunk) * n_ranks + ahead, of_round)
        held = rounds * n_ranks + min(max(place - chunk * n_ranks, 0), n_ranks)
        return min(held, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """(m v + p - 1)(F + B) of passes of one chunk."""
        stages_s = [
            sum(each) for each in zip(costs.forward, costs.inputs, costs.weights, strict=True)
        ]
        ranks_s = [sum(stages_s[rank::n_ranks]) for rank in range(n_ranks)]
        return n_microbatches * max(ranks_s) + (sum(ranks_s) - max(ranks_s)) / self.chunks

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Warm-up of 2 (p - 1 - rank) + (v - 1) p passes, then turns."""
        total = n_microbatches * self.chunks
        found = []
        for rank in range(n_ranks):
            ahead = min(2 * (n_ranks - 1 - rank) + (self.chunks - 1) * n_ranks, total)
            own = [self._pass("F", number, rank, n_ranks) for number in range(ahead)]
            for number in range(total):
                if ahead + number < total:
                    own.append(self._pass("F", ahead + number, rank, n_ranks))
                own.append(self._pass("B", number, rank, n_ranks))
            found.append(tuple(own))
        return tuple(found)

    def _pass(self, kind: ActionKind, number: int, rank: int, n_ranks: int) -> Action:
        """The pass of that number on a rank: p microbatches a chunk, chunk by chunk."""
        rounds, place = divmod(number, n_ranks * self.chunks)
        chunk, microbatch = divmod(place, n_ranks)
        if kind == "B":
            chunk = self.chunks - 1 - chunk
        return Action(
            stage=chunk * n_ranks + rank, kind=kind, microbatch=rounds * n_ranks + microbatch
        )
