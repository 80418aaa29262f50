"""Microbatches cut along their tokens: a slice goes on while the next one comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import ClassVar

from ..ir import Action, ActionKind
from ..play import Costs
from .kind import Order, Ranks


class TeraPipe(Order):
    """GPipe of token slices, for causal attention: a slice reads those before it."""

    name: ClassVar[str] = "terapipe"
    source: ClassVar[str] = "Li et al. 2021"
    line: ClassVar[str] = "Slices of tokens follow each other: many short passes of one sample."
    bubble: ClassVar[str] = "(p-1)(F+B) of the longest slice"
    peak: ClassVar[str] = "m"

    def __init__(self, slices: int = 4) -> None:
        self.slices = slices

    def cut(self, n_slices: int) -> TeraPipe:
        """The same over so many."""
        return TeraPipe(n_slices)

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """All; in slices slices times as many."""
        return n_microbatches

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """Equations 1 and 4, both ways: all slices, and p - 1 times the longest."""
        forward = sum(costs.forward) - max(costs.forward)
        backward = [sum(each) for each in zip(costs.inputs, costs.weights, strict=True)]
        slices = costs.slices or (1.0,) * self.slices
        ramp_s = (forward + sum(backward) - max(backward)) * max(slices)
        whole_s = (max(costs.forward) + max(backward)) * sum(slices)
        return n_microbatches * whole_s + ramp_s + 2 * (n_ranks - 1) * costs.send

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """All slices forward in order; backward the last slice first."""
        return tuple(
            (*self._passes(rank, "F", n_microbatches), *self._passes(rank, "B", n_microbatches))
            for rank in range(n_ranks)
        )

    def _passes(self, stage: int, kind: ActionKind, n_microbatches: int) -> tuple[Action, ...]:
        pieces = range(self.slices)
        return tuple(
            Action(stage=stage, kind=kind, microbatch=microbatch, token_slice=piece)
            for microbatch in range(n_microbatches)
            for piece in (pieces if kind == "F" else reversed(pieces))
        )


def best_slices(
    latency_s: Callable[[int, int], float], n_tokens: int, n_ranks: int, *, multiple: int = 8
) -> tuple[int, ...]:
    """Tokens of each slice, so that all slices and p - 1 times the longest take least time.

    `latency_s(tokens, context)` is of one stage's pass over a slice behind so many tokens. Slices
    are multiples of `multiple`; the last one also takes what is left of the tokens.

    Source: Li et al. 2021, algorithm 1; without its steps of epsilon between longest slices.
    """
    ends = [0, *range(multiple, n_tokens - multiple + 1, multiple), n_tokens]
    took = cache(lambda start, end: latency_s(ends[end] - ends[start], ends[start]))
    n = len(ends) - 1
    longest = sorted({took(start, end) for end in range(1, n + 1) for start in range(end)})
    least = _shortest(took, n, longest[-1])
    assert least is not None
    best_s, best = float("inf"), (n_tokens,)
    for bound_s in longest:
        if least[0] + (n_ranks - 1) * bound_s >= best_s:
            break
        found = _shortest(took, n, bound_s)
        if found is not None and found[0] + (n_ranks - 1) * bound_s < best_s:
            best_s = found[0] + (n_ranks - 1) * bound_s
            cuts = found[1]
            best = tuple(ends[end] - ends[start] for start, end in pairwise(cuts))
    return best


def _shortest(
    took: Callable[[int, int], float], n: int, bound_s: float
) -> tuple[float, list[int]] | None:
    """Least sum of slices that each take at most the bound, and where they are cut."""
    total_s, cut = [0.0] + [float("inf")] * n, [0] * (n + 1)
    for end in range(1, n + 1):
        for start in range(end):
            each_s = took(start, end)
            if each_s <= bound_s and total_s[start] + each_s < total_s[end]:
                total_s[end], cut[end] = total_s[start] + each_s, start
    if total_s[n] == float("inf"):
        return None
    cuts = [n]
    while cuts[-1]:
        cuts.append(cut[cuts[-1]])
    return total_s[n], cuts[::-1]
