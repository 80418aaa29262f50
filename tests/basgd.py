"""Algorithms with BASGD, and gradients to play them with: for its tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from polyreme.algo.aggregate.kind import AggregatorKind, Combined, State
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD

NEVER_S = 1e9
"""The longest timeout that there is."""


class Middle(AggregatorKind, frozen=True, kw_only=True, tag="Middle", tag_field="kind"):
    """The middle of each entry; the row farthest from it is a suspect, unless some are absent.

    Counts calls and absent rows.
    """

    robust: ClassVar[bool] = True

    @property
    def bears(self) -> int:
        return 2

    def init(self, like: torch.Tensor) -> State:
        return {"calls": 0, "absent": 0}

    def combine(self, rows: Sequence[torch.Tensor], state: State, absent: int = 0) -> Combined:
        x = torch.stack(list(rows))
        out = x.sort(0).values[len(rows) // 2]
        far = () if absent else (int((x - out).norm(dim=1).argmax()),)
        return out, {"calls": state["calls"] + 1, "absent": state["absent"] + absent}, far


def gradient_of(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def of(sync: Any, **more: Any) -> DataParallel:
    return DataParallel(**{"rule": SGD(weight_decay=0.01), "sync": sync, **more})


def arrivals(seed: int, n: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(n) for _ in range(length)]
