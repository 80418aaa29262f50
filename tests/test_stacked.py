"""Tensors alike that are compressed as rows of one come to the bits of each alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from polyreme.algo import stacked
from polyreme.algo.compress import QSGD, RandomK, Sign, TopK, VarianceBased
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.draw import Draw
from polyreme.algo.packet import Like, Message, Packet, from_bytes, to_bytes

torch.set_num_threads(1)

SHAPES = [(7, 5), (3,), (), (35,), (7, 5), (0, 3), (3,), (), (7, 5), (0, 3)]
KINDS = [
    QSGD(),
    QSGD(levels=300, bucket=4),
    QSGD(levels=1, coding="elias"),
    TopK(ratio=0.1),
    TopK(ratio=0.7),
    TopK(ratio=1.0),
    TopK(ratio=0.3, select="sampled"),
    RandomK(ratio=0.3),
    Sign(),
    VarianceBased(alpha=0.5),
]
DRAW = Draw(seed=5, worker=1, step=3)


def _tensors(dtype: torch.dtype, odd: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    xs = [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]
    if odd == "ties":
        return [(2 * x).round() for x in xs]
    if odd:
        xs[4][2, 1] = float(odd)
    return xs


def _bits(x: torch.Tensor) -> list[int]:
    return x.reshape(-1).view(torch.uint8).tolist()


def _alone(kind: CompressorKind, xs: Sequence[torch.Tensor]) -> list[Packet]:
    likes = [Like.of(x) for x in xs]
    encoded = [
        kind.encode(x, kind.init(like), DRAW.at(index))[0]
        for index, (x, like) in enumerate(zip(xs, likes, strict=True))
    ]
    return [Packet(buffers=b, like=like, kind=kind) for b, like in zip(encoded, likes, strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", ["", "ties", "nan", "inf", "0"])
def test_together_is_each_alone(kind: CompressorKind, dtype: torch.dtype, odd: str) -> None:
    xs = _tensors(dtype, odd)
    before = [x.clone() for x in xs]
    wanted = _alone(kind, xs)
    kinds = [(kind, packet.like) for packet in wanted]
    packets, after = stacked.encoded(
        kinds,
        [x.reshape(-1) for x in xs],
        [kind.init(like) for _, like in kinds],
        [DRAW.at(index) for index in range(len(xs))],
    )
    assert len(after) == len(xs)
    assert all(_bits(x) == _bits(y) for x, y in zip(xs, before, strict=True))
    data = to_bytes(Message(packets=tuple(packets)))
    assert torch.equal(data, to_bytes(Message(packets=tuple(wanted))))
    received = from_bytes(data, tuple(kinds)).packets
    decoded = stacked.decoded(packets), stacked.decoded(received)
    for x, *found in zip(wanted, *decoded, strict=True):
        for each in found:
            assert (each.shape, each.dtype) == (x.decode().shape, x.decode().dtype)
            assert _bits(each) == _bits(x.decode())
    if kind.sparse:
        for x, mask in zip(wanted, stacked.kept(packets), strict=True):
            assert torch.equal(mask, kind.kept(x.buffers, x.like))


def test_large_tensors_are_not_copied_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    encode_rows = TopK.encode_rows
    monkeypatch.setattr(
        TopK,
        "encode_rows",
        lambda self, rows, draws: sizes.append(rows.shape) or encode_rows(self, rows, draws),
    )
    shapes = [(stacked.SMALL + 1,), (8,), (stacked.SMALL + 1,), (8,)]
    kinds = [(TopK(), Like(shape, "float32")) for shape in shapes]
    xs = [torch.randn(shape) for shape in shapes]
    stacked.encoded(kinds, xs, [{}] * 4, [DRAW] * 4)
    assert sorted(map(tuple, sizes)) == [(1, stacked.SMALL + 1), (1, stacked.SMALL + 1), (2, 8)]
