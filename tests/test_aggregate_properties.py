"""Laws of robust aggregators over drawn rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import aggregators as by
import polyreme as pr
from polyreme.algo import aggregate
from polyreme.algo.aggregate.before import ARC, Bucketing, NearestNeighbourMixing
from polyreme.algo.aggregate.robust import RobustKind
from polyreme.errors import ConfigError

EPS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BEFORE: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "mixed": (NearestNeighbourMixing(),),
    "clipped": (ARC(),),
}
NO_INDEX = [member for member in by.MEMBERS if member is not aggregate.MoNNA]


def _drawn(
    member: type[RobustKind], seed: int, dtype: torch.dtype, **options: Any
) -> tuple[RobustKind, torch.Tensor]:
    """A member and rows: honest ones about a point, hostile ones far from it."""
    drawn = np.random.default_rng(seed)
    f = int(drawn.integers(0, 3))
    kind = member(byzantine=f, **options)
    n, d = kind.least(f) + int(drawn.integers(0, 5)), int(drawn.integers(1, 60))
    rows = drawn.normal(size=(n, d)) + drawn.normal(size=d)
    rows[n - f :] += 30 * drawn.normal(size=(f, d))
    return kind, torch.from_numpy(rows).to(dtype)


def _alike(a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    assert a.dtype == b.dtype == dtype
    assert (a.double() - b.double()).abs().max() <= EPS[dtype] * scale


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("member", by.MEMBERS)
def test_the_order_of_rows_does_not_matter(
    member: type[RobustKind], before: str, dtype: torch.dtype, seed: int
) -> None:
    kind, rows = _drawn(member, seed, dtype, before=BEFORE[before])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    moved = kind
    if isinstance(kind, aggregate.MoNNA):
        trusted = int((order == kind.trusted).nonzero())
        moved = aggregate.MoNNA(byzantine=kind.byzantine, before=kind.before, trusted=trusted)
    one, other = pr.aggregate.combined(kind, rows), pr.aggregate.combined(moved, rows[order])
    _alike(one, other, float(rows.abs().max()), dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("member", by.MEMBERS)
def test_rows_moved_and_scaled_move_and_scale_the_result(
    member: type[RobustKind], dtype: torch.dtype, seed: int
) -> None:
    """Clipping to a fixed length alone follows only where centre and length do too."""
    kind, rows = _drawn(member, seed, dtype)
    shift = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    for scale in (-2.0, 2.0**-30, 2.0**20):
        options: dict[str, Any] = {}
        moved = kind
        if isinstance(kind, aggregate.CenteredClipping):
            moved = aggregate.CenteredClipping(byzantine=kind.byzantine, tau=kind.tau * abs(scale))
            options = {"centre": scale * shift}
        one = pr.aggregate.combined(moved, scale * (rows + shift), **options)
        expected = scale * (pr.aggregate.combined(kind, rows) + shift)
        _alike(one, expected, abs(scale) * float((rows.abs() + shift.abs()).max()), dtype)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("member", by.MEMBERS)
def test_rows_all_equal_are_the_result(
    member: type[RobustKind], dtype: torch.dtype, before: str
) -> None:
    kind = member(byzantine=2, before=BEFORE[before])
    row = 3 * torch.randn(13, generator=torch.Generator().manual_seed(1)).to(dtype)
    if isinstance(kind, aggregate.CenteredClipping):
        kind = aggregate.CenteredClipping(byzantine=2, before=BEFORE[before], tau=1e3)
    out = pr.aggregate.combined(kind, row.expand(11, 13))
    _alike(out, row, float(row.abs().max()), dtype)


@pytest.mark.parametrize(
    "member",
    [
        aggregate.MultiKrum,
        aggregate.TrimmedMean,
        aggregate.MinimumDiameterAveraging,
        aggregate.MoNNA,
        aggregate.MeanAroundMedian,
        aggregate.Bulyan,
    ],
)
def test_without_hostile_rows_members_that_leave_some_out_are_the_mean(
    member: type[RobustKind],
) -> None:
    rows = torch.randn(7, 20, dtype=torch.float64)
    out = pr.aggregate.combined(member(byzantine=0), rows)
    torch.testing.assert_close(out, rows.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("member", by.MEMBERS)
def test_a_row_that_is_not_finite_never_reaches_the_result(
    member: type[RobustKind], before: str, dtype: torch.dtype, bad: float
) -> None:
    kind = member(byzantine=1, before=BEFORE[before])
    rows = torch.randn(8, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    for where in (slice(3, 4), slice(None)):
        spoilt = rows.clone()
        spoilt[4, where] = bad
        out = pr.aggregate.combined(kind, spoilt)
        left, none = torch.cat([rows[:4], rows[5:]]), msgspec.structs.replace(kind, byzantine=0)
        _alike(out, pr.aggregate.combined(none, left), 1.0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", ["alone", "mixed"])
@pytest.mark.parametrize("member", by.MEMBERS)
def test_a_row_of_1e18_costs_the_others_no_precision(
    member: type[RobustKind], before: str, dtype: torch.dtype
) -> None:
    """The result is where definitions in float64 put it, to the rows' own precision."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(9, 50, generator=generator).to(dtype)
    rows[8] = 1e18 * torch.randn(50, generator=generator).to(dtype)
    kind = member(byzantine=1, before=BEFORE[before])
    out = pr.aggregate.combined(kind, rows)
    # In float64, with the long row brought so near that nothing is lost there.
    near = rows.double().clone()
    near[8] *= 1e-12
    expected = pr.aggregate.combined(kind, near)
    assert (out.double() - expected).abs().max() < max(EPS[dtype], 1e-5) * 3


