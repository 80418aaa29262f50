"""What is drawn and compiled on an accelerator keeps to the packets that a host reads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch

from polyreme.algo.compress import (
    QSGD,
    SBC,
    STC,
    CountSketch,
    LowRank,
    Natural,
    OneBit,
    RandomK,
    Rotated,
    Sign,
    TernGrad,
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

DRAWING: list[CompressorKind] = [
    QSGD(),
    QSGD(levels=1, bucket=4),
    QSGD(levels=1, coding="elias"),
    TernGrad(),
    TernGrad(clip=0),
    Natural(),
    RandomK(ratio=0.01),
    RandomK(ratio=0.3, indices="own", scaled=False),
    Rotated(),
    Rotated(inner=RandomK(ratio=0.1), block=64),
    Rotated(inner=TopK(ratio=0.1), block=65536),
    CountSketch(ratio=2.0, keep=0.3),
]
PLAIN: list[CompressorKind] = [
    Sign(),
    Sign(scale="mean"),
    OneBit(),
    TopK(ratio=0.01),
    TopK(ratio=0.3),
    TopK(ratio=0.01, select="sampled"),
    Threshold(threshold=2.5),
    VarianceBased(alpha=0.5),
    SBC(ratio=0.01),
    STC(ratio=0.01),
]
DRAW = Draw(seed=5, worker=1, step=2)


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    """What torch cannot compile runs as it is, with a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs uncompiled.*")
        yield


def _name(value: object) -> str:
    return repr(value).replace("'", "") if isinstance(value, CompressorKind) else str(value)


