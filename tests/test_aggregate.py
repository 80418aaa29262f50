"""Aggregators against a peer's numbers and their own definitions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import aggregators as by
import polyreme as pr
from polyreme.algo import aggregate
from polyreme.algo.aggregate.before import ARC, Bucketing, Clipping, NearestNeighbourMixing
from polyreme.algo.aggregate.robust import RobustKind
from polyreme.errors import ConfigError, RunError

GOLDEN = Path(__file__).parent / "golden"
PEER = np.load(GOLDEN / "byzfl.npz")
CASES: dict[str, dict[str, int]] = json.loads((GOLDEN / "byzfl.json").read_text())["cases"]
WHOLE = [case for case in CASES if "nan" not in case and "inf" not in case]
NNM = (NearestNeighbourMixing(),)

# What the peer calls each, and what it is here with f hostile rows. Its Krum counts n - f - 1
# neighbours.
KINDS: dict[str, Any] = {
    "Median": lambda f: aggregate.CoordinateMedian(byzantine=f),
    "TrMean": lambda f: aggregate.TrimmedMean(byzantine=f),
    "GeometricMedian_nu1e-6_T200": lambda f: aggregate.GeometricMedian(byzantine=f),
    "Krum": lambda f: aggregate.Krum(byzantine=f, neighbours="n-f-1"),
    "MultiKrum": lambda f: aggregate.MultiKrum(byzantine=f, neighbours="n-f-1"),
    "CenteredClipping_L1_tau100": lambda f: aggregate.CenteredClipping(byzantine=f, tau=100.0),
    "CenteredClipping_L3_tau1": lambda f: aggregate.CenteredClipping(byzantine=f, iterations=3),
    "MDA": lambda f: aggregate.MinimumDiameterAveraging(byzantine=f),
    "MoNNA_idx0": lambda f: aggregate.MoNNA(byzantine=f),
    "Meamed": lambda f: aggregate.MeanAroundMedian(byzantine=f),
    "NNM+Krum": lambda f: aggregate.Krum(byzantine=f, neighbours="n-f-1", before=NNM),
    "NNM+TrMean": lambda f: aggregate.TrimmedMean(byzantine=f, before=NNM),
}


def _rows(case: str) -> torch.Tensor:
    return torch.from_numpy(PEER[f"{case}/input"])


def _off(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / max(np.abs(theirs).max(), 1e-300))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", WHOLE)
def test_what_the_peer_makes_of_finite_rows_is_made(case: str, name: str) -> None:
    key, f = f"{case}/{name}/numpy", CASES[case]["f"]
    kind = KINDS[name](f)
    if "Krum" in name and CASES[case]["n"] < 2 * f + 3:
        by_paper = msgspec.structs.replace(kind, neighbours="n-f-2")
        with pytest.raises(ConfigError, match=r"is too large: (Multi)?Krum takes n >= 2 f \+ 3"):
            pr.aggregate.combined(by_paper, _rows(case))
    if key not in PEER:  # 2,035,800 subsets, of which the peer made no mean
        with pytest.raises(ConfigError, match=r"no more than 10\^6 subsets"):
            pr.aggregate.combined(kind, _rows(case))
        return
    assert _off(pr.aggregate.combined(kind, _rows(case)), PEER[key]) < 1e-6


@pytest.mark.parametrize("case", [case for case in CASES if case not in WHOLE])
@pytest.mark.parametrize("name", KINDS)
def test_a_row_that_is_not_finite_is_one_of_the_hostile_and_no_more(case: str, name: str) -> None:
    """The peer gives the NaN row (Krum), NaN of a median, or counts infinity as a number.

    Where it leaves out whole rows by their distances it leaves out that one, and the rest agrees.
    """
    f = CASES[case]["f"]
    rows, kind = _rows(case), KINDS[name](f)
    finite = rows[rows.isfinite().all(1)]
    assert len(finite) == len(rows) - 1
    out = pr.aggregate.combined(kind, rows)
    assert out.isfinite().all()
    assert torch.equal(out, pr.aggregate.combined(KINDS[name](f - 1), finite))
    by_distance = ["MultiKrum", "MDA", "MoNNA_idx0", "NNM+TrMean"]
    if "inf" in case:
        by_distance += ["Krum", "NNM+Krum", "GeometricMedian_nu1e-6_T200"]
    if name in by_distance:
        assert _off(out, PEER[f"{case}/{name}/numpy"]) < 1e-6
    if case == "n6_nan_one_coord_f1" and name == "Krum":
        assert np.isnan(PEER[f"{case}/{name}/numpy"]).any()


def _total_distance(rows: torch.Tensor, point: Any) -> float:
    return float((rows - torch.as_tensor(point)).norm(dim=1).sum())


@pytest.mark.parametrize("case", [case for case in WHOLE if case != "n6_equal_f1"])
def test_three_weiszfeld_steps_are_far_from_the_geometric_median(case: str) -> None:
    """The peer's default ends after three: ours has a smaller sum of distances."""
    rows = _rows(case)
    ours = pr.aggregate.geometric_median(rows, CASES[case]["f"])
    theirs = PEER[f"{case}/GeometricMedian_nu0.1_T3/numpy"]
    assert _off(ours, theirs) > 1e-4
    assert _total_distance(rows, ours) <= _total_distance(rows, theirs)


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("name", ["NNM", "Clipping_c2", "ARC"])
def test_rows_are_mixed_as_the_peer_mixes_them(case: str, name: str) -> None:
    f = CASES[case]["f"]
    before = {"NNM": NNM, "Clipping_c2": (Clipping(c=2.0),), "ARC": (ARC(),)}[name]
    mixed = torch.from_numpy(PEER[f"{case}/{name}/numpy"])
    kind = aggregate.CoordinateMedian(byzantine=f, before=before)
    expected = np.median(mixed.numpy(), axis=0)
    assert _off(pr.aggregate.combined(kind, _rows(case)), expected) < 1e-6


