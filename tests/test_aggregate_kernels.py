"""Compiled columns in order against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import polyreme as pr
from polyreme.algo import aggregate
from polyreme.algo.aggregate import geometry, kernels, ordered
from polyreme.algo.aggregate.ordered import Order, finite_rows, middle, squared_from
from polyreme.algo.aggregate.robust import RobustKind
from polyreme.algo.effects import alone


def _rows(n: int, d: int, dtype: torch.dtype, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    if ties:
        return torch.randint(-2, 3, (n, d), generator=generator).to(dtype)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def _orders(n: int) -> list[Order]:
    keeps = sorted({1, (n + 1) // 2, max(1, n - 1), n})
    trimmed = [Order(places=range(f, n - f)) for f in range(min(3, (n + 1) // 2))]
    return [Order(places=middle(n)), *trimmed, *(Order(places=middle(n), keep=k) for k in keeps)]


@pytest.mark.slice(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 12, 33, 64])
def test_compiled_columns_are_what_torch_makes(n: int, ties: bool, dtype: torch.dtype) -> None:
    """Of rows that are cut out of longer ones, over tiles that are not full."""
    whole = _rows(n, 5000, dtype, ties)
    block = whole[:, 400:4803]
    for order in _orders(n):
        out, seen = kernels.played(block, order)
        most = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(out, order.of(block), rtol=most, atol=most)
        if order.keep is None and len(order.places) <= 2:
            assert torch.equal(out, order.of(block))
        assert not seen[0].any()
        torch.testing.assert_close(seen[1], squared_from(block, out), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_compiled_columns_tell_which_rows_are_not_finite(bad: float) -> None:
    block = _rows(9, 3000, torch.float32)
    block[2, 2999] = block[7, 0] = bad
    block[4] = torch.finfo(torch.float32).max  # its squared distance is not finite, its entries are
    for order in _orders(9):
        _, seen = kernels.played(block, order)
        assert torch.equal(seen[0] > 0, ~finite_rows(block))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_columns(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LEAST", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    block = _rows(7, 3100, torch.float32)
    out, seen = kernels.played(block, Order(places=middle(7)))
    assert torch.equal(out, block.median(0).values)
    torch.testing.assert_close(seen[1], squared_from(block, out), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        aggregate.CoordinateMedian(byzantine=2),
        aggregate.TrimmedMean(byzantine=2),
        aggregate.MeanAroundMedian(byzantine=2),
        aggregate.Bulyan(byzantine=2),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_an_aggregate_of_compiled_columns_is_that_of_others(
    kind: RobustKind, spoilt: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(12, 2500, dtype)
    rows[5] += 3
    if spoilt:
        rows[8, 1000] = torch.nan
    expected, _, suspects = alone(kind.combine(rows, {}))
    calls: list[int] = []
    played = kernels.played
    monkeypatch.setattr(ordered, "_COMPILED", 1)
    monkeypatch.setattr(kernels, "played", lambda *given: calls.append(1) or played(*given))
    out, _, named = alone(kind.combine(rows, {}))
    assert calls
    assert named == suspects
    assert out.dtype == dtype
    most = 1e-5 if dtype == torch.float32 else 1e-2
    np.testing.assert_allclose(out.float(), expected.float(), rtol=most, atol=most)
    piece = torch.cat(list(pr.aggregate.in_chunks(kind, lambda: rows.split(900, dim=1))))
    np.testing.assert_allclose(piece.float(), expected.float(), rtol=most, atol=most)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 33])
def test_what_is_sorted_off_the_host_is_what_the_network_makes(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = _rows(n, 300, torch.float64)
    for order in _orders(n):
        expected = order.of(block)
        squared = squared_from(block, expected)
        monkeypatch.setattr(ordered, "on_host", lambda _: False)
        torch.testing.assert_close(order.of(block), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(squared_from(block, expected), squared)
        monkeypatch.undo()


@pytest.mark.parametrize("k", [0, 1, 8192, 20_000])
def test_dot_products_in_parts_are_those_of_whole_rows(k: int) -> None:
    block = _rows(7, k, torch.float32)
    expected = block.double() @ block.double().T
    torch.testing.assert_close(geometry._in_parts(block).double(), expected, rtol=1e-6, atol=1e-3)
