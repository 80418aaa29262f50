"""Rows that users give in chunks, held against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import ConfigError, Violation

if TYPE_CHECKING:
    import torch


class Chunks:
    """Chunks that fit together, whenever they are asked for."""

    def __init__(self, chunks: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._chunks = chunks
        self._like: tuple[int, torch.dtype, torch.device] | None = None
        self._d: int | None = None
        if not callable(chunks):
            raise _unfit(type(chunks).__name__, "is no function that gives them")

    def __call__(self) -> Iterator[torch.Tensor]:
        """All of them, detached; raises ConfigError at one that does not fit."""
        import torch

        d, given = 0, self._chunks()
        if not isinstance(given, Iterable):
            raise _unfit(type(given).__name__, "is what the function gives")
        for chunk in given:
            if not isinstance(chunk, torch.Tensor):
                raise _unfit(type(chunk).__name__, "is no tensor")
            said = f"{chunk.dtype} of shape {tuple(chunk.shape)} on {chunk.device}"
            if chunk.ndim != 2 or not len(chunk) or not chunk.is_floating_point():
                raise _unfit(said, "is not entries of rows of real numbers")
            its = len(chunk), chunk.dtype, chunk.device
            n, dtype, device = self._like = self._like or its
            if its != self._like:
                raise _unfit(said, f"is not as the first, {dtype} of {n} rows on {device}")
            d += chunk.shape[1]
            yield chunk.detach()
        if self._like is None:
            raise _unfit(None, "no entries came")
        if self._d not in (None, d):
            raise _unfit(d, f"entries came, and {self._d} the first time")
        self._d = d


def _unfit(value: object, rule: str) -> ConfigError:
    legal = "a function that each time gives tensors (n, k) of floating point from the first on"
    return ConfigError([Violation(path="chunks", value=value, rule=rule, legal=legal)])