# By their definitions


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("member", by.DEFINITIONS)
def test_members_are_what_their_definitions_say(member: type[RobustKind], seed: int) -> None:
    drawn = np.random.default_rng(seed)
    f = int(drawn.integers(0, 4))
    least = member(byzantine=f).least(f)
    n, d = int(drawn.integers(least, least + 4)), int(drawn.integers(1, 40))
    x = drawn.normal(size=(n, d)) * drawn.choice([1e-3, 1.0, 1e4])
    out = pr.aggregate.combined(member(byzantine=f), torch.from_numpy(x))
    assert _off(out, by.DEFINITIONS[member](x, f)) < 1e-9


@pytest.mark.parametrize("member", by.DEFINITIONS)
def test_ties_go_to_the_lowest_index(member: type[RobustKind]) -> None:
    """Whole numbers few enough that distances are often equal, and exactly."""
    drawn = np.random.default_rng(1)
    for _ in range(20):
        x = drawn.integers(-1, 2, size=(9, 2)).astype(np.float64)
        kind = member(byzantine=1)
        out = pr.aggregate.combined(kind, torch.from_numpy(x))
        np.testing.assert_allclose(out, by.DEFINITIONS[member](x, 1), atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_before_is_what_its_definition_says(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    x, f = drawn.normal(size=(11, 5)) * drawn.lognormal(size=(11, 1)), 2
    mixings: list[tuple[Any, Any]] = [
        (NearestNeighbourMixing(), by.nearest_neighbour_mixing(x, f)),
        (Clipping(c=0.7), by.clipping(x, 0.7)),
        (ARC(), by.arc(x, f)),
    ]
    for before, mixed in mixings:
        for member, defined in by.DEFINITIONS.items():
            kind = member(byzantine=f, before=(before,))
            out = pr.aggregate.combined(kind, torch.from_numpy(x))
            assert _off(out, defined(mixed, f)) < 1e-9, (before, member)


def test_what_comes_before_is_done_in_its_order() -> None:
    x = np.random.default_rng(3).normal(size=(9, 4)) * np.arange(1, 10)[:, None]
    one = pr.aggregate.trimmed_mean(torch.from_numpy(x), 2, before=(ARC(), *NNM))
    other = pr.aggregate.trimmed_mean(torch.from_numpy(x), 2, before=(*NNM, ARC()))
    mixed = by.nearest_neighbour_mixing(by.arc(x, 2), 2)
    assert _off(one, by.trimmed_mean(mixed, 2)) < 1e-9
    assert _off(other, by.trimmed_mean(by.arc(by.nearest_neighbour_mixing(x, 2), 2), 2)) < 1e-9
    assert _off(one, np.asarray(other)) > 1e-3


@pytest.mark.parametrize(("n", "s"), [(10, 3), (9, 3), (7, 1), (5, 2)])
def test_buckets_are_means_of_rows_drawn_without_putting_back(n: int, s: int) -> None:
    x = torch.eye(n, dtype=torch.float64)
    kind = aggregate.TrimmedMean(byzantine=0, before=(Bucketing(s=s),))
    out = pr.aggregate.combined(kind, x)
    sizes = [s] * (n // s) + [n % s] * bool(n % s)
    # The mean of bucket means: each row once, by one over its bucket's size.
    shares = sorted(1 / (size * len(sizes)) for size in sizes for _ in range(size))
    np.testing.assert_allclose(sorted(out.tolist()), shares)


@pytest.mark.parametrize("seed", range(4))
def test_no_point_near_the_geometric_median_is_better(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    rows = torch.from_numpy(drawn.normal(size=(7, 3)))
    weights = None if seed % 2 else drawn.integers(1, 5, size=7).astype(float)
    out = pr.aggregate.geometric_median(rows, 2, weights=weights)
    counted = torch.ones(7, dtype=torch.float64) if weights is None else torch.from_numpy(weights)

    def total(point: torch.Tensor) -> float:
        return float((counted * (rows - point).norm(dim=1)).sum())

    for step in torch.from_numpy(drawn.normal(size=(50, 3))):
        for length in (1e-4, 1e-2, 1.0):
            assert total(out + length * step) >= total(out) - 1e-9


def test_the_geometric_median_of_a_majority_at_one_point_is_that_point() -> None:
    rows = torch.tensor([[1.0, 2.0]] * 3 + [[50.0, 0.0], [0.0, 1e6]], dtype=torch.float64)
    out = pr.aggregate.geometric_median(rows, 2)
    assert (out - rows[0]).norm() < 1e-3


# Refusals


@pytest.mark.parametrize("member", by.MEMBERS)
def test_too_many_hostile_rows_are_refused_with_the_rule_and_what_is_legal(
    member: type[RobustKind],
) -> None:
    for f in (1, 2, 3):
        kind = member(byzantine=f)
        n = kind.least(f) - 1
        (violation,) = kind.refused(n)
        assert violation.path == "data_parallel.aggregate.byzantine"
        assert kind.least_rule in violation.rule
        legal = int(violation.legal.split()[0])
        assert member(byzantine=legal).refused(n) == []
        assert member(byzantine=legal + 1).refused(n)
        assert kind.refused(n + 1) == []


def test_buckets_are_what_hostile_rows_are_counted_among() -> None:
    kind = aggregate.TrimmedMean(byzantine=2, before=(Bucketing(s=3),))
    assert kind.refused(13) == []
    (violation,) = kind.refused(12)
    assert "takes n >= 2 f + 1 rows after those before it: 5 for f = 2, not 4" in violation.rule


def test_more_rows_that_are_not_finite_than_may_be_hostile_end_the_run() -> None:
    rows = torch.randn(9, 3)
    rows[:2] = torch.inf
    for member in by.MEMBERS:
        if member is aggregate.MoNNA:
            continue
        with pytest.raises(RunError, match="2 of 9 rows are missing or not finite"):
            pr.aggregate.combined(member(byzantine=1), rows)


def test_a_trusted_row_must_be_there_finite_and_one_row() -> None:
    rows = torch.randn(5, 3)
    with pytest.raises(ConfigError, match="trusted: 5 is none of 5 rows"):
        pr.aggregate.monna(rows, 1, trusted=5)
    with pytest.raises(ConfigError, match="leaves no trusted row"):
        pr.aggregate.monna(rows, 1, before=(Bucketing(),))
    rows[0, 0] = torch.nan
    with pytest.raises(RunError, match="row 0, which MoNNA trusts, is missing or not finite"):
        pr.aggregate.monna(rows, 1)
    assert torch.equal(
        pr.aggregate.monna(rows, 1, trusted=2),
        pr.aggregate.monna(rows[1:], 0, trusted=1),
    )


def test_rows_chosen_are_no_more_than_honest_ones() -> None:
    rows = torch.randn(7, 3)
    with pytest.raises(ConfigError, match=r"chosen: 6 is more than the n - f = 5 rows"):
        pr.aggregate.multi_krum(rows, 2, chosen=6)
    one = pr.aggregate.multi_krum(rows, 2, chosen=1)
    assert torch.equal(one, pr.aggregate.krum(rows, 2))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ((pr.aggregate.Clipping(c=-1.0),), "before.Clipping.c"),
        ((pr.aggregate.Clipping(c=math.nan),), "before.Clipping.c"),
        ((pr.aggregate.Bucketing(s=0),), "before.Bucketing.s"),
        ([pr.aggregate.Clipping()], "no tuple"),
        (pr.aggregate.Clipping(), "no tuple"),
        (("Clipping",), "no tuple"),
    ],
    ids=str,
)
def test_what_is_done_before_is_checked_as_the_aggregator_is(before, words) -> None:
    with pytest.raises(ConfigError, match=words):
        pr.aggregate.krum(torch.randn(7, 2), 1, before=before)


@pytest.mark.parametrize("centre", [torch.ones(3), torch.ones(1, 2), torch.tensor([math.nan, 0])])
def test_a_centre_that_is_none_of_the_rows_is_refused(centre) -> None:
    with pytest.raises(ConfigError, match="centre"):
        pr.aggregate.centered_clipping(torch.randn(7, 2), 1, centre=centre)


def test_what_an_aggregator_has_no_use_for_is_refused_by_name() -> None:
    rows = torch.randn(7, 2)
    with pytest.raises(ConfigError, match=r"centre.*Krum"):
        pr.aggregate.combined(pr.aggregate.Krum(byzantine=1), rows, centre=torch.zeros(2))
    with pytest.raises(ConfigError, match="aggregator"):
        list(pr.aggregate.in_chunks(pr.aggregate.Mean(), lambda: rows.split(1, dim=1)))
    with pytest.raises(ConfigError, match="n >= 2 f"):
        pr.aggregate.majority_vote(rows, byzantine=4)
