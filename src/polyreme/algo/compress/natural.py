"""Entries rounded at random to powers of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits, counted
from ..fused import applies, fused
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .precision import shaped, widened

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_WIDTH, _BIAS, _NOT_FINITE = 9, 127, 255


class Natural(CompressorKind, frozen=True, kw_only=True, tag="Natural", tag_field="kind"):
    """Each entry becomes the power of two below or above it, at random so that the mean is right.

    Source: Horvath et al. 2022, "Natural Compression for Distributed Deep Learning", definition 1:
    the sign and the exponent of float32, 9 bits an entry whatever its type.
    Differs: magnitudes below 2**-126 become that or zero, as likely as makes the mean right; those
    above the largest power of the type (2**127; 2**15 of float16) become that. NaN and
    infinity decode to infinity.

    Attributes:
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    @property
    def unbiased(self) -> bool:
        """But for magnitudes above the largest power of two."""
        return True

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Exponents and signs."""
        return (Buffer("uint8", bits.n_bytes(like.n_entries, _WIDTH)),)

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Exponents, drawn."""
        import torch

        if applies(x) and x.dtype != torch.float64:
            rounded = bits.compiled(x, "rounded")
            if rounded is not None and rounded.applies(x):
                most = _most(x.dtype)
                return (rounded.powers(x.reshape(-1), draw.key("own", x.device), most),), state
            return (fused(_coded)(x.reshape(-1), draw.key("own", x.device)),), state
        flat = widened(x)
        size, finite = flat.abs(), flat.isfinite()
        size = torch.where(finite, size, torch.zeros_like(size))
        drawn = draw.uniform(flat)
        part, exponent = torch.frexp(size)
        power = exponent.long() - 1 + (drawn < 2 * part - 1)
        power = power.clamp(max=_most(x.dtype) - _BIAS)
        tiny = size < 2.0**-126
        code = torch.where(tiny, (drawn < size.double() * 2.0**126).long(), power + _BIAS)
        code = torch.where(finite, code, torch.full_like(code, _NOT_FINITE))
        return (bits.pack(code | (flat < 0).long() << 8, _WIDTH),), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The powers of two."""
        import torch

        if applies(buffers[0]):
            rounded = bits.compiled(buffers[0], "rounded")
            if rounded is not None:
                dtype = getattr(torch, like.dtype)
                meant: torch.Tensor = rounded.of_powers(buffers[0], like.n_entries, dtype)
                return meant.view(like.shape)
            read = fused(_meant, dtype=like.dtype)
            out: torch.Tensor = read(buffers[0], like.n_entries)
            return out.view(like.shape)
        code = bits.unpack(buffers[0], _WIDTH, like.n_entries)
        sign, code = 1.0 - 2.0 * (code >> 8), code & 255
        size = torch.ldexp(torch.ones_like(sign, dtype=torch.float64), code - _BIAS)
        size = size.masked_fill(code == 0, 0.0).masked_fill(code == _NOT_FINITE, float("inf"))
        return shaped(sign * size, like.shape, like.dtype)


def _most(dtype: torch.dtype) -> int:
    """The exponent of the largest power of two of that type."""
    import torch

    return _BIAS + (15 if dtype == torch.float16 else _BIAS)


def _coded(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """As the members of float32 say it: 1 bit of sign, 8 of exponent, 23 of what is above it."""
    import torch

    flat = widened(x)
    held = flat.view(torch.int32)
    exponent, above = held >> 23 & 255, (held & 0x7FFFFF).to(torch.float32) * 2.0**-23
    up = counted.uniform(key, flat.numel(), dtype=torch.float32) < above
    risen = (exponent + up).clamp(max=_most(x.dtype))
    code = torch.where(exponent < _NOT_FINITE, risen, _NOT_FINITE)
    return bits.joined(code | (flat < 0).int() << 8, width=_WIDTH)


def _meant(packed: torch.Tensor, n_entries: int, *, dtype: str) -> torch.Tensor:
    import torch

    code = bits.parted(packed, n_entries, width=_WIDTH).int()
    return (code << 23).view(torch.float32).to(getattr(torch, dtype))
