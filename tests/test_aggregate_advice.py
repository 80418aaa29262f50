"""What aggregators say of themselves, and the network that orders their entries."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch

import aggregators as by
import polyreme as pr
from polyreme.algo.aggregate import advice, ordered
from polyreme.algo.aggregate.before import Bucketing
from polyreme.algo.aggregate.robust import RobustKind


def _ratio(kind: RobustKind, rows: torch.Tensor) -> float:
    mean = rows.mean(0)
    spread = float((rows - mean).square().sum(1).mean())
    return float((pr.aggregate.combined(kind, rows) - mean).square().sum()) / spread


@pytest.mark.parametrize(("n", "f"), [(16, 3), (15, 2), (11, 1), (12, 0)])
@pytest.mark.parametrize("member", by.MEMBERS)
def test_no_rows_cost_more_than_epsilon_and_some_cost_it_where_it_is_exact(
    member: type[RobustKind], n: int, f: int
) -> None:
    kind = member(byzantine=f)
    said = advice.of(kind, n)
    assert said.refused is None
    assert said.bound == f / (n - f)
    found = 0.0
    generator = torch.Generator().manual_seed(n)
    drawn = [torch.randn(n, 3, generator=generator, dtype=torch.float64).exp() for _ in range(20)]
    for k in range(1, n):
        two = torch.zeros(n, 1, dtype=torch.float64)
        two[n - k :] = 1
        drawn.append(two)
    for rows in drawn:
        found = max(found, _ratio(kind, rows))
    assert found <= said.epsilon + 1e-9
    assert said.epsilon >= said.bound
    if said.exact:
        assert found == pytest.approx(said.epsilon, abs=1e-9)


def test_every_robust_aggregator_is_advised_on_or_refused_with_its_rule() -> None:
    found = {each.kind: each for each in advice.advised(10, 3)}
    assert set(found) == {member.__name__ for member in by.MEMBERS}
    assert {kind for kind, each in found.items() if each.refused} == {"Bulyan"}
    assert found["Bulyan"].refused == "Bulyan takes n >= 4 f + 3 rows: 15 for f = 3, not 10"
    assert found["Bulyan"].breakdown == 1
    assert found["Krum"].breakdown == 3
    assert found["TrimmedMean"].breakdown == 4
    assert found["TrimmedMean"].epsilon == 3 / 7
    for each in found.values():
        assert each.source
        assert each.time
        assert each.memory
        assert each.assumes


def test_nothing_is_promised_of_rows_that_are_mixed_before() -> None:
    kind = by.MEMBERS[3](byzantine=1, before=(Bucketing(s=2),))
    assert math.isinf(advice.of(kind, 10).epsilon)
    assert advice.of(kind, 10).breakdown == 2


@pytest.mark.parametrize("n", [*range(1, 12), 16, 31, 33, 64, 70])
def test_a_network_orders_every_column(n: int) -> None:
    block = torch.randn(n, 200, generator=torch.Generator().manual_seed(n))
    kept = block.clone()
    expected = block.sort(dim=0).values
    for start, stop in ((0, n), (n // 3, n // 2 + 1), (n - 1, n)):
        found = torch.stack(ordered.ascending(block, range(start, stop)))
        assert torch.equal(found, expected[start:stop])
    assert torch.equal(block, kept)


@pytest.mark.parametrize("n", range(2, 11))
def test_a_network_orders_all_columns_of_zeros_and_ones(n: int) -> None:
    """Which then it does any: the zero-one principle."""
    block = torch.tensor(list(product([0.0, 1.0], repeat=n))).T.contiguous()
    rows = ordered.ascending(block, range(n))
    assert all(bool((low <= high).all()) for low, high in pairwise(rows))
    assert torch.equal(torch.stack(rows).sum(0), block.sum(0))


def test_rows_whose_sum_passes_the_largest_number_are_finite() -> None:
    block = torch.full((3, 8), 3e38)
    block[1] *= -1
    block[2, 3] = torch.nan
    assert ordered.finite_rows(block).tolist() == [True, True, False]
