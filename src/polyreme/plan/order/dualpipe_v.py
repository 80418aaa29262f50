"""DualPipe cut in half: the way back of a microbatch takes the place of the other direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from ..ir import Action, ActionKind
from ..play import Costs
from .kind import Order, Ranks


class DualPipeV(Order):
    """Two chunks a rank in a V, passes of both in turn."""

    name: ClassVar[str] = "dualpipe-v"
    source: ClassVar[str] = "DeepSeek, DualPipe, cut-in-half schedule, 2025"
    line: ClassVar[str] = (
        "DualPipe folded into a V: passes forward and backward in pairs, one copy."
    )
    bubble: ClassVar[str] = "(p-1)(F&B + B - 3W) of chunks"
    peak: ClassVar[str] = "p + 1/2"
    chunks: ClassVar[int] = 2

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """Down the ranks and back up."""
        return min(stage, 2 * n_ranks - 1 - stage)

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """The two ways meet only if there are enough of them."""
        if n_microbatches < 2 * n_ranks:
            return f"{n_microbatches} microbatches are fewer than 2 x {n_ranks}"
        return None

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """The eight steps of the source."""
        return tuple(
            tuple(_numbered(rank, n_ranks, _steps(rank, n_ranks, n_microbatches)))
            for rank in range(n_ranks)
        )


def _steps(rank: int, p: int, m: int) -> Iterator[str]:
    """Kind and chunk of one rank's passes; W takes the oldest weight half that waits."""
    after = p - rank - 1
    yield from ("F0",) * 2 * after
    yield from ("F0", "F1") * (rank + 1)
    yield from ("I1", "W", "F1") * after
    yield from ("F0", "B1", "F1", "B0") * (m - 2 * p + rank + 1)
    yield from ("B1", "F1", "B0") * after
    whole = rank + 1  # of the last 2 (rank + 1) passes of both chunks: B; then I, its W kept back
    yield from (("B1", "B0") * (rank + 1))[:whole]
    yield from (("I1", "I0") * (rank + 1))[whole:]
    yield from ("W", "I0") * after
    yield from ("W",) * (rank + 1)


def _numbered(rank: int, p: int, steps: Iterator[str]) -> Iterator[Action]:
    """Microbatches in turn, for each chunk and each way."""
    stage = (rank, 2 * p - 1 - rank)
    done = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}
    kept: deque[Action] = deque()
    for step in steps:
        if step == "W":
            yield msgspec.structs.replace(kept.popleft(), kind="W")
            continue
        kind: ActionKind = "F" if step[0] == "F" else "B" if step[0] == "B" else "I"
        way = ("F" if kind == "F" else "B") + step[1]
        action = Action(stage=stage[int(step[1])], kind=kind, microbatch=done[way])
        done[way] += 1
        if kind == "I":
            kept.append(action)
        yield action
