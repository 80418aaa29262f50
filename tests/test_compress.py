"""Compressors against GRACE's outputs (tests/golden/grace_compress.npz holds its source)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyreme.algo.compress import (
    QSGD,
    STC,
    Cast,
    CountSketch,
    Natural,
    OneBit,
    RandomK,
    Rotated,
    Sign,
    TernGrad,
    Threshold,
    TopK,
    functions,
)
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.draw import Draw
from polyreme.algo.packet import Like, Packet

torch.set_num_threads(1)

GRACE = np.load(Path(__file__).parent / "golden" / "grace_compress.npz")
PLACES = [(step, worker) for step in range(5) for worker in range(2)]


class Fed:
    """A draw whose uniform numbers are given."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = torch.from_numpy(numbers)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self.numbers.view(like.shape)


def _packet(kind: CompressorKind, x: torch.Tensor, draw: Any = None) -> Packet:
    like = Like.of(x)
    draw = Draw(seed=5, worker=0, step=0) if draw is None else draw
    buffers, _ = kind.encode(x, kind.init(like), draw)
    return Packet(buffers=buffers, like=like, kind=kind)


def _input(name: str, step: int, worker: int) -> torch.Tensor:
    x = GRACE["grads"][step, worker]
    if name.endswith("_ef") and step:
        x = x + GRACE[name + "/residual"][step - 1, worker]
    return torch.from_numpy(x)


