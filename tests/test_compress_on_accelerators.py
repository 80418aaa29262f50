"""What compressors make of tensors on an accelerator is what they make of them on the host."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo import bits
from polyreme.algo.compress import (
    SBC,
    STC,
    Cast,
    OneBit,
    Sign,
    Threshold,
    TopK,
    VarianceBased,
)
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.draw import Draw
from polyreme.algo.packet import Like
from polyreme.cluster.accelerator import detect

HERE = detect()
pytestmark = pytest.mark.skipif(HERE.on_host, reason="needs an accelerator")

MEMBERS: list[CompressorKind] = [
    Cast(),
    Sign(),
    Sign(scale="mean"),
    OneBit(),
    TopK(ratio=0.01),
    TopK(ratio=0.3),
    TopK(ratio=0.01, select="sampled"),
    Threshold(threshold=2.0),
    VarianceBased(alpha=0.5),
    SBC(ratio=0.01),
    STC(ratio=0.01),
]


@pytest.mark.parametrize("shape", [(1,), (9,), (3, 2049)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 5, 8, 9, 26, 40])
def test_bits_are_packed_there_as_here(width: int, shape: tuple[int, ...]) -> None:
    values = torch.randint(1 << width, shape, generator=torch.Generator().manual_seed(width))
    packed = bits.pack(values.to(HERE.device(0)), width)
    assert torch.equal(packed.cpu(), bits.pack(values, width))
    assert torch.equal(bits.unpack(packed, width, shape[-1]).cpu(), values)


@pytest.mark.parametrize("n", [1, 9, 5003, (1 << 21) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MEMBERS, ids=repr)
def test_packets_there_mean_what_they_mean_here(kind, dtype, n) -> None:
    generator = torch.Generator().manual_seed(n)
    found = []
    steps = [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    for device in (torch.device("cpu"), HERE.device(0)):
        state, decoded = kind.init(Like.of(steps[0])), []
        for step, x in enumerate(steps):
            like, draw = Like.of(x), Draw(seed=1, worker=0, step=step)
            buffers, state = kind.encode(x.to(device), state, draw)
            assert all(each.device.type == device.type for each in buffers)
            decoded.append(kind.decode(buffers, like).cpu())
        found.append(torch.stack(decoded))
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", MEMBERS, ids=repr)
def test_what_is_not_finite_there_means_what_it_means_here(kind, bad: float) -> None:
    x = torch.randn(5003, generator=torch.Generator().manual_seed(0))
    x[[7, 5002]] = bad
    decoded = []
    for there in (x, x.to(HERE.device(0))):
        like = Like.of(x)
        buffers, _ = kind.encode(there, kind.init(like), Draw(seed=1, worker=0, step=0))
        decoded.append(kind.decode(buffers, like).cpu())
    torch.testing.assert_close(*decoded, rtol=1e-5, atol=0, equal_nan=True)
