"""Entries rounded at random to zero or the largest magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import bits, counted
from ..fused import applies, fused
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .precision import most, shaped, total, wide, widened

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_POWERS = (1, 3, 9, 27, 81)


class TernGrad(CompressorKind, frozen=True, kw_only=True, tag="TernGrad", tag_field="kind"):
    """Each entry becomes zero or plus or minus the largest magnitude s, with chance |x| / s.

    Source: Wen et al. 2017, "TernGrad", equations 1 to 3, and its clipping. Five entries are one
    byte, where the paper counts two bits an entry.
    Differs: entries are not clipped where all are equal (or there is one), as their deviation is
    zero. A tensor that holds NaN or infinity decodes to NaN.

    Attributes:
        clip: Entries are first cut to so many standard deviations of all (of the population, about
            their mean), as in the paper, which makes the mean over draws that of cut entries;
            0 leaves them, and the mean right.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    clip: Annotated[float, msgspec.Meta(ge=0)] = 2.5

    @property
    def unbiased(self) -> bool:
        """Unless entries are cut."""
        return not self.clip

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The largest magnitude; five entries a byte."""
        return (Buffer(wide(like.dtype), 1), Buffer("uint8", -(-like.n_entries // 5)))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Zeros and signs, drawn."""
        import torch

        if applies(x):
            rounded = bits.compiled(x, "rounded")
            if rounded is not None and rounded.applies(x):
                flat = x.reshape(-1)
                scale = rounded.scale(flat, self.clip)
                return (scale, rounded.signs(flat, scale, draw.key("own", x.device))), state
            made = fused(_coded, clip=self.clip)(x.reshape(-1), draw.key("own", x.device))
            return made, state
        flat = widened(x)
        if not flat.numel():
            return (flat.new_zeros(1), flat.new_zeros(0, dtype=torch.uint8)), state
        if self.clip:
            deviation = float(flat.double().std(correction=0))
            if not deviation <= torch.finfo(flat.dtype).eps * float(flat.abs().max()):
                flat = flat.clamp(-self.clip * deviation, self.clip * deviation)
        scale = flat.abs().max()
        drawn = (draw.uniform(flat) * scale < flat.abs()).long()
        signed = drawn * flat.sign().nan_to_num(0.0).long()
        return (scale.view(1), _pack(signed + 1)), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Signs times the largest magnitude."""
        import torch

        scale, packed = buffers
        if applies(packed):
            rounded = bits.compiled(packed, "rounded")
            if rounded is not None:
                dtype = getattr(torch, like.dtype)
                meant: torch.Tensor = rounded.of_signs(packed, scale, like.n_entries, dtype)
                return meant.view(like.shape)
            out: torch.Tensor = fused(_meant, dtype=like.dtype)(scale, packed, like.n_entries)
            return out.view(like.shape)
        scale = scale.masked_fill(scale.isinf(), float("nan"))
        signed = _unpack(packed, like.n_entries) - 1
        return shaped(signed.to(scale.dtype) * scale, like.shape, like.dtype)


def _pack(digits: torch.Tensor) -> torch.Tensor:
    """Digits to base 3, five of them a byte."""
    import torch

    fives = torch.nn.functional.pad(digits, (0, -digits.numel() % 5)).view(-1, 5)
    return (fives * fives.new_tensor(_POWERS)).sum(1).to(torch.uint8)


def _unpack(packed: torch.Tensor, n_entries: int) -> torch.Tensor:
    fives = packed.long().unsqueeze(1) // packed.new_tensor(_POWERS) % 3
    return fives.view(-1)[:n_entries]


def _coded(x: torch.Tensor, key: torch.Tensor, *, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    flat = widened(x)
    scale = most(flat.abs())
    if clip:
        mean = total(flat.double()) / flat.numel()
        deviation = (total((flat.double() - mean).square()) / flat.numel()).sqrt()
        alike = deviation <= torch.finfo(flat.dtype).eps * scale
        # Of what is not finite there is no deviation, and no receiver is to see anything of it.
        limit = torch.where(alike, scale, (clip * deviation).to(flat.dtype))
        scale = torch.where(deviation.isfinite(), torch.minimum(scale, limit), torch.nan)
    size = torch.minimum(flat.abs(), scale)
    drawn = counted.uniform(key, flat.numel(), dtype=flat.dtype) * scale < size
    digits = 1 + drawn.int() * (1 - 2 * (flat < 0).int())
    fives = torch.nn.functional.pad(digits, (0, -flat.numel() % 5)).view(-1, 5)
    byte = fives[:, 0]
    for place, power in enumerate(_POWERS[1:], 1):
        byte = byte + fives[:, place] * power
    return scale.view(1), byte.to(torch.uint8)


def _meant(
    scale: torch.Tensor, packed: torch.Tensor, n_entries: int, *, dtype: str
) -> torch.Tensor:
    import torch

    fives = packed.int().unsqueeze(1).expand(-1, 5)
    place, digits = torch.arange(5, device=packed.device), fives
    for at, power in enumerate(_POWERS):
        digits = torch.where(place == at, fives // power, digits)
    signed = (digits % 3 - 1).reshape(-1)[:n_entries]
    scale = scale.masked_fill(scale.isinf(), float("nan"))
    return (signed.to(scale.dtype) * scale).to(getattr(torch, dtype))
