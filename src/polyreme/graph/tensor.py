"""How one layer is split over tensor parts: what is cut, where parts meet, who may split tokens.

Between layers every part holds the same hidden [B, T, D] (or, under sequence parallelism, its
own tokens of it). Inside a layer there are regions: modules that each part computes for its own
heads or intermediate features. Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti
et al. 2022, section 4 (tokens).

Differs: heads of keys and values may be fewer than the parts; several parts then hold the same
ones, and their gradients are sums over these parts. Where such heads lie in one matrix with
others, these parts hold the same of all of it, and each computes with its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

Side = Literal["out", "in", "vocabulary"]
Along = Literal["tokens", "heads", "vocabulary"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Features that are dealt out in whole `units` of `width` each; `what` names their number.

    `shared` units may be fewer than the parts: then several parts hold the same one.
    """

    what: str
    units: int
    width: int = 1
    shared: bool = False

    @property
    def size(self) -> int:
        """Features of all parts."""
        return self.units * self.width

    def legal(self, degree: int) -> bool:
        """Whether so many parts can share it."""
        return self.units % degree == 0 or (self.shared and degree % self.units == 0)

    def copies(self, degree: int) -> int:
        """How many parts hold the same features."""
        return max(1, degree // self.units)

    def local(self, degree: int) -> int:
        """Units of one part."""
        return max(1, self.units // degree)

    def interval(self, degree: int, rank: int) -> tuple[int, int]:
        """Features of a part, from where to where.

        >>> Run(what="kv heads", units=2, width=8, shared=True).interval(4, 3)
        (8, 16)
        """
        first = rank * self.units // degree
        return first * self.width, (first + self.local(degree)) * self.width


class Cutting(msgspec.Struct, frozen=True, kw_only=True):
    """A module (or a bare parameter, cut along its last dim) whose features are dealt out.

    `path` is that in the layer's module. The features are `runs`, one behind the other: a part
    holds an interval of each. "out" cuts what comes out, with its bias; "in" what goes in (the
    bias stays whole, and is added once); "vocabulary" the rows of a table or the scores of a
    head, at any degree: what is missing to equal parts is padding.
    """

    path: str
    side: Side
    runs: tuple[Run, ...]

    def refusal(self, degree: int) -> str | None:
        """Why it cannot be cut into so many parts."""
        if self.side == "vocabulary":
            return None
        for run in self.runs:
            if not run.legal(degree):
                rule = "neither divides nor is a multiple of" if run.shared else "does not divide"
                return f"{rule} {run.what} {run.units}"
        return None

    def copies(self, degree: int) -> int:
        """How many parts, ranks in a row, hold the same: as many as share its rarest features."""
        return max(run.copies(degree) for run in self.runs)

    def used(self, degree: int, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each run that a part computes with, in the features that it holds."""
        copies, found, before = self.copies(degree), [], 0
        for run in self.runs:
            first, end = run.interval(degree // copies, rank // copies)
            start, stop = run.interval(degree, rank)
            found.append((before + start - first, before + stop - first))
            before += end - first
        return tuple(found)


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """An argument of a region's entry: its name (None: the first) and its tokens in all parts.

    Without `n_tokens` they are those of the layer's hidden, and cannot be split.
    """

    argument: str | None = None
    n_tokens: int | None = None


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """From a module's inputs to what its last matrix gives, a sum over all parts.

    Gradients of what is read are summed once, at the entry. What comes out is as long as what is
    read first; without `exit` (a head) it stays with its part. One that is `arranged` reads tokens
    in another arrangement than the layer's hidden: where tokens are split, the layer's module
    itself gathers them before, and sums the hidden after, what the exit gives without its bias.
    """

    entry: str
    exit: str | None
    reads: tuple[Read, ...] = (Read(),)
    arranged: bool = False


class Meeting(Protocol):
    """What a layer's module is given as `meeting` where it has to gather split tokens itself."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens [B, T, D] of the hidden, of which this part has its own."""

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """This part's tokens of the sum over parts; `partial` [B, T, D]."""


class Number(msgspec.Struct, frozen=True, kw_only=True):
    """An attribute that counts units (or features, or units `per` others) of one part.

    `name` may lead through an object that others share ("config.num_attention_heads"): the module
    gets a copy of that object.
    """

    path: str
    name: str
    of: Run
    features: bool = False
    per: Run | None = None

    def local(self, degree: int) -> int:
        """Its value in one part."""
        value = self.of.local(degree) * (self.of.width if self.features else 1)
        return value // self.per.local(degree) if self.per else value


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """Keys (and as many values) that attention reads of all tokens of a sample: their heads.

    Read by `queries` of `n_queries` tokens.
    """

    n_tokens: int
    run: Run
    n_queries: int
    queries: Run

    def whole_heads(self, parts: int) -> bool:
        """Whether so many parts can each have some heads, of queries, keys and values alike."""
        return self.run.units % parts == self.queries.units % parts == 0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """An attribute that is another number in parts, however many there are."""

    path: str
    name: str
    value: int


class TensorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer's module is split; one without cuttings is computed by every part alike.

    `inside` are paths of modules that are whole but work inside a region: their gradients are
    partial sums. `contexts` are what attention reads of all tokens.
    `outputs` says along what an output is split (the first of its sample's dims; the last for
    "vocabulary"). The rest is about sequence parallelism: `n_tokens` of the whole hidden;
    `sequence` are modules whose attribute `n_tokens` then says how long it is; `positions` modules
    that look up positions, of which each part takes its own; `alike` modules that drop whole
    samples, the same in all parts; `whole` says that the layer works on whole sequences and is
    computed by all parts alike, with tokens gathered before it ("in"), dealt out after it ("out"),
    or both.
    """

    cuttings: tuple[Cutting, ...] = ()
    regions: tuple[Region, ...] = ()
    inside: tuple[str, ...] = ()
    numbers: tuple[Number, ...] = ()
    settings: tuple[Setting, ...] = ()
    contexts: tuple[Context, ...] = ()
    outputs: Mapping[str, Along] = {}
    n_tokens: int | None = None
    sequence: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    whole: Literal["in", "out", "both"] | None = None

    def refusal(self, degree: int) -> str | None:
        """Why the layer cannot be split into so many parts; None if it can."""
        found = (cutting.refusal(degree) for cutting in self.cuttings)
        return next((reason for reason in found if reason is not None), None)

    def legal(self, degree: int) -> bool:
        """Whether the layer can be split into so many parts."""
        return degree >= 1 and self.refusal(degree) is None

    @property
    def vocabulary(self) -> int | None:
        """Classes that the layer's scores are split over; None where each part has them all."""
        if "vocabulary" not in self.outputs.values():
            return None
        return next(cut.runs[0].size for cut in self.cuttings if cut.side == "vocabulary")

    def output_shape(
        self, name: str, shape: Sequence[int], degree: int, rank: int, *, sp: bool
    ) -> tuple[int, ...]:
        """What a part holds of an output whose whole shape (of a sample) is this."""
        along = self.outputs.get(name)
        if degree == 1 or along is None or (along == "tokens" and not sp):
            return tuple(shape)
        if along == "vocabulary":
            return (*shape[:-1], padded(shape[-1], degree) // degree)
        if along == "tokens":
            start, stop = token_interval(shape[0], degree, rank)
            return (stop - start, *shape[1:])
        return (shape[0] // degree, *shape[1:])


def padded(n_classes: int, degree: int) -> int:
    """A vocabulary's rows with padding: the next multiple of 128 a part.

    >>> padded(50257, 2), padded(50257, 4)
    (50432, 50688)
    """
    step = 128 * degree
    return -(-n_classes // step) * step


def token_interval(n_tokens: int, degree: int, rank: int) -> tuple[int, int]:
    """Tokens of a part: as even as can be, the longer parts first.

    >>> [token_interval(7, 3, rank) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    least, longer = divmod(n_tokens, degree)
    start = rank * least + min(rank, longer)
    return start, start + least + (rank < longer)
