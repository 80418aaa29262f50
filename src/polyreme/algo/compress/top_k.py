"""The entries that are largest by magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..packet import Buffer, Like
from . import places
from .above import Size, above, picked
from .kind import State
from .sampled import largest_by_sample
from .sparse import scattered
from .sparsifier import Sparsifier, count

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_SAMPLE, _SAMPLED_FROM = 1 << 16, 1 << 20


class TopK(Sparsifier, frozen=True, kw_only=True, tag="TopK", tag_field="kind"):
    """The largest entries by magnitude; of equal ones those that come first.

    Source: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018, section 2. "sampled" is
    the choice of Lin et al. 2018, "Deep Gradient Compression", as their code makes it.
    At least one entry is sent. Indices take as few bits as tell all entries apart, or one bit an
    entry if that is less. NaN and infinity count as largest.

    Attributes:
        ratio: Share of the entries that is sent, once warm; at least one is.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        select: Whether the largest are found exactly, or those above a threshold that is guessed
            from a sample (quicker; may be fewer, and not quite the largest).
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    select: Literal["exact", "sampled"] = "exact"

    @property
    def stacks(self) -> bool:
        """If all tensors alike send as many entries."""
        return self.select == "exact"

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Indices, packed, in rising order; values."""
        if self.select == "sampled":
            return (Buffer("uint8", None), Buffer(like.dtype, None))
        n, k = like.n_entries, count(self.ratio, like.n_entries)
        return (Buffer("uint8", places.n_bytes(k, n)), Buffer(like.dtype, k))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The largest entries."""
        if self.stacks:
            where, values = self._largest(x.reshape(1, x.numel()))
            return (places.pack(where, x.numel())[0], values[0]), state
        flat = x.reshape(-1)
        where = largest_by_sample(flat, self.ratio, draw)
        return (places.pack(where, flat.numel()), flat[where]), state

    def encode_rows(
        self, rows: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The largest entries of each."""
        n = rows.shape[-1]
        where, values = self._largest(rows)
        return (places.pack(where, n), values), scattered(where, values, n)

    def _largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        where = largest_magnitudes(rows, count(self.ratio, rows.shape[-1]))
        return where, rows.gather(-1, where)

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entries."""
        packed, values = buffers
        return places.unpack(packed, values.shape[-1], like.n_entries), values


def largest(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest in rising order, NaN above all; of equal ones the first."""
    return largest_of_rows(sizes.unsqueeze(0), k)[0]


def largest_of_rows(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest`, of each row."""
    import torch

    n_rows = len(sizes)
    if not k:
        return sizes.new_zeros(n_rows, 0).long()
    if n_rows == 1 and (found := _among_many(sizes[0], k, size="value")) is not None:
        return found.unsqueeze(0)
    least = sizes.topk(k, sorted=False).values.amin(-1, keepdim=True)
    row, where = (sizes >= least).nonzero().unbind(-1)
    if where.numel() == n_rows * k:
        wanted = torch.arange(n_rows, device=sizes.device).unsqueeze(1)
        if n_rows == 1 or bool((row.view(n_rows, k) == wanted).all()):
            return where.view(n_rows, k)
    return torch.stack([_first_of_equals(each, k) for each in sizes])


def largest_magnitudes(rows: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest_of_rows`, of magnitudes; those of many entries are not all written down."""
    if k and len(rows) == 1:
        found = _among_many(rows[0], k, size="magnitude")
        if found is not None:
            return found.unsqueeze(0)
    return largest_of_rows(rows.abs(), k)


def smallest(entries: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of the entries with their signs turned, as `largest` has them."""
    found = _among_many(entries, k, size="turned") if k else None
    return largest(-entries, k) if found is None else found


def _among_many(entries: torch.Tensor, k: int, *, size: Size) -> torch.Tensor | None:
    """Indices in rising order of the k largest, found among few more that hold all of them.

    With signs "turned" these are the k smallest, NaN below all. None where a sample gives no bound
    that leaves few: then all are looked at. Passes over all entries are what selection costs, and
    this takes fewer than to select among them.
    """
    passes = picked(entries)
    if passes is None:
        near = _near(entries, k, size=size)
        return None if near is None else near[largest(_sized(entries[near], size), k)]
    bound = _bound(entries, k, size)
    if bound is None:
        return None
    rank, one_of = bound.rank, bound.one_of
    most = math.ceil((rank + 5 * math.sqrt(rank)) * one_of)
    where, holds = passes.largest(entries, k, bound.least, most, size=size)
    return where if bool(holds) else None


def _near(entries: torch.Tensor, k: int, *, size: Size = "value") -> torch.Tensor | None:
    """Indices in rising order of few more than k entries, which hold all of the k largest."""
    bound = _bound(entries, k, size)
    if bound is None:
        return None
    near = above(entries, bound.least, size=size)
    return near if k <= near.numel() <= 2 * bound.rank * bound.one_of else None


class _Bound(NamedTuple):
    """What the k largest most likely reach: of a sample (one of so many) the one of that rank."""

    least: torch.Tensor
    rank: int
    one_of: float


def _bound(entries: torch.Tensor, k: int, size: Size) -> _Bound | None:
    n = entries.numel()
    if n < _SAMPLED_FROM:
        return None
    sample = entries[:: n // _SAMPLE | 1]  # an odd step: sizes often have even periods
    expected = k * sample.numel() / n
    rank = math.ceil(expected + 5 * math.sqrt(expected)) + 1
    if rank > sample.numel() // 8:
        return None
    least = _sized(sample, size).topk(rank, sorted=False).values.amin()
    return _Bound(least, rank, n / sample.numel())


def _sized(entries: torch.Tensor, size: Size) -> torch.Tensor:
    """What counts of entries; NaN as infinity."""
    if size != "value":
        entries = -entries if size == "turned" else entries.abs()
    return entries.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _first_of_equals(sizes: torch.Tensor, k: int) -> torch.Tensor:
    import torch

    sizes = sizes.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    least = sizes.topk(k, sorted=False).values.min()
    above = (sizes > least).nonzero().squeeze(-1)
    ties = (sizes == least).nonzero().squeeze(-1)[: k - above.numel()]
    return torch.cat([above, ties]).sort().values