def _drawn(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    rtol = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(expected.dtype, 1e-5)
    there = found.cpu().double()
    return torch.allclose(there, expected.double(), rtol=rtol, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((n, torch.float32) for n in (0, 1, 33, 4_099, 65_536)),
        (4_099, torch.float64),
        (4_099, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [*DRAWING, *PLAIN], ids=_name)
def test_a_host_reads_what_an_accelerator_wrote(kind, n, dtype) -> None:
    x = _drawn(n, dtype).to(HERE.device(0))
    like = Like.of(x)
    buffers, _ = kind.encode(x, kind.init(like), DRAW)
    for buffer, form in zip(buffers, kind.form(like), strict=True):
        assert str(buffer.dtype).removeprefix("torch.") == form.dtype
        assert form.length in (None, buffer.numel())
    there = kind.decode(buffers, like)
    here = kind.decode(tuple(buffer.cpu() for buffer in buffers), like)
    assert there.device == x.device
    assert there.dtype == dtype
    assert _close(there, here)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("n", [33, 4_099, 1_500_007])
@pytest.mark.parametrize("kind", PLAIN, ids=_name)
def test_what_draws_nothing_means_the_same_there(kind, n, bad) -> None:
    x = _drawn(n)
    if bad is not None:
        x[n // 2] = bad
    like = Like.of(x)
    here, _ = kind.encode(x, kind.init(like), DRAW)
    there, _ = kind.encode(x.to(HERE.device(0)), kind.init(like), DRAW)
    assert all(_close(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("kind", [TopK(ratio=0.01), STC(ratio=0.01), SBC(ratio=0.01)], ids=_name)
@pytest.mark.parametrize("case", ["rounded", "zero", "stripes", "NaN", "long ties"])
def test_ties_of_many_entries_go_to_the_first(kind, case) -> None:
    x = _drawn(1_200_001)
    if case == "rounded":
        x = (8 * x).round()
    elif case == "zero":
        x = torch.where(x.abs() > 3.5, x, 0.0)
    elif case == "stripes":
        x[::1024] *= 100
    elif case == "NaN":
        x[::97] = math.nan
    else:
        x = x.sign()
    here, _ = kind.encode(x, {}, DRAW)
    there, _ = kind.encode(x.to(HERE.device(0)), {}, DRAW)
    assert all(_close(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize(
    "kind",
    [QSGD(), QSGD(levels=1, bucket=4), TernGrad(clip=0), Natural(), RandomK(ratio=0.2), Rotated()],
    ids=_name,
)
def test_the_mean_over_draws_there_is_what_was_encoded(kind) -> None:
    n, times = 600, 3_000
    x = _drawn(n).to(HERE.device(0))
    like, total, squares = Like.of(x), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(times):
        buffers, _ = kind.encode(x, {}, Draw(seed=0, worker=0, step=step))
        seen = kind.decode(buffers, like)
        total, squares = total + seen, squares + seen.square()
    mean = total / times
    error = ((squares / times - mean.square()).clamp(min=0) / times).sqrt()
    # Of what comes a few times in all draws the error is not told by those that came.
    rare = 8 * float(seen.abs().max()) / times
    assert ((mean - x).abs() <= 6 * error + rare).all()
    assert (mean - x).square().sum() <= 2 * error.square().sum() + 1e-5


@pytest.mark.parametrize("kind", DRAWING, ids=_name)
def test_what_is_drawn_there_is_the_workers_and_the_steps(kind) -> None:
    x = _drawn(4_099).to(HERE.device(0))
    first, again, other = (
        kind.decode(kind.encode(x, {}, Draw(seed=1, worker=0, step=step))[0], Like.of(x))
        for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "kind", [RandomK(ratio=0.01), Rotated(), CountSketch(ratio=2.0, keep=0.3)], ids=_name
)
def test_an_accelerator_reads_what_a_host_drew(kind) -> None:
    x = _drawn(50_000)
    like = Like.of(x)
    buffers, _ = kind.encode(x, {}, DRAW)
    there = kind.decode(tuple(buffer.to(HERE.device(0)) for buffer in buffers), like)
    assert _close(there, kind.decode(buffers, like))


@pytest.mark.parametrize("kind", [QSGD(), TopK(ratio=0.1)], ids=_name)
def test_rows_there_have_the_bits_of_each_alone(kind) -> None:
    rows = torch.stack([_drawn(777), 3 * _drawn(777), torch.zeros(777)]).to(HERE.device(0))
    draws = [DRAW.at(row) for row in range(3)]
    columns, seen = kind.encode_rows(rows, draws)
    for row in range(3):
        alone, _ = kind.encode(rows[row], {}, draws[row])
        assert all(torch.equal(a[row], b) for a, b in zip(columns, alone, strict=True))
        assert torch.equal(seen[row], kind.decode(alone, Like.of(rows[row])))


def test_a_long_vector_after_a_short_one_has_its_own_norm() -> None:
    for n in (16, 5_000_003):
        x = _drawn(n)
        buffers, _ = QSGD().encode(x.to(HERE.device(0)), {}, DRAW)
        assert math.isclose(float(buffers[0]), float(x.double().norm()), rel_tol=1e-6)


def test_few_of_very_many_entries_are_each_drawn_once() -> None:
    kind, n = RandomK(ratio=0.01), 3_000_000
    x = torch.ones(n, device=HERE.device(0))
    buffers, _ = kind.encode(x, {}, DRAW)
    kept = kind.kept(buffers, Like.of(x)).cpu()
    assert int(kept.sum()) == 30_000
    counts = kept.view(300, -1).sum(1).double()
    assert ((counts - 100).square().sum() / 100 - 300).abs() < 6 * math.sqrt(600)


def test_a_matrix_of_low_rank_comes_back_there() -> None:
    left, right = _drawn(300 * 2).view(300, 2), _drawn(200 * 2 + 2)[2:].view(200, 2)
    x = (left @ right.T).to(HERE.device(0))
    kind, like = LowRank(rank=2), Like.of(x)
    buffers, state = kind.encode(x, kind.init(like), DRAW)
    assert torch.allclose(kind.decode(buffers, like), x, rtol=1e-3, atol=1e-3)
    buffers, _ = kind.encode(x, state, DRAW)
    assert torch.allclose(kind.decode(buffers, like), x, rtol=1e-3, atol=1e-3)
