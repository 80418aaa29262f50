"""All parameters of a replica as one vector, and where each tensor lies in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


def all_finite(vector: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite; one pass where their sum is finite, which says so."""
    total = vector.sum()
    return bool(total.isfinite()) or bool(vector.isfinite().all())


def mean(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean in float64, summed in their order, in their own type."""
    n, total, dtype = 0, None, None
    for vector in vectors:
        n += 1
        wide = vector.double()
        total, dtype = (wide if total is None else total + wide), vector.dtype
    assert total is not None, "the mean of something"
    return (total / n).to(dtype)


def span(n_entries: int, n_pieces: int, piece: int) -> tuple[int, int]:
    """Where a piece of a vector starts and stops, of pieces as equal as can be."""
    return n_entries * piece // n_pieces, n_entries * (piece + 1) // n_pieces


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One tensor of the vector: entries `start` to `stop`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of a vector, in order."""

    segments: tuple[Segment, ...]

    def pieces(self, n: int) -> tuple[Layout, ...]:
        """Of equal pieces of the vector, found once; tensors that are cut have one dimension."""
        held = self.__dict__.setdefault("_pieces", {})
        if n not in held:
            spans = (span(self.n_entries, n, piece) for piece in range(n))
            held[n] = (self,) if n == 1 else tuple(self._cut(*each) for each in spans)
        found: tuple[Layout, ...] = held[n]
        return found

    def once(self, key: Hashable, find: Callable[[], _T]) -> _T:
        """What follows from the layout and from what the key says, found once."""
        held = self.__dict__.setdefault("_once", {})
        if key not in held:
            held[key] = find()
        found: _T = held[key]
        return found

    def _cut(self, start: int, stop: int) -> Layout:
        segments = []
        for each in self.segments:
            first, last = max(start, each.start), min(stop, each.stop)
            if first < last:
                whole = (first, last) == (each.start, each.stop)
                segments.append(
                    Segment(
                        name=each.name,
                        shape=each.shape if whole else (last - first,),
                        start=first - start,
                        stop=last - start,
                    )
                )
        return Layout(segments=tuple(segments))

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Tensors one after another."""
        segments, start = [], 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            segments.append(Segment(name=name, shape=tuple(shape), start=start, stop=stop))
            start = stop
        return Layout(segments=tuple(segments))

    @property
    def n_entries(self) -> int:
        """Length of the vector."""
        return self.segments[-1].stop if self.segments else 0

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a vector, by name; they share its memory."""
        return {s.name: vector[s.start : s.stop].view(s.shape) for s in self.segments}

    def flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A new vector of these tensors."""
        import torch

        return torch.cat([tensors[s.name].reshape(-1) for s in self.segments])

    def square_sums(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum of squares of each tensor, in float64."""
        import torch

        if not self.segments:
            return torch.zeros(0, dtype=torch.float64)
        parts = torch.split(vector, [s.stop - s.start for s in self.segments])
        return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value a tensor, repeated for each of its entries."""
        import torch

        if not self.segments:
            return values
        sizes = self.once(("sizes", values.device), partial(self._sizes, values.device))
        return torch.repeat_interleave(values, sizes, output_size=self.n_entries)

    def _sizes(self, device: torch.device) -> torch.Tensor:
        import torch

        return torch.tensor([s.stop - s.start for s in self.segments], device=device)
