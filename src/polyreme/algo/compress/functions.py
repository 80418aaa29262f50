"""Compressors as plain functions of one tensor: each gives a packet with `nbytes` and `decode()`.

They are one exchange without memory; whatever is drawn comes from `generator`, or from torch's
own where none is given. Those that keep something from step to step (AdaComp, VarianceBased) start
from nothing. PowerSGD and gTop-k exchange in rounds; low-rank and top-k packets are what they are
between two workers. Options that are not legal raise ConfigError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from ...errors import ConfigError, Violation
from ..draw import Draw
from ..legal import checked, no_member
from ..packet import Like, Packet
from . import Compressor, own
from .ada_comp import AdaComp
from .atomo import ATOMO
from .cast import Cast
from .count_sketch import CountSketch
from .dense import Dense
from .kind import CompressorKind
from .low_rank import LowRank
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
from .variance import VarianceBased

if TYPE_CHECKING:
    import torch


def packed(
    kind: CompressorKind, x: torch.Tensor, generator: torch.Generator | None = None
) -> Packet:
    """What any compressor, one's own too, makes of a tensor as its first packet.

    One's own is held to its form, and to the shape and type that it decodes to.
    """
    import torch

    _packets(kind, x, generator)
    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(1 << 62, (), generator=generator, device=device))
    like = Like.of(x)
    detached = x.detach()
    encoded = kind.encode(detached, kind.init(like), Draw(seed=seed, worker=0, step=0))
    if type(kind) in get_args(Compressor):
        return Packet(buffers=encoded[0], like=like, kind=kind)
    packet = Packet(buffers=own.buffers(encoded, kind, like), like=like, kind=kind)
    own.decodes(packet)
    return packet


def _packets(kind: CompressorKind, x: torch.Tensor, generator: torch.Generator | None) -> None:
    """Raises ConfigError unless the compressor is legal and makes packets of such a tensor."""
    import torch

    if not isinstance(kind, CompressorKind):
        raise no_member("compress", kind, [e for e in get_args(Compressor) if not e.in_rounds])
    name = type(kind).__name__
    checked(kind, name)
    found = []
    if kind.in_rounds:
        rule = "exchanges in rounds among all workers, and so has no packets"
        legal = "any compressor that makes packets"
        found.append(Violation(path="compress", value=name, rule=rule, legal=legal))
    tensor = isinstance(x, torch.Tensor)
    if not (tensor and x.is_floating_point()):
        value = str(x.dtype) if tensor else type(x).__name__
        rule, legal = "is no tensor of real numbers", "float32, float64, bfloat16, float16"
        found.append(Violation(path="x", value=value, rule=rule, legal=legal))
    if not isinstance(generator, torch.Generator | None):
        rule, legal = "is no generator", "torch.Generator(), None"
        value = repr(generator)
        found.append(Violation(path="generator", value=value, rule=rule, legal=legal))
    if found:
        raise ConfigError(found)


def dense(x: torch.Tensor) -> Packet:
    """All entries as they are."""
    return packed(Dense(), x)


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
    x: torch.Tensor, clip: float = 2.5, generator: torch.Generator | None = None
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


def variancebased(x: torch.Tensor, alpha: float = 1.0, decay: float = 0.999) -> Packet:
    """Entries that are large against how much they vary; of one tensor alone, as from nothing."""
    return packed(VarianceBased(alpha=alpha, decay=decay), x)


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


def lowrank(x: torch.Tensor, rank: int = 2, generator: torch.Generator | None = None) -> Packet:
    """A matrix as a product of two thin ones, by a step of power iteration; vectors as they are."""
    return packed(LowRank(rank=rank), x, generator)


def atomo(x: torch.Tensor, rank: int = 2, generator: torch.Generator | None = None) -> Packet:
    """A matrix as singular vectors, drawn; vectors as they are."""
    return packed(ATOMO(rank=rank), x, generator)
