"""What accelerators compile, run as it is on the host: the same packets from the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from polyreme.algo import bits, counted, fused
from polyreme.algo.compress import (
    QSGD,
    Natural,
    TernGrad,
    drawn,
    natural,
    qsgd,
    rotated,
    tern_grad,
)
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.draw import Draw, mix
from polyreme.algo.packet import Like

torch.set_num_threads(1)
DRAW = Draw(seed=5, worker=1, step=2)
HOST = torch.device("cpu")
MODULES = (natural, qsgd, tern_grad)
MEMBERS: list[CompressorKind] = [
    QSGD(),
    QSGD(levels=1, bucket=4),
    QSGD(levels=300, bucket=64),
    Natural(),
    TernGrad(),
    TernGrad(clip=0),
]


@pytest.fixture
def there(monkeypatch) -> Callable[[bool], None]:
    """Whether members take the host's tensors for an accelerator's."""

    def take(yes: bool) -> None:
        for module in MODULES:
            monkeypatch.setattr(module, "applies", lambda x: yes and x.numel() > 0)

    return take


def _name(value: object) -> str:
    return repr(value).replace("'", "") if isinstance(value, CompressorKind) else str(value)


def _vector(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 9, 15, 16, 26, 31, 33])
def test_bits_packed_as_tensors_are_those_packed_as_words(width) -> None:
    generator = torch.Generator().manual_seed(width)
    for n in (0, 1, 7, 8, 9, 64, 1003):
        values = torch.randint(1 << width, (3, n), generator=generator)
        packed = bits.pack(values, width)
        assert torch.equal(bits.joined(values, width=width), packed)
        if n:
            assert torch.equal(bits.parted(packed, n, width=width), values)


def test_numbers_by_their_place_are_those_of_the_finaliser() -> None:
    key = DRAW.key("own", HOST)
    assert int(key) >= counted.COUNTED
    for place, found in enumerate(counted.hashed(key, 200).tolist()):
        assert (found - mix(place + int(key) - 1, 0)) % (1 << 64) == 0
    assert not torch.equal(key, DRAW.key("shared", HOST))
    assert not torch.equal(key, DRAW.at(0).key("own", HOST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MEMBERS, ids=_name)
def test_the_same_numbers_make_the_same_packet(kind, dtype, there, monkeypatch) -> None:
    def uniform(draw: Draw, like: torch.Tensor) -> torch.Tensor:
        return counted.uniform(draw.key("own", HOST), like.numel(), dtype=like.dtype).view(
            like.shape
        )

    monkeypatch.setattr(Draw, "uniform", uniform)
    for n in (1, 35, 4099):
        for bad in (1.0, 0.0, math.nan, -math.inf):
            x = (_vector(n) if bad else torch.zeros(n)).to(dtype)
            x[n // 2] = bad
            like = Like.of(x)
            there(False)
            here, _ = kind.encode(x, {}, DRAW)
            there(True)
            found, _ = kind.encode(x, {}, DRAW)
            for a, b, form in zip(found, here, kind.form(like), strict=True):
                assert a.dtype == b.dtype
                assert form.length == a.numel()
            decoded = kind.decode(found, like)
            there(False)
            for expected in (kind.decode(found, like), kind.decode(here, like)):
                assert torch.allclose(decoded, expected, rtol=1e-2, equal_nan=True)


def test_float64_keeps_its_digits(there) -> None:
    x = _vector(1000).double() * 1e-60
    there(True)
    for kind in (QSGD(levels=2**15), TernGrad(clip=0), Natural()):
        seen = kind.decode(kind.encode(x, {}, DRAW)[0], Like.of(x))
        assert seen.dtype == torch.float64
        if not isinstance(kind, Natural):
            assert 0 < seen.abs().max() < 1e-57


@pytest.mark.parametrize("few", [0, 1 << 12])
def test_any_entries_are_as_likely_to_be_drawn_together(few, monkeypatch) -> None:
    monkeypatch.setattr(drawn, "_FEW", few)
    counts = dict.fromkeys(combinations(range(8), 2), 0)
    for step in range(5600):
        pair = drawn.chosen(Draw(seed=0, worker=0, step=step).key("own", HOST), 8, 2)
        counts[tuple(pair.tolist())] += 1
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60  # 27 degrees of freedom


def test_entries_are_drawn_once_each() -> None:
    for n, k in ((1, 1), (5, 2), (5000, 1), (5000, 1250), (5000, 1251), (10, 10), (1 << 18, 9999)):
        where = drawn.chosen(DRAW.key("own", HOST), n, k)
        assert where.shape == (k,)
        assert (where.diff() > 0).all()
        assert where[0] >= 0
        assert where[-1] < n


def test_fewer_than_are_wanted_differ_among_those_drawn_first() -> None:
    """One more and an accelerator, which keeps all of these, sends other entries than are read."""
    for n, k in ((5000, 50), (5000, 1200), (1 << 18, 9999), (1 << 22, 1 << 15), (5000, 1)):
        sure = drawn._sure(n, k)
        assert sure < drawn._draws(n, k)
        for step in range(5):
            key = Draw(seed=0, worker=0, step=step).key("own", HOST)
            assert len(counted.below(key, sure, n).unique()) < k


def test_small_matrices_make_the_transform() -> None:
    for size in (1, 2, 8, 32, 64, 128, 256, 4096, 65536):
        rows = _vector(3 * size).double().view(3, size)
        assert torch.allclose(rotated._by_factors(rows), rotated.hadamard(rows), atol=1e-12)


def test_a_function_is_one_graph_for_all_sizes_and_its_options_are_constants(monkeypatch) -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    real = torch.compile
    monkeypatch.setattr(fused, "find_spec", lambda _: True)
    monkeypatch.setattr(
        torch, "compile", lambda plain, dynamic: real(plain, dynamic=dynamic, backend=backend)
    )
    fused._fused.cache_clear()
    try:
        for width in (5, 9):
            run = fused.fused(bits.joined, width=width)
            for n in (800, 1600, 2400, 72_000):
                values = torch.randint(1 << width, (n,))
                assert torch.equal(run(values), bits.pack(values, width))
    finally:
        fused._fused.cache_clear()
    assert len(graphs) == 2


def test_what_torch_cannot_compile_runs_as_it_is(monkeypatch) -> None:
    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        raise ValueError("no such device")

    real = torch.compile
    monkeypatch.setattr(fused, "find_spec", lambda _: True)
    monkeypatch.setattr(
        torch, "compile", lambda plain, dynamic: real(plain, dynamic=dynamic, backend=backend)
    )
    fused._fused.cache_clear()
    try:
        run = fused.fused(bits.joined, width=3)
        values = torch.arange(8)
        with pytest.warns(RuntimeWarning, match="joined runs uncompiled"):
            assert torch.equal(run(values), bits.pack(values, 3))
        assert torch.equal(run(values), bits.pack(values, 3))
    finally:
        fused._fused.cache_clear()