@pytest.mark.parametrize(("step", "worker"), PLACES)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("topk0.3_ef", TopK(ratio=0.3)),
        ("topk0.001_ef", TopK(ratio=0.001)),
        ("threshold0.5_ef", Threshold(threshold=0.5)),
        ("fp16", Cast(to="fp16")),
        ("signsgd", Sign()),
        ("qsgd16_b8", QSGD(levels=16, bucket=8)),
        ("qsgd4_b128", QSGD(levels=4, bucket=128)),
        ("terngrad", TernGrad()),
    ],
)
def test_decodes_as_grace_s(name: str, kind: CompressorKind, step: int, worker: int) -> None:
    draws = GRACE[name + "/draws"][step, worker] if name + "/draws" in GRACE else None
    draw = None if draws is None else Fed(draws)
    decoded = _packet(kind, _input(name, step, worker), draw).decode()
    expected = GRACE[name + "/decompressed"][step, worker]
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("worker", [0, 1])
def test_one_bit_has_the_means_that_grace_s_slip_hides(worker: int) -> None:
    x = _input("onebit_ef", 0, worker)
    hidden = GRACE["onebit_ef/decompressed"][0, worker].astype(np.float64)
    upper = hidden[x.numpy() >= 0].mean() / 255
    lower = hidden[x.numpy() < 0].mean() - 254 * upper
    expected = np.where(x.numpy() >= 0, upper, lower)
    np.testing.assert_allclose(_packet(OneBit(), x).decode(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("step", "worker"), PLACES)
def test_random_k_sends_what_grace_s_does_of_its_indices(
    step: int, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "randomk0.3_ef"
    expected = GRACE[name + "/decompressed"][step, worker]
    drawn = torch.from_numpy(expected.reshape(-1) != 0).to(torch.int8)
    order = drawn.argsort(descending=True, stable=True)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    kind = RandomK(ratio=int(drawn.sum()) / 30, scaled=False)
    decoded = _packet(kind, _input(name, step, worker)).decode()
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=0, atol=1e-6)


def test_a_threshold_above_all_entries_sends_none() -> None:
    packet = _packet(Threshold(threshold=5.0), torch.tensor([-1.0, 4.9]))
    assert packet.decode().tolist() == [0.0, 0.0]
    assert packet.nbytes == 8  # two lengths


def test_bytes_are_those_of_the_papers() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sizes = {
        QSGD(levels=7, bucket=100): 40 + 500,  # ten norms, four bits an entry
        TernGrad(): 4 + 200,
        Natural(): 1125,
        Sign(): 125,
        Sign(scale="mean"): 4 + 125,
        OneBit(): 8 + 125,
        Cast(): 2000,
        TopK(ratio=0.01): 13 + 40,  # ten indices of ten bits
        TopK(ratio=0.5): 125 + 2000,  # one bit an entry is less than 500 indices
        TopK(ratio=1.0): 4000,
        RandomK(ratio=0.01): 8 + 40,
        CountSketch(ratio=0.1, rows=5): 8 + 400,
        Rotated(inner=Sign(), block=64): 8 + 128,
    }
    assert {kind: _packet(kind, x).nbytes for kind in sizes} == sizes


VECTOR = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _mean_square_error(kind: CompressorKind, n: int = 4000) -> float:
    decoded = _packet(kind, VECTOR.repeat(n)).decode().view(n, -1)
    return float((decoded - VECTOR).square().sum(1).mean() / VECTOR.square().sum())


@pytest.mark.parametrize("levels", [1, 4, 16])
def test_qsgd_varies_no_more_than_lemma_3_1_says(levels: int) -> None:
    bound = min(64 / levels**2, 8 / levels)
    error = _mean_square_error(QSGD(levels=levels, bucket=64))
    assert 0.05 * bound < error <= bound


def test_natural_varies_by_at_most_an_eighth() -> None:
    assert 0.02 < _mean_square_error(Natural()) <= 1 / 8


def test_random_k_varies_by_n_over_k_less_one() -> None:
    assert _mean_square_error(RandomK(ratio=0.25)) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("kind", [TopK(ratio=0.25), STC(ratio=0.25), Sign(scale="mean")])
def test_contractions_lose_what_their_papers_say(kind: CompressorKind) -> None:
    sent = _packet(kind, VECTOR).decode()
    lost = float((VECTOR - sent).square().sum())
    whole = float(VECTOR.square().sum())
    size = VECTOR.abs()
    if isinstance(kind, TopK):
        expected = whole - float(size.sort().values[-16:].square().sum())
        assert expected < 0.75 * whole
    elif isinstance(kind, STC):
        expected = whole - float(size.sort().values[-16:].sum()) ** 2 / 16
    else:
        expected = whole - float(size.sum()) ** 2 / 64
    assert lost == pytest.approx(expected, abs=1e-12)


def test_natural_takes_the_two_powers_beside_an_entry_as_often_as_is_right() -> None:
    x = torch.full((100_000,), 2.5)
    decoded = _packet(Natural(), x).decode()
    assert set(decoded.tolist()) == {2.0, 4.0}
    assert float((decoded == 4.0).float().mean()) == pytest.approx(0.25, abs=0.007)
    exact = torch.tensor([1.0, -2.0, 0.0, 2.0**-126, 2.0**127, -(2.0**-40)])
    assert torch.equal(_packet(Natural(), exact).decode(), exact)
    edges = torch.tensor([2.0**-149, 3e38, 65504.0])
    assert set(_packet(Natural(), edges[:1].repeat(99)).decode().tolist()) == {0.0}
    assert float(_packet(Natural(), edges[1:2]).decode()) == 2.0**127
    assert float(_packet(Natural(), edges[2:].half()).decode()) == 2.0**15


def test_terngrad_cuts_at_its_deviations_but_not_where_all_are_equal() -> None:
    x = torch.tensor([10.0] + [0.0] * 99)
    cut = 2.5 * float(x.double().std(correction=0))
    assert _packet(TernGrad(), x, Fed(np.zeros(100))).decode().max() == pytest.approx(cut)
    assert _packet(TernGrad(clip=0), x).decode().max() == 10.0
    for same in (torch.full((8,), 0.3), torch.tensor([0.7])):
        decoded = _packet(TernGrad(), same, Fed(np.zeros(same.numel()))).decode()
        assert torch.equal(decoded, same)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_qsgd_s_norm_neither_vanishes_nor_overflows(size: float) -> None:
    x = torch.tensor([size, -size, size, 0.0])
    expected = x.double().norm() / 3
    decoded = _packet(QSGD(levels=3), x, Fed(np.full(4, 0.99))).decode()
    torch.testing.assert_close(decoded.double().abs().max(), expected, rtol=1e-6, atol=0)


def test_functions_give_packets_of_their_compressors() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
    for name in ("cast", "terngrad", "natural", "onebit", "sign", "adacomp", "rotated", "qsgd"):
        packet = getattr(functions, name)(x)
        assert packet.decode().shape == x.shape
        assert 0 < packet.nbytes < 4 * x.numel()
    for name in ("topk", "randomk", "sbc", "stc", "threshold", "countsketch"):
        packet = getattr(functions, name)(x, 0.5)
        assert packet.decode().shape == x.shape
    assert functions.topk(x, 0.1).decode().count_nonzero() == 20
    assert functions.threshold(x, 0.5).decode().abs().sum() == x[x.abs() >= 0.5].abs().sum()


def test_functions_draw_from_the_generator_given() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first = functions.qsgd(x, 1, one).decode()
    assert torch.equal(first, functions.qsgd(x, 1, two).decode())
    assert not torch.equal(first, functions.qsgd(x, 1, one).decode())
    torch.manual_seed(0)
    first = functions.qsgd(x, 1).decode()
    torch.manual_seed(0)
    assert torch.equal(first, functions.qsgd(x, 1).decode())
    weight = x.clone().requires_grad_()
    assert not functions.topk(weight, 0.1).decode().requires_grad
