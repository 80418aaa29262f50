"""Sums of entries in a table, from which large entries are told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import counted
from ..draw import is_key, of_seed
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .precision import shaped, wide, widened
from .sparsifier import Ratio, count
from .top_k import largest

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class CountSketch(CompressorKind, frozen=True, kw_only=True, tag="CountSketch", tag_field="kind"):
    """Adds each entry, with a sign, to one cell of each row of a table; tables add.

    Source: Charikar, Chen and Farach-Colton 2002; Ivkin et al. 2019, "Communication-efficient
    Distributed SGD with Sketching" (Sketched-SGD). An entry is the median over rows of its cells,
    and the largest are taken.
    Differs: no second round asks for exact values of the largest; cells are drawn anew for each
    packet from a seed that all workers share and that is sent (8 bytes). NaN and infinity spoil
    all entries that meet them in half of the rows. A host and an accelerator draw other cells, and
    read what either has drawn; workers are all hosts or all accelerators.

    Attributes:
        ratio: Cells of the table to entries of the tensor; each row has at least one.
        rows: Rows of the table; odd, or the lower of two medians is taken.
        keep: Share of the entries that is told from the table, the largest ones.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    ratio: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    rows: Annotated[int, msgspec.Meta(ge=1, le=64)] = 5
    keep: Ratio = 0.01

    @property
    def adds(self) -> bool:
        """Always, as its tables do."""
        return True

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The seed of cells and signs; the table."""
        cells = self.rows * self._columns(like.n_entries)
        return (Buffer("int64", 1), Buffer(wide(like.dtype), cells))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The table."""
        import torch

        flat, seed = widened(x), draw.seed_of("shared", x.device)
        cells, signs = self._drawn(seed, flat.numel())
        # In float64, as accelerators add in any order: what is lost there is not seen here.
        table = flat.new_zeros(self.rows * self._columns(flat.numel()), dtype=torch.float64)
        table.index_add_(0, cells.view(-1), (signs * flat.double()).view(-1))
        return (seed, table.to(flat.dtype)), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The largest entries as the table tells them."""
        seed, table = buffers
        cells, signs = self._drawn(seed, like.n_entries)
        told = (table[cells] * signs).median(0).values
        where = largest(told.abs(), count(self.keep, like.n_entries))
        out = told.new_zeros(like.n_entries)
        out[where] = told[where]
        return shaped(out, like.shape, like.dtype)

    def _columns(self, n_entries: int) -> int:
        return max(1, math.ceil(self.ratio * n_entries / self.rows))

    def _drawn(self, seed: torch.Tensor, n_entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cell and sign of each entry in each row."""
        import torch

        columns, shape = self._columns(n_entries), (self.rows, n_entries)
        if is_key(seed):
            n = self.rows * n_entries
            cells = counted.below(seed, n, columns).view(shape)
            cells += torch.arange(self.rows, device=seed.device).unsqueeze(1) * columns
            return cells, counted.signs(seed, n, torch.int8).view(shape)
        generator = of_seed(seed)
        cells = torch.randint(columns, shape, generator=generator)
        cells += torch.arange(self.rows).unsqueeze(1) * columns
        signs = 2 * torch.randint(2, shape, generator=generator, dtype=torch.int8) - 1
        return cells.to(seed.device), signs.to(seed.device)
