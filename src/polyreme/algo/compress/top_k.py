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

_SAMPLE, _SAMPLED_FROM = 1 << 15, 1 << 20


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
            k = count(self.ratio, x.numel())
            where, values = leading(x.reshape(-1), k, "magnitude")[0]
            return (places.pack(where, x.numel()), values), state
        flat = x.reshape(-1)
        where = largest_by_sample(flat, self.ratio, draw)
        return (places.pack(where, flat.numel()), flat[where]), state

    def encode_rows(
        self, rows: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The largest entries of each."""
        import torch

        n = rows.shape[-1]
        where = largest_magnitudes(rows, count(self.ratio, n))
        # As `encode` reads them: torch's gather has other bits for NaN.
        values = rows[torch.arange(len(rows), device=rows.device).unsqueeze(1), where]
        return (places.pack(where, n), values), scattered(where, values, n)

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entries."""
        packed, values = buffers
        return places.unpack(packed, values.shape[-1], like.n_entries), values


def largest(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest in rising order, NaN above all; of equal ones the first."""
    return leading(sizes, k, "value")[0].where


def largest_of_rows(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest`, of each row."""
    n_rows = len(sizes)
    if not k:
        return sizes.new_zeros(n_rows, 0).long()
    if n_rows == 1:
        return largest(sizes[0], k).unsqueeze(0)
    return _of_all(sizes, k)


def _of_all(sizes: torch.Tensor, k: int) -> torch.Tensor:
    import torch

    n_rows = len(sizes)
    least = sizes.topk(k, sorted=False).values.amin(-1, keepdim=True)
    row, where = (sizes >= least).nonzero().unbind(-1)
    if where.numel() == n_rows * k:
        wanted = torch.arange(n_rows, device=sizes.device).unsqueeze(1)
        if n_rows == 1 or bool((row.view(n_rows, k) == wanted).all()):
            return where.view(n_rows, k)
    return torch.stack([_first_of_equals(each, k) for each in sizes])


def largest_magnitudes(rows: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest_of_rows`, of magnitudes; those of many entries are not all written down."""
    if len(rows) == 1:
        return leading(rows[0], k, "magnitude")[0].where.unsqueeze(0)
    return largest_of_rows(rows.abs(), k)


def smallest(entries: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of the entries with their signs turned, as `largest` has them."""
    return leading(entries, k, "turned")[0].where


class Leading(NamedTuple):
    """Indices in rising order, and their entries."""

    where: torch.Tensor
    entries: torch.Tensor


def leading(entries: torch.Tensor, k: int, *sizes: Size) -> list[Leading]:
    """The k largest of a vector by each of these sizes, NaN above all; of equal ones the first.

    With signs "turned" these are the k smallest, NaN below all. Of many entries they are found
    among few more that hold all of them, where a sample gives a bound that leaves few: passes over
    all entries are what selection costs, and this takes fewer than to select among them.
    """
    import torch

    passes, bound = picked(entries, "ranked"), _bound(entries, k)
    if passes is None or bound is None or entries.dtype == torch.float64:
        found = [_alone(entries, k, size) for size in sizes]
        return [Leading(where, entries[where]) for where in found]
    step, rank, most = bound
    given = {"step": step, "rank": rank, "most": most}
    flags = torch.empty(len(sizes), dtype=torch.int32, device=entries.device)
    ranked = [
        passes.largest(entries, k, size=size, holds=flags[i : i + 1], **given)
        for i, size in enumerate(sizes)
    ]
    holds = flags.tolist()
    out = []
    for size, each, right in zip(sizes, ranked, holds, strict=True):
        where = each.where if right else _alone(entries, k, size)
        out.append(Leading(where, each.entries if right else entries[where]))
    return out


def _alone(entries: torch.Tensor, k: int, size: Size) -> torch.Tensor:
    if not k:
        return entries.new_zeros(0).long()
    near = _near(entries, k, size=size)
    if near is None:
        return _of_all(_plain(entries, size).unsqueeze(0), k)[0]
    return near[_of_all(_sized(entries[near], size).unsqueeze(0), k)[0]]


def _near(entries: torch.Tensor, k: int, *, size: Size = "value") -> torch.Tensor | None:
    """Indices in rising order of few more than k entries, which hold all of the k largest."""
    bound = _bound(entries, k)
    if bound is None:
        return None
    sample = _sized(entries[:: bound.step], size)
    least = sample.topk(bound.rank, sorted=False).values.amin()
    near = above(entries, least, size=size)
    return near if k <= near.numel() <= 2 * bound.rank * bound.step else None


class _Bound(NamedTuple):
    """What the k largest most likely reach: the one of that rank of every step-th entry.

    At most `most` reach it, most likely.
    """

    step: int
    rank: int
    most: int


def _bound(entries: torch.Tensor, k: int) -> _Bound | None:
    n = entries.numel()
    if n < _SAMPLED_FROM or not k:
        return None
    step = -(-n // _SAMPLE) | 1  # odd: sizes often have even periods
    n_sampled = -(-n // step)
    expected = k * n_sampled / n
    rank = math.ceil(expected + 5 * math.sqrt(expected)) + 1
    if rank > n_sampled // 8:
        return None
    return _Bound(step, rank, math.ceil((rank + 5 * math.sqrt(rank)) * step))


def _plain(entries: torch.Tensor, size: Size) -> torch.Tensor:
    """What counts of entries."""
    if size == "value":
        return entries
    return -entries if size == "turned" else entries.abs()


def _sized(entries: torch.Tensor, size: Size) -> torch.Tensor:
    """The same; NaN as infinity."""
    sizes = _plain(entries, size)
    return sizes.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _first_of_equals(sizes: torch.Tensor, k: int) -> torch.Tensor:
    import torch

    sizes = sizes.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    least = sizes.topk(k, sorted=False).values.min()
    above = (sizes > least).nonzero().squeeze(-1)
    ties = (sizes == least).nonzero().squeeze(-1)[: k - above.numel()]
    return torch.cat([above, ties]).sort().values
