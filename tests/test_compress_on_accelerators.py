"""What compressors make of tensors on an accelerator is what they make of them on the host."""

from __future__ import annotations

import math

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
    above,
    matrices,
    top_k,
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


@pytest.mark.parametrize("size", ["value", "magnitude", "turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 4096, 70_001, (1 << 21) + 5])
def test_entries_above_and_largest_ones_are_those_of_the_host(n, dtype, size) -> None:
    """Of equal ones the first; NaN and infinity above all."""
    generator = torch.Generator().manual_seed(n)
    drawn = torch.randn(n, generator=generator, dtype=torch.float64)
    tied = (3 * drawn).round() / 3
    odd = drawn.clone()
    odd[:: max(1, n // 7)], odd[n // 2], odd[n // 3] = math.nan, math.inf, -math.inf
    for entries in (drawn, tied, odd):
        here = entries.to(dtype)
        there = here.to(HERE.device(0))
        for least in (0.5, 2.0, math.inf):
            bound = here.new_tensor(least)
            expected = above.above(here, bound, size=size)
            assert torch.equal(above.above(there, bound.to(there), size=size).cpu(), expected)
        for k in {1, n // 100, n // 3} - {0}:
            if size == "turned":
                pair = top_k.smallest(here, k), top_k.smallest(there, k)
            elif size == "magnitude":
                pair = tuple(top_k.largest_magnitudes(x[None], k)[0] for x in (here, there))
            else:
                pair = top_k.largest(here, k), top_k.largest(there, k)
            assert torch.equal(pair[1].cpu(), pair[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "rank"), [(2, 2), (513, 3), (8192, 4), (5000, 8), (70_000, 4)])
def test_bases_span_what_was_given_and_are_orthonormal(rows, rank, dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    given = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    given[:, 1] = given[:, 0] + 1e-6 * given[:, 1]
    basis = matrices.orthonormal(given.to(dtype).to(HERE.device(0))).cpu().double()
    gram = basis.T @ basis
    near = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(gram, near, atol=1e-5, rtol=0.0)
    left = given - basis @ (basis.T @ given)
    assert float(left.norm() / given.norm()) < 1e-5


def test_a_column_that_is_not_finite_makes_its_basis_so() -> None:
    given = torch.ones(512, 2)
    given[7, 0] = math.nan
    assert matrices.orthonormal(given.to(HERE.device(0))).isnan().all()