@pytest.mark.parametrize("member", by.DEFINITIONS)
def test_rows_close_to_each_other_beside_their_norms_are_told_apart(
    member: type[RobustKind],
) -> None:
    """Differences of a millionth of the norm: their squares are lost in squared norms."""
    drawn = np.random.default_rng(0)
    x = (1000 + 1e-3 * drawn.normal(size=(11, 64))).astype(np.float32).astype(np.float64)
    centred = member is aggregate.CenteredClipping
    kind = member(byzantine=2, **({"tau": 4e-3} if centred else {}))
    centre = torch.full((64,), 1000.0) if centred else None
    expected = by.DEFINITIONS[member](x, 2, **({"tau": 4e-3, "centre": 1000.0} if centred else {}))
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        out = pr.aggregate.combined(kind, torch.from_numpy(x).to(dtype), centre=centre)
        assert np.abs(out.double().numpy() - expected).max() < most


@pytest.mark.parametrize("before", [(), (NearestNeighbourMixing(),), (Bucketing(s=1),)])
@pytest.mark.parametrize("member", by.MEMBERS)
def test_one_row_is_its_own_aggregate_or_refused_by_the_rule(
    member: type[RobustKind], before: tuple[Any, ...]
) -> None:
    if member is aggregate.MoNNA and before and isinstance(before[0], Bucketing):
        before = ()
    row = torch.tensor([[0.5, -0.25, 0.125]])
    kind = member(byzantine=0, before=before)
    if kind.least(0) > 1:
        with pytest.raises(ConfigError, match="is too large"):
            pr.aggregate.combined(kind, row)
    else:
        assert torch.equal(pr.aggregate.combined(kind, row), row[0])


@pytest.mark.parametrize("member", by.MEMBERS)
def test_one_entry_and_none_are_aggregated(member: type[RobustKind]) -> None:
    kind = member(byzantine=2)
    column = torch.tensor(
        [[0.0], [0.1], [0.2], [0.3], [0.4], [0.5], [0.6], [0.7], [0.8], [9.0], [-9.0]]
    )
    assert -0.01 <= float(pr.aggregate.combined(kind, column)) <= 0.81
    assert pr.aggregate.combined(kind, torch.zeros(11, 0)).shape == (0,)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("member", by.MEMBERS)
def test_hostile_rows_do_not_take_the_result_from_the_honest_ones(
    member: type[RobustKind], seed: int
) -> None:
    """However far they are, it stays within a few times the honest rows' spread."""
    kind, rows = _drawn(member, seed, torch.float64)
    f = kind.byzantine
    honest = rows[: len(rows) - f]
    options: dict[str, Any] = {}
    if isinstance(kind, aggregate.CenteredClipping):
        options = {"centre": honest[0]}
    spread = float((honest - honest.mean(0)).norm(dim=1).max())
    for length in (10.0, 1e4, 1e9):
        spoilt = rows.clone()
        spoilt[len(rows) - f :] *= length
        out = pr.aggregate.combined(kind, spoilt, **options)
        assert float((out - honest.mean(0)).norm()) <= 4 * spread + 1e-9


@pytest.mark.parametrize("member", by.MEMBERS)
def test_rows_stay_as_they_are(member: type[RobustKind]) -> None:
    rows = torch.randn(9, 17)
    rows[3, 2] = torch.nan
    kept = rows.clone()
    pr.aggregate.combined(member(byzantine=1), rows)
    torch.testing.assert_close(rows, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("member", NO_INDEX)
def test_no_aggregate_is_by_a_name_alone(member: type[RobustKind]) -> None:
    """Copies of one hostile row fewer than f + 1 do not become the result of far honest rows."""
    honest = torch.randn(9, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    copies = torch.full((2, 40), 100.0, dtype=torch.float64)
    for rows in (torch.cat([copies, honest]), torch.cat([honest, copies])):
        out = pr.aggregate.combined(member(byzantine=2), rows)
        assert float(out.abs().max()) < 10
