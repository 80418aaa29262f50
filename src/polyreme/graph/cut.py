"""How a part's tensor lies in the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from .tensor import Cutting, TensorPlan, padded


class Part(Protocol):
    """Which of how many tensor parts; with `sp` each has its own tokens between regions."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def degree(self) -> int:
        """How many there are."""

    @property
    def sp(self) -> bool:
        """Whether tokens are split too."""


@dataclass(frozen=True, kw_only=True)
class OnePart:
    """A part by its numbers."""

    rank: int = 0
    degree: int = 1
    sp: bool = False


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A part's tensor holds `intervals` (start, stop) of the whole one along `dim`, in order.

    `shape` is the whole's; without `dim` the part holds all of it. `padding` entries behind the
    intervals belong to nobody. `copies` parts, ranks in a row, hold the very same, this one as
    number `copy`; where their gradients are `partial`, the tensor's is the sum over them.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    intervals: tuple[tuple[int, int], ...] = ()
    padding: int = 0
    copies: int = 1
    copy: int = 0
    partial: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part's tensor."""
        if self.dim is None:
            return self.shape
        held = sum(stop - start for start, stop in self.intervals) + self.padding
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part's of a tensor of the whole's shape, in memory of its own; padding is 0."""
        assert tuple(whole.shape) == self.shape, f"{tuple(whole.shape)} is not {self.shape}"
        if self.dim is None:
            return whole.clone()
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.intervals]
        if self.padding:
            shape = list(self.shape)
            shape[self.dim] = self.padding
            pieces.append(whole.new_zeros(shape))
        return torch.cat(pieces, self.dim)

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the part's tensor where it lies in the whole one; padding is left out."""
        assert tuple(local.shape) == self.local_shape
        assert tuple(whole.shape) == self.shape
        if self.dim is None:
            whole.copy_(local)
            return
        at = 0
        for start, stop in self.intervals:
            n = stop - start
            whole.narrow(self.dim, start, n).copy_(local.narrow(self.dim, at, n))
            at += n


def cuts_of(module: nn.Module, plan: TensorPlan, tp: Part) -> dict[str, Cut]:
    """The cut of each parameter and weight buffer of a whole module, by its name there."""
    alike = tp.degree > 1 and tp.sp and plan.whole is None
    tensors = module.state_dict(keep_vars=True)
    found = {
        name: Cut(
            shape=tuple(tensor.shape),
            copies=tp.degree,
            copy=tp.rank,
            partial=tp.degree > 1
            and isinstance(tensor, nn.Parameter)
            and (alike or any(name.startswith(f"{path}.") for path in plan.inside)),
        )
        for name, tensor in tensors.items()
    }
    if tp.degree == 1:
        return found
    for cutting in plan.cuttings:
        for name, dim in _dims(module, cutting):
            found[name] = _cut(tuple(tensors[name].shape), dim, cutting, tp)
    _settle_ties(tensors, found)
    return found


def vocabulary_interval(n_classes: int, degree: int, rank: int) -> tuple[int, int, int]:
    """(start, stop, padding) of a part's rows.

    >>> vocabulary_interval(300, 2, 1)
    (256, 300, 212)
    """
    each = padded(n_classes, degree) // degree
    start, stop = min(rank * each, n_classes), min((rank + 1) * each, n_classes)
    return start, stop, each - (stop - start)


def _cut(shape: tuple[int, ...], dim: int, cutting: Cutting, tp: Part) -> Cut:
    assert shape[dim] == sum(run.size for run in cutting.runs), f"{cutting.path} has other sizes"
    if cutting.side == "vocabulary":
        start, stop, padding = vocabulary_interval(shape[dim], tp.degree, tp.rank)
        intervals = ((start, stop),) if stop > start else ()
        return Cut(shape=shape, dim=dim, intervals=intervals, padding=padding)
    copies = cutting.copies(tp.degree)
    held: list[tuple[int, int]] = []
    offset = 0
    for run in cutting.runs:
        start, stop = run.interval(tp.degree // copies, tp.rank // copies)
        held.append((offset + start, offset + stop))
        offset += run.size
    return Cut(
        shape=shape,
        dim=dim,
        intervals=tuple(held),
        copies=copies,
        copy=tp.rank % copies,
        partial=copies > 1,
    )


def _dims(module: nn.Module, cutting: Cutting) -> Iterator[tuple[str, int]]:
    """Parameters that are cut, and along which dim."""
    path, _, leaf = cutting.path.rpartition(".")
    held = getattr(module.get_submodule(path), leaf)
    if isinstance(held, nn.Parameter):
        yield cutting.path, held.dim() - 1
        return
    # Linear holds [out, in]; the library's Conv1D [in, out]; a table [rows, out].
    out = 0 if isinstance(held, nn.Linear) else 1
    dims = {"out": out, "in": 1 - out, "vocabulary": 0}
    yield f"{cutting.path}.weight", dims[cutting.side]
    if cutting.side != "in" and getattr(held, "bias", None) is not None:
        yield f"{cutting.path}.bias", 0


def _settle_ties(tensors: dict[str, torch.Tensor], found: dict[str, Cut]) -> None:
    """One object has one cut; it is partial if it is in any of its places."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    for same in names.values():
        partial = any(found[name].partial for name in same)
        settled = {replace(found[name], partial=partial) for name in same}
        assert len(settled) == 1, f"{same} are one tensor, and cut in several ways"
        found |= dict.fromkeys(same, settled.pop())
