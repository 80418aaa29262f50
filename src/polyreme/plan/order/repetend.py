"""A repetend: blocks of several microbatches that ranks play again and again.

Times are whole units. A window of a rank holds F, I and W once. It begins with F; I and W in it are
of microbatches that went forward `lag` windows before. What comes before the first window of a rank
is its warm-up, what comes after the last its cool-down.

Source: Lin et al., Tessel, HPCA 2024, section 4. Differs: F of one microbatch is in the same window
on all ranks, and windows of unlike ranks begin at unlike times, which loses no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import msgspec

from ..ir import ActionKind

KINDS: tuple[ActionKind, ...] = ("F", "I", "W")
Lane = tuple[ActionKind, int]  # kind, stage


class Block(NamedTuple):
    """A pass of a stage over a microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Units, at least 1, that F, I and W of each stage take, and units of a message.

    Stage s lies on rank s.
    """

    forward: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    send: int = 0

    @property
    def n_ranks(self) -> int:
        """As many as stages."""
        return len(self.forward)

    def of(self, lane: Lane) -> int:
        """Units of one block."""
        kind, stage = lane
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[kind][stage]

    @property
    def busy(self) -> tuple[int, ...]:
        """Units of each rank for one microbatch; no period is shorter than the largest."""
        return tuple(map(sum, zip(self.forward, self.inputs, self.weights, strict=True)))

    @property
    def heads(self) -> tuple[int, ...]:
        """When the first microbatch can be at each rank."""
        return tuple(sum(self.forward[:rank]) + rank * self.send for rank in range(self.n_ranks))

    def bound(self, n_microbatches: int) -> int:
        """No order of so many microbatches ends before."""
        way = sum(self.forward) + sum(self.inputs) + self.weights[0]
        way += 2 * (self.n_ranks - 1) * self.send
        full = zip(self.heads, self.busy, strict=True)
        return max(way, *(head + n_microbatches * busy for head, busy in full))


class Repetend(msgspec.Struct, frozen=True, kw_only=True):
    """`span` microbatches take part in a window, `period` units pass to the next.

    Attributes:
        starts: When each block of a window starts, from the first window's start on rank 0.
        lags: By how many windows it is behind F of its microbatch.
        before: Blocks of the warm-up in the order of their starts.
        after: Those of the cool-down, as if there were one window: span microbatches.
        units: From the start of the warm-up to the end of the cool-down if there is one window.
    """

    span: int
    period: int
    starts: Mapping[Lane, int]
    lags: Mapping[Lane, int]
    before: tuple[Block, ...] = ()
    after: tuple[Block, ...] = ()
    units: int = 0

    def ranks(self, n_ranks: int, n_microbatches: int) -> list[list[Block]]:
        """Blocks of each rank in turn, for at least `span` microbatches."""
        windows = n_microbatches - self.span + 1
        assert windows > 0, "no microbatch for each block of a window"
        found: list[list[Block]] = [[] for _ in range(n_ranks)]
        for block in self.before:
            found[block.stage].append(block)
        for stage, own in enumerate(found):
            lanes = sorted(((kind, stage) for kind in KINDS), key=lambda lane: self.starts[lane])
            for window, (kind, _) in product(range(windows), lanes):
                newest = window + self.span - 1
                own.append(Block(kind, stage, newest - self.lags[kind, stage]))
        for block in self.after:
            later = block._replace(microbatch=block.microbatch + windows - 1)
            found[block.stage].append(later)
        return found


def needs(work: Work, block: Block) -> Iterator[tuple[Block, int]]:
    """Blocks that end before one starts, and how long before."""
    kind, stage, microbatch = block
    if kind == "F" and stage:
        yield Block("F", stage - 1, microbatch), work.send
    elif kind == "I":
        yield Block("F", stage, microbatch), 0
        if stage + 1 < work.n_ranks:
            yield Block("I", stage + 1, microbatch), work.send
    elif kind == "W":
        yield Block("I", stage, microbatch), 0
