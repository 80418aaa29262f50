"""A random rotation before another compressor."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .. import bits, counted
from ..draw import is_key, of_seed
from ..fused import applies, fused
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .natural import Natural
from .one_bit import OneBit
from .precision import shaped, wide, widened
from .qsgd import QSGD
from .random_k import RandomK
from .sign import Sign
from .tern_grad import TernGrad
from .top_k import TopK

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_SIDE = 64  # of a small matrix: products by it wait for memory, not for arithmetic

Inner = QSGD | TernGrad | OneBit | Sign | Natural | RandomK | TopK


class Rotated(CompressorKind, frozen=True, kw_only=True, tag="Rotated", tag_field="kind"):
    """What another compressor makes of entries that a random rotation has made alike in size.

    Source: Suresh et al. 2017, "Distributed Mean Estimation with Limited Communication", section
    3: H D / sqrt(d), D with random signs that all workers share, H by the fast transform.
    Differs: blocks are rotated each alone, so that at most one block is filled up with zeros; the
    seed of the signs is sent (8 bytes). NaN or infinity is all that a receiver sees of its block.
    A host and an accelerator draw other signs, and read what either has drawn; workers whose
    packets are to add are all hosts or all accelerators.

    Attributes:
        inner: Compressor of the rotated entries; its own `per` and `dense_below` say nothing here.
        block: Entries rotated together; fewer, where the tensor has fewer.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    inner: Inner = QSGD()
    block: Literal[64, 256, 1024, 4096, 16384, 65536] = 4096

    @property
    def adds(self) -> bool:
        """If the inner compressor's packets do."""
        return self.inner.adds

    @property
    def unbiased(self) -> bool:
        """If the inner compressor is."""
        return self.inner.unbiased

    def at(self, step: int) -> Rotated:
        """With the inner compressor of that step."""
        return msgspec.structs.replace(self, inner=self.inner.at(step))

    def init(self, like: Like) -> State:
        """State of the inner compressor."""
        return self.inner.init(self._rotated(like))

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The seed of the signs; the inner compressor's buffers."""
        return (Buffer("int64", 1), *self.inner.form(self._rotated(like)))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """What the inner compressor makes of rotated entries."""
        import torch

        flat, seed = widened(x), draw.seed_of("shared", x.device)
        if (turns := self._turns(flat)) is not None:
            size = self._size(flat.numel())
            rotated = turns.turned(flat, seed, flat.numel(), size, back=False)
            buffers, after = self.inner.encode(rotated, state, draw.at(0))
            return (seed, *buffers), after
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self._size(flat.numel())))
        signed = _flipped(padded, seed, keyed=x.device.type != "cpu")
        rotated = self._turned(signed, flat.numel())
        buffers, after = self.inner.encode(rotated, state, draw.at(0))
        return (seed, *buffers), after

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """What the inner compressor meant, turned back."""
        seed, *inner = buffers
        rotated = self.inner.decode(tuple(inner), self._rotated(like))
        if (turns := self._turns(rotated)) is not None and is_key(seed):
            n, size = like.n_entries, self._size(like.n_entries)
            return shaped(turns.turned(rotated, seed, n, size, back=True), like.shape, like.dtype)
        turned = self._turned(rotated, like.n_entries)
        flat = _flipped(turned, seed, keyed=is_key(seed))
        return shaped(flat[: like.n_entries], like.shape, like.dtype)

    def _turns(self, flat: torch.Tensor) -> Any:
        """Compiled rotations: of blocks that are squares, in float32."""
        import torch

        turns = bits.compiled(flat, "turns") if flat.dtype == torch.float32 else None
        fits = turns is not None and self._size(flat.numel()) in turns.SIDES
        return turns if fits else None

    def _size(self, n_entries: int) -> int:
        return min(self.block, 1 << max(n_entries - 1, 0).bit_length())

    def _rotated(self, like: Like) -> Like:
        size = self._size(like.n_entries)
        return Like((-(-like.n_entries // size) * size,), wide(like.dtype))

    def _turned(self, flat: torch.Tensor, n_entries: int) -> torch.Tensor:
        return hadamard(flat.view(-1, self._size(n_entries))).reshape(-1)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Each row times the Hadamard matrix of its length, a power of two, over the length's root."""
    import torch

    if applies(rows):
        return _by_factors(rows)
    n, size = rows.shape
    out, half = rows, 1
    while half < size:
        pairs = out.view(n, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        out, half = torch.stack([first + second, first - second], 2).view(n, size), 2 * half
    return out / math.sqrt(size)


def _by_factors(rows: torch.Tensor) -> torch.Tensor:
    """The same as products by small matrices, of which the large one is the Kronecker product."""
    import torch

    n, size = rows.shape
    out, inner = rows, size
    while inner > 1:
        side, outer = min(inner, _SIDE), size // inner
        small = _matrix(side, rows.device, rows.dtype) / (1.0 if outer > 1 else math.sqrt(size))
        inner //= side
        if inner == 1:
            out = out.reshape(-1, side) @ small
        else:
            whole = out.reshape(n * outer, side, inner)
            out = torch.bmm(small.expand(len(whole), -1, -1), whole)
    return out.view(n, size)


@cache
def _matrix(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The Hadamard matrix of a size up to 64: minus where the indices share odd many bits."""
    import torch

    each = torch.arange(size, device=device)
    shared = each.unsqueeze(1) & each
    for shift in (4, 2, 1):
        shared = shared ^ shared >> shift
    return (1 - 2 * (shared & 1)).to(dtype)


def _flipped(flat: torch.Tensor, seed: torch.Tensor, *, keyed: bool) -> torch.Tensor:
    """A vector with the signs that the seed or key gives."""
    import torch

    if keyed:
        flip = fused(_by_key) if applies(flat) else _by_key
        flipped: torch.Tensor = flip(flat, seed)
        return flipped
    drawn = torch.randint(2, flat.shape, generator=of_seed(seed), dtype=torch.int8)
    return flat * (2 * drawn - 1).to(flat.device, flat.dtype)


def _by_key(flat: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return flat * counted.signs(key, flat.numel(), flat.dtype)
