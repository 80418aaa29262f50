"""Robust aggregates of rows on an accelerator are those of the same rows on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyreme as pr
from polyreme.cluster.accelerator import detect

HERE = detect()
pytestmark = pytest.mark.skipif(HERE.on_host, reason="needs an accelerator")

F = 3
AGGREGATES: dict[str, Callable[[Any], torch.Tensor]] = {
    "Krum": lambda x: pr.aggregate.krum(x, F),
    "MultiKrum": lambda x: pr.aggregate.multi_krum(x, F),
    "coordinate median": lambda x: pr.aggregate.coordinate_median(x, F),
    "trimmed mean": lambda x: pr.aggregate.trimmed_mean(x, F),
    "geometric median": lambda x: pr.aggregate.geometric_median(x, F),
    "centered clipping": lambda x: pr.aggregate.centered_clipping(x, F, tau=100.0, iterations=3),
    "minimum diameter": lambda x: pr.aggregate.minimum_diameter_averaging(x, F),
    "MoNNA": lambda x: pr.aggregate.monna(x, F),
    "mean around median": lambda x: pr.aggregate.mean_around_median(x, F),
}


def _rows(n: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * n + d)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("n", "d", "dtype"),
    [
        *((32, 100_003, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *((n, d, torch.float32) for n, d in ((19, 1), (65, 4_000), (9, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", AGGREGATES)
def test_an_accelerators_rows_have_the_hosts_aggregate(name, n, d, dtype) -> None:
    if name == "minimum diameter" and n == 65:
        pytest.skip("has more subsets than are looked through")
    rows = _rows(n, d, dtype)
    if n == 9:
        rows = rows[:, :0]
    there = rows.to(HERE.device(0))
    expected = AGGREGATES[name](rows)
    found = AGGREGATES[name](there)
    assert found.device == there.device
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(found.cpu(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", AGGREGATES)
def test_a_row_that_is_not_finite_is_set_aside_there_too(name, bad) -> None:
    rows = _rows(32, 5_000, torch.float32)
    rows[4, 4_321] = bad
    rows[7] = bad
    found = AGGREGATES[name](rows.to(HERE.device(0)))
    assert torch.allclose(found.cpu(), AGGREGATES[name](rows), rtol=1e-5, atol=1e-6)
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ["coordinate median", "trimmed mean", "mean around median"])
def test_ties_go_there_as_on_the_host(name) -> None:
    rows = torch.randint(0, 3, (32, 3_000), generator=torch.Generator().manual_seed(0)).float()
    found = AGGREGATES[name](rows.to(HERE.device(0)))
    assert torch.allclose(found.cpu(), AGGREGATES[name](rows), rtol=1e-6)
