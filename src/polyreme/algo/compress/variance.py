"""Entries that are sure: large against how much they vary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from .. import bits
from ..packet import Buffer, Like
from ..rule.kind import Positive
from . import places
from .kind import State
from .precision import wide, widened
from .sparse import SparseKind

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_LEVELS = 8


class VarianceBased(SparseKind, frozen=True, kw_only=True, tag="VarianceBased", tag_field="kind"):
    """Sends an entry once the square of its sum exceeds alpha times the sum of its squares.

    Source: Tsuzuku, Imachi and Akiba 2018, "Variance-based Gradient Compression", algorithm 1;
    values are a sign and 3 bits of exponent below the largest: those that would need more wait.
    Differs: the paper sums squares over the samples of a batch, which only their single gradients
    give. Here a worker's gradient of each step is one sample: the sum is r, what a feedback has
    added up (ErrorFeedback, DGC, ...), a step's own share is r less what the step before left,
    and the sum of squares is the compressor's state. With alpha 1 or above, then, an entry goes
    at the second like step, not at once. Without such a feedback it sends entries that rise.
    NaN and infinity are sent, and are then all that a receiver sees of sent entries.

    Attributes:
        alpha: How sure an entry must be; the paper takes 1 to 2.
        decay: What is left of the sum of squares of an entry that was not sent, step by step.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    alpha: Positive = 1.0
    decay: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.999

    def init(self, like: Like) -> State:
        """Nothing was left, nothing summed."""
        import torch

        zeros = torch.zeros(like.shape, dtype=getattr(torch, wide(like.dtype)))
        return {"residue": zeros, "squares": zeros}

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The largest power of two; how many; indices, packed, in rising order; values."""
        return (
            Buffer(wide(like.dtype), 1),
            Buffer("int32", 1),
            Buffer("uint8", None),
            Buffer("uint8", None),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Exponents of the entries that are sure."""
        import torch

        flat = widened(x)
        left = {name: each.to(x.device).view(-1) for name, each in state.items()}
        if (sure_of := _sure(flat)) is not None:
            sent = sure_of.sent(flat, left["residue"], left["squares"], self.alpha, self.decay)
            k = sent.found.n
            buffers = (
                sent.top,
                torch.full((1,), k, dtype=torch.int32, device=x.device),
                places.pack_found(sent.found, k),
                bits.pack(sure_of.codes(flat, sent, k), 4),
            )
            after = {"residue": sent.residue, "squares": sent.squares}
            return buffers, {name: each.view(x.shape) for name, each in after.items()}
        squares = (flat - left["residue"]).square_().add_(left["squares"])
        sure = (flat.square() > self.alpha * squares) & (flat != 0) | ~flat.isfinite()
        residue, squares = flat.clone(), squares.mul_(self.decay)
        where = sure.nonzero().squeeze(-1)
        held = flat[where]
        top = _power(held.abs().amax()) if held.numel() else flat.new_zeros(())
        # The nearer of two powers is above from three quarters of it on.
        down = _exponent(top) - _exponent(held.abs() * (4 / 3))
        down = torch.where(held.isfinite() & top.isfinite(), down, torch.zeros_like(down))
        sent = down < _LEVELS
        where, held = where[sent], held[sent]
        codes = down[sent].clamp(min=0) | (held < 0).long() << 3
        buffers = (
            top.view(1),
            torch.full((1,), where.numel(), dtype=torch.int32, device=x.device),
            places.pack(where, flat.numel()),
            bits.pack(codes, 4),
        )
        residue[where] = held - _meant(top, codes)
        squares[where] = 0.0
        return buffers, {"residue": residue.view(x.shape), "squares": squares.view(x.shape)}

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that were sure."""
        top, count, packed, codes = buffers
        k = int(count)
        codes = bits.unpack(codes, 4, k)
        sure_of = _sure(top)
        values = _meant(top, codes) if sure_of is None else sure_of.meant(top, codes)
        return places.unpack(packed, k, like.n_entries), values


def _sure(like: torch.Tensor) -> Any:
    """Compiled passes: for float32."""
    import torch

    fits = like.numel() and like.dtype == torch.float32
    return bits.compiled(like, "sure") if fits else None


def _meant(top: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Values by their codes."""
    return top / (1 << (codes & 7)) * (1 - 2 * (codes >> 3))


def _exponent(sizes: torch.Tensor) -> torch.Tensor:
    """Of the power of two at or below; far below all others for zero."""
    import torch

    finite = sizes.nan_to_num(0.0, 0.0)
    exponent = torch.frexp(finite)[1].long() - 1
    return exponent.masked_fill(finite == 0, -(1 << 20))


def _power(size: torch.Tensor) -> torch.Tensor:
    """The power of two at or below; what is not finite stays."""
    import torch

    part, _ = torch.frexp(size)
    return torch.where(size.isfinite(), size / (2 * part), size)
