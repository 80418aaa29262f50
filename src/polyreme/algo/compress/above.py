"""The entries at or above a value; on accelerators in passes that write none down but these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from .. import bits

if TYPE_CHECKING:
    import torch

Size = Literal["value", "magnitude", "turned"]
"""What counts of an entry: as it is, without its sign, or with the other."""

_MANY = 1 << 12


class Found(Protocol):
    """Entries that were found, of which no more than their number may be wanted."""

    @property
    def n(self) -> int:
        """How many."""

    def where(self, n: int) -> torch.Tensor:
        """Indices in rising order of the first n."""


class Marked(Found, Protocol):
    """Those that were found by a bit of each entry."""

    @property
    def n_entries(self) -> int:
        """Of how many."""

    @property
    def mask(self) -> torch.Tensor:
        """The bits as bytes, lowest first."""


class _Listed(NamedTuple):
    indices: torch.Tensor

    @property
    def n(self) -> int:
        return self.indices.numel()

    def where(self, n: int) -> torch.Tensor:
        return self.indices[:n]


def picked(like: torch.Tensor, name: Literal["picked", "ranked", "gaps"] = "picked") -> Any:
    """The compiled passes of that file for vectors like that; None: torch's own will do."""
    return None if like.numel() < _MANY else bits.compiled(like, name)


def reaching(flat: torch.Tensor, least: torch.Tensor, *, size: Size) -> Found:
    """Entries whose size is not below; NaN is not."""
    passes = picked(flat)
    if passes is not None:
        found: Found = passes.counted(flat, least, size=size)
        return found
    if size == "turned":
        reached = (flat > -least).logical_not()
    else:
        reached = ((flat.abs() if size == "magnitude" else flat) < least).logical_not()
    return _Listed(reached.nonzero().squeeze(-1))


def above(flat: torch.Tensor, least: torch.Tensor, *, size: Size) -> torch.Tensor:
    """Indices in rising order of entries whose size is not below; NaN is not."""
    found = reaching(flat, least, size=size)
    return found.where(found.n)
