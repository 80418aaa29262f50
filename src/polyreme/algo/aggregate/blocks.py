"""Rows of vectors, a block of entries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Chunks = Callable[[], Iterable[torch.Tensor]]

_SMALLEST = 1 << 16
_LARGEST = {"cpu": 1 << 21}  # entries: beyond the cache they cost twice the time
_LARGEST_ELSEWHERE = 1 << 27
_FEW = 16  # one row of so many is little


@dataclass(frozen=True, kw_only=True)
class Rows:
    """n vectors of d entries, or those of them that `indices` name.

    They are a tensor (n, d), vectors wherever they lie, or a function that gives chunks (n, k)
    from the first to the last, each time that it is called.
    """

    given: torch.Tensor | Sequence[torch.Tensor] | Chunks
    like: torch.Tensor
    indices: tuple[int, ...]
    n_given: int

    @staticmethod
    def of(given: torch.Tensor | Sequence[torch.Tensor] | Chunks) -> Rows:
        """All of them."""
        block = next(iter(given())) if callable(given) else given
        n = len(block)
        return Rows(given=given, like=block[0], indices=tuple(range(n)), n_given=n)

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.indices)

    def taken(self, places: Sequence[int]) -> Rows:
        """Those at these places."""
        return replace(self, indices=tuple(self.indices[place] for place in places))

    def blocks(self, *, at_once: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each block of entries starts, and the rows' entries, (n, k); not to be written to.

        What is made of a block is small beside all rows. With `at_once`, for what reads a block
        and makes nothing of its size, it is all there is, if that need not be copied or is little.
        """
        import torch

        few = self.n * _FEW <= self.n_given
        if not callable(self.given):
            at_once = at_once and (few or (isinstance(self.given, torch.Tensor) and self._all))
            for start, stop in self._spans(self.like.numel(), at_once=at_once):
                yield start, self._block(self.given, start, stop)
            return
        first = 0
        for chunk in self.given():
            for start, stop in self._spans(chunk.shape[1], at_once=at_once and (few or self._all)):
                yield first + start, self._block(chunk, start, stop)
            first += chunk.shape[1]

    @property
    def _all(self) -> bool:
        """Whether it is all rows, so that a block of a tensor is no copy."""
        return self.indices == tuple(range(self.n_given))

    def _spans(self, d: int, *, at_once: bool = False) -> Iterator[tuple[int, int]]:
        most = _LARGEST.get(self.like.device.type, _LARGEST_ELSEWHERE)
        size = max(1, max(_SMALLEST, min(most, self.n * d // 32)) // self.n)
        if at_once:
            size = max(1, d)
        yield from pairwise([*range(0, d, size), d])

    def _block(
        self, given: torch.Tensor | Sequence[torch.Tensor], start: int, stop: int
    ) -> torch.Tensor:
        import torch

        if not isinstance(given, torch.Tensor):
            return torch.stack([given[i][start:stop] for i in self.indices])
        block = given[:, start:stop]
        if self._all:
            return block
        return torch.stack([block[i] for i in self.indices])


def working(dtype: torch.dtype) -> torch.dtype:
    """The type that entries are summed in."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32


def on_host(tensor: torch.Tensor) -> bool:
    """Whether it lies in the memory of the host."""
    return tensor.device.type == "cpu"
