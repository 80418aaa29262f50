"""Compressors as plain functions of one tensor: each gives a packet with `nbytes` and `decode()`.

They are one exchange without memory; whatever is drawn comes from `generator`, or from torch's
own where none is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..draw import Draw
from ..packet import Like, Packet
from .ada_comp import AdaComp
from .cast import Cast
from .count_sketch import CountSketch
from .kind import CompressorKind
from .natural import Natural
from .one_bit import OneBit
from .qsgd import QSGD
from .random_k import RandomK
from .rotated import Inner, Rotated
from .sign import Sign
from .sparse_binary import SBC, STC
from .tern_grad import TernGrad
from .threshold import Threshold
from .top_k import TopK

if TYPE_CHECKING:
    import torch


def packed(
    kind: CompressorKind, x: torch.Tensor, generator: torch.Generator | None = None
) -> Packet:
    """What any compressor makes of a tensor as its first packet."""
    import torch

    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(1 << 62, (), generator=generator, device=device))
    like = Like.of(x)
    detached = x.detach()
    buffers, _ = kind.encode(detached, kind.init(like), Draw(seed=seed, worker=0, step=0))
    return Packet(buffers=buffers, like=like, kind=kind)


def cast(x: torch.Tensor, to: Literal["fp16", "bf16"] = "bf16") -> Packet:
    """Entries in half precision."""
    return packed(Cast(to=to), x)


def qsgd(
    x: torch.Tensor,
    levels: int = 15,
    generator: torch.Generator | None = None,
    *,
    bucket: int = 0,
    coding: Literal["fixed", "elias", "elias_dense"] = "fixed",
) -> Packet:
    """Entries rounded at random to levels of the norm of their bucket; 0 is one bucket."""
    return packed(QSGD(levels=levels, bucket=bucket, coding=coding), x, generator)


def terngrad(
    x: torch.Tensor, clip: float | None = 2.5, generator: torch.Generator | None = None
) -> Packet:
    """Entries rounded at random to zero or the largest magnitude, after a cut."""
    return packed(TernGrad(clip=clip), x, generator)


def natural(x: torch.Tensor, generator: torch.Generator | None = None) -> Packet:
    """Entries rounded at random to powers of two."""
    return packed(Natural(), x, generator)


def onebit(x: torch.Tensor) -> Packet:
    """Entries as the mean of those below zero, or of the others."""
    return packed(OneBit(), x)


def sign(x: torch.Tensor, scale: Literal["none", "mean"] = "none") -> Packet:
    """Signs, as they are or times the mean magnitude."""
    return packed(Sign(scale=scale), x)


def topk(
    x: torch.Tensor,
    ratio: float,
    generator: torch.Generator | None = None,
    *,
    select: Literal["exact", "sampled"] = "exact",
) -> Packet:
    """The largest entries by magnitude.

    >>> import torch
    >>> packet = topk(torch.tensor([0.5, -3.0, 1.0, 0.0]), ratio=0.5)
    >>> packet.decode().tolist(), packet.nbytes
    ([0.0, -3.0, 1.0, 0.0], 9)
    """
    return packed(TopK(ratio=ratio, select=select), x, generator)


def randomk(
    x: torch.Tensor, ratio: float, generator: torch.Generator | None = None, *, scaled: bool = True
) -> Packet:
    """Entries drawn at random, times n / k if scaled."""
    return packed(RandomK(ratio=ratio, scaled=scaled), x, generator)


def threshold(x: torch.Tensor, threshold: float) -> Packet:
    """Entries of at least that magnitude."""
    return packed(Threshold(threshold=threshold), x)


def adacomp(x: torch.Tensor, bin_size: int = 500) -> Packet:
    """Entries of which twice the magnitude is at least the largest of their bin."""
    return packed(AdaComp(bin_size=bin_size), x)


def sbc(x: torch.Tensor, ratio: float) -> Packet:
    """The largest or the smallest entries, as their mean."""
    return packed(SBC(ratio=ratio), x)


def stc(x: torch.Tensor, ratio: float) -> Packet:
    """The largest entries by magnitude, as their sign times their mean magnitude."""
    return packed(STC(ratio=ratio), x)


def rotated(
    x: torch.Tensor, inner: Inner | None = None, generator: torch.Generator | None = None
) -> Packet:
    """What another compressor (QSGD) makes of randomly rotated entries."""
    return packed(Rotated() if inner is None else Rotated(inner=inner), x, generator)


def countsketch(
    x: torch.Tensor,
    ratio: float = 0.1,
    rows: int = 5,
    keep: float = 0.01,
    generator: torch.Generator | None = None,
) -> Packet:
    """The largest entries as a table of sums tells them."""
    return packed(CountSketch(ratio=ratio, rows=rows, keep=keep), x, generator)
