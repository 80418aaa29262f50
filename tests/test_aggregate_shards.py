"""Aggregates of split replicas, of rows in chunks, with states, weights and suspects."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aggregators as by
import polyreme as pr
from polyreme.algo import aggregate
from polyreme.algo.aggregate.before import ARC, Bucketing, Clipping, NearestNeighbourMixing
from polyreme.algo.aggregate.robust import RobustKind
from polyreme.algo.effects import alone, together
from polyreme.errors import ConfigError, RunError

KINDS: list[RobustKind] = [
    *(member(byzantine=2) for member in by.MEMBERS),
    aggregate.CoordinateMedian(byzantine=2, before=(NearestNeighbourMixing(), ARC())),
    aggregate.GeometricMedian(byzantine=2, before=(Clipping(c=1.0), Bucketing(s=2))),
    aggregate.CenteredClipping(byzantine=2, iterations=3, before=(NearestNeighbourMixing(),)),
]
CUTS = ([0, 40], [0, 13, 13, 40], [0, 1, 2, 39, 40])


def _rows(seed: int = 0, bad: bool = False, close: bool = False) -> torch.Tensor:
    rows = torch.randn(12, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[7] *= 50
    if bad:
        rows[3, 20] = torch.inf
    return 1e6 + rows if close else rows


def _split(kind: RobustKind, rows: torch.Tensor, cut: list[int], states: list[Any]) -> list[Any]:
    parts = [rows[:, a:b] for a, b in pairwise(cut)]
    programs = [kind.combine(list(part), own) for part, own in zip(parts, states, strict=True)]
    return together(programs)


@pytest.mark.parametrize("case", [{}, {"bad": True}, {"close": True}])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_split_replica_aggregates_to_what_an_unsplit_one_does(
    kind: RobustKind, cut: list[int], case: dict[str, bool]
) -> None:
    """Over three steps, so that centres and counts go on."""
    whole = kind.init(torch.zeros(40, dtype=torch.float64))
    spans = list(pairwise(cut))
    states = [kind.init(torch.zeros(b - a, dtype=torch.float64)) for a, b in spans]
    for step in range(3):
        rows = _rows(step, **case)
        out, whole, suspects = alone(kind.combine(rows, whole))
        ends = _split(kind, rows, cut, states)
        states = [end[1] for end in ends]
        joined = torch.cat([end[0] for end in ends])
        torch.testing.assert_close(joined, out, rtol=1e-9, atol=1e-9)
        assert {end[2] for end in ends} == {suspects}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("case", [{}, {"bad": True}, {"close": True}])
def test_rows_in_chunks_give_what_whole_rows_do(kind: RobustKind, case: dict[str, bool]) -> None:
    rows = _rows(**case)
    whole = pr.aggregate.combined(kind, rows)
    for size in (1, 7, 40):
        pieces = list(pr.aggregate.in_chunks(kind, lambda size=size: rows.split(size, dim=1)))
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_rows_of_many_blocks_give_what_one_block_does(
    kind: RobustKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(bad=True)
    whole = pr.aggregate.combined(kind, rows)
    monkeypatch.setattr("polyreme.algo.aggregate.blocks._SMALLEST", 50)
    blocks = pr.aggregate.combined(kind, rows)
    torch.testing.assert_close(blocks, whole, rtol=1e-9, atol=1e-9)


def test_rows_of_a_file_give_what_rows_in_memory_do(tmp_path: Path) -> None:
    rows = _rows()
    rows.numpy().tofile(tmp_path / "rows")
    mapped = torch.from_file(str(tmp_path / "rows"), size=480, dtype=torch.float64).view(12, 40)
    for kind in KINDS:
        assert torch.equal(pr.aggregate.combined(kind, mapped), pr.aggregate.combined(kind, rows))


def test_chunks_refuse_what_whole_rows_do() -> None:
    rows = _rows(bad=True)
    with pytest.raises(ConfigError, match="is too large"):
        list(pr.aggregate.in_chunks(aggregate.Bulyan(byzantine=3), lambda: rows.split(5, dim=1)))
    rows[4] = torch.nan
    with pytest.raises(RunError, match="2 of 12 rows"):
        list(pr.aggregate.in_chunks(aggregate.Krum(byzantine=1), lambda: rows.split(5, dim=1)))


# States


def test_clipping_starts_from_the_last_aggregate() -> None:
    kind = aggregate.CenteredClipping(byzantine=1, tau=0.5, iterations=2)
    state, centre = kind.init(torch.zeros(40, dtype=torch.float64)), np.zeros(40)
    for step in range(4):
        rows = _rows(step)
        out, state, _ = alone(kind.combine(rows, state))
        centre = by.centered_clipping(rows.numpy(), 1, tau=0.5, iterations=2, centre=centre)
        np.testing.assert_allclose(out, centre, rtol=1e-9, atol=1e-12)
        assert torch.equal(state["centre"], out)


def test_buckets_are_drawn_anew_at_each_step_and_alike_from_the_same_state() -> None:
    kind = aggregate.CoordinateMedian(byzantine=1, before=(Bucketing(s=2, seed=3),))
    rows, first = _rows(), kind.init(torch.zeros(40))
    one, second, _ = alone(kind.combine(rows, first))
    other, third, _ = alone(kind.combine(rows, second))
    again, _, _ = alone(kind.combine(rows, first))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert [each["before"] for each in (first, second, third)] == [
        {"0": {"count": count}} for count in range(3)
    ]


# Chunks


ROWS = torch.arange(30.0).reshape(6, 5)
HALVES = ROWS.split(3, dim=1)


@pytest.mark.parametrize("kind", [aggregate.CoordinateMedian(), aggregate.Krum()], ids=str)
@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        (ROWS, '"Tensor" is no function'),
        (lambda: None, '"NoneType" is what the function gives'),
        (list, "no entries came"),
        (lambda: [[1.0, 2.0]], '"list" is no tensor'),
        (lambda: [ROWS[0]], "of shape (5,) on cpu"),
        (lambda: [ROWS[:0]], "of shape (0, 5) on cpu"),
        (lambda: [ROWS.long()], "torch.int64 of shape (6, 5)"),
        (lambda: [HALVES[0], HALVES[1][:4]], "is not as the first, torch.float32 of 6 rows"),
        (lambda: [HALVES[0], HALVES[1].double()], "is not as the first, torch.float32 of 6 rows"),
    ],
)
def test_chunks_that_do_not_fit_together_are_refused(
    kind: RobustKind, chunks: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        list(pr.aggregate.in_chunks(kind, chunks))


@pytest.mark.parametrize("kind", [aggregate.CoordinateMedian(), aggregate.Krum()], ids=str)
def test_chunks_that_are_given_once_are_not_taken_for_none(kind: RobustKind) -> None:
    once = iter(HALVES)
    with pytest.raises(ConfigError, match="entries came"):
        list(pr.aggregate.in_chunks(kind, lambda: once))


# Weights


@pytest.mark.parametrize("member", by.MEMBERS)
def test_a_row_of_weight_k_counts_as_k_rows_or_weights_are_refused_by_name(
    member: type[RobustKind],
) -> None:
    rows, weights = _rows()[:7], [1.0, 3.0, 2.0, 1.0, 2.0, 1.0, 0.0]
    kind = member(byzantine=1)
    if not member.takes_weights:
        with pytest.raises(ConfigError, match=f"weights: .*are not defined for {member.__name__}"):
            pr.aggregate.combined(kind, rows, weights)
        with pytest.raises(ConfigError, match=f"are not defined for {member.__name__}"):
            alone(kind.combine(rows, kind.init(rows[0]), weights))
        return
    times = torch.tensor(weights).long()
    expected = pr.aggregate.combined(kind, rows.repeat_interleave(times, dim=0))
    out = pr.aggregate.combined(kind, rows, weights)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    equal = pr.aggregate.combined(kind, rows, [2.0] * 7)
    torch.testing.assert_close(equal, pr.aggregate.combined(kind, rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0] * 6, "are not one of each of 7 rows"),
        ([-1.0] + [1.0] * 6, "are not how much rows count"),
        ([0.0] * 7, "are not how much rows count"),
        ([torch.inf] * 7, "are not how much rows count"),
        ([torch.nan] * 7, "are not how much rows count"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pr.aggregate.coordinate_median(_rows()[:7], 1, weights=weights)
    before = (NearestNeighbourMixing(),)
    with pytest.raises(ConfigError, match=r"weights: .*anything before it"):
        pr.aggregate.geometric_median(_rows()[:7], 1, weights=[1.0] * 7, before=before)


# Suspects


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_suspects_are_rows_set_aside_and_the_farthest_of_the_others(kind: RobustKind) -> None:
    rows = _rows()
    out, _, suspects = alone(kind.combine(rows, kind.init(rows[0])))
    distances = (rows - out).norm(dim=1)
    assert suspects == tuple(sorted(distances.argsort(descending=True)[:2].tolist()))
    assert 7 in suspects
    rows = _rows(bad=True)
    _, _, suspects = alone(kind.combine(rows, kind.init(rows[0])))
    assert suspects == (3, 7)
    _, _, suspects = alone(kind.combine(rows[4:], kind.init(rows[0]), absent=1))
    assert suspects == (3,)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_rows_alike_are_no_suspects(kind: RobustKind) -> None:
    row = torch.randn(40, dtype=torch.float64)
    _, _, suspects = alone(kind.combine(row.expand(12, 40), {**kind.init(row), **_at(kind, row)}))
    assert suspects == ()


def _at(kind: RobustKind, row: torch.Tensor) -> dict[str, Any]:
    return {"centre": row} if kind.centred else {}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_missing_rows_count_as_hostile(kind: RobustKind) -> None:
    rows = _rows()[:9]
    out, _, _ = alone(kind.combine(rows, kind.init(rows[0]), absent=1))
    smaller = type(kind)(
        **{**{k: getattr(kind, k) for k in kind.__struct_fields__}, "byzantine": kind.byzantine - 1}
    )
    assert torch.equal(out, alone(smaller.combine(rows, smaller.init(rows[0])))[0])
    with pytest.raises(RunError, match="3 of 12 rows are missing or not finite"):
        alone(kind.combine(rows, kind.init(rows[0]), absent=3))


def test_too_few_rows_left_end_the_run_with_the_rule() -> None:
    kind = aggregate.Bulyan(byzantine=2)
    rows = _rows()[:11]
    rows[0] = torch.nan
    out, _, _ = alone(kind.combine(rows, {}))
    assert torch.equal(out, alone(aggregate.Bulyan(byzantine=1).combine(rows[1:], {}))[0])
    said = r"0 of 10 rows are missing or not finite: Bulyan takes n >= 4 f \+ 3 rows: 11 for f = 2"
    with pytest.raises(RunError, match=said):
        alone(kind.combine(rows[1:], {}))
