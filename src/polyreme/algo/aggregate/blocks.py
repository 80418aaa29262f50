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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """n vectors of d entries, or those of them that `indices` name.

    They are a tensor (n, d), vectors wherever they lie, or a function that gives chunks (n, k)
    from the first to the last, each time that it is called.
    """

    given: torch.Tensor | Sequence[torch.Tensor] | Chunks
    like: torch.Tensor
    indices: tuple[int, ...]

    @staticmethod
    def of(given: torch.Tensor | Sequence[torch.Tensor] | Chunks) -> Rows:
        """All of them."""
        block = next(iter(given())) if callable(given) else given
        return Rows(given=given, like=block[0], indices=tuple(range(len(block))))

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.indices)

    def taken(self, places: Sequence[int]) -> Rows:
        """Those at these places."""
        return replace(self, indices=tuple(self.indices[place] for place in places))

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each block of entries starts, and the rows' entries, (n, k); not to be written to.

        What is made of a block is small beside all rows.
        """
        if not callable(self.given):
            for start, stop in self._spans(self.like.numel()):
                yield start, self._block(self.given, start, stop)
            return
        first = 0
        for chunk in self.given():
            for start, stop in self._spans(chunk.shape[1]):
                yield first + start, self._block(chunk, start, stop)
            first += chunk.shape[1]

    def _spans(self, d: int) -> Iterator[tuple[int, int]]:
        most = _LARGEST.get(self.like.device.type, _LARGEST_ELSEWHERE)
        size = max(1, max(_SMALLEST, min(most, self.n * d // 32)) // self.n)
        yield from pairwise([*range(0, d, size), d])

    def _block(
        self, given: torch.Tensor | Sequence[torch.Tensor], start: int, stop: int
    ) -> torch.Tensor:
        import torch

        if not isinstance(given, torch.Tensor):
            return torch.stack([given[i][start:stop] for i in self.indices])
        block = given[:, start:stop]
        if self.indices == tuple(range(len(given))):
            return block
        return torch.stack([block[i] for i in self.indices])


def working(dtype: torch.dtype) -> torch.dtype:
    """The type that entries are summed in."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
