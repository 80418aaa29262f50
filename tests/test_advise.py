"""`polyreme advise`: what it says of each robust aggregator, on a terminal, in a pipe, as JSON."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

import aggregators as by
import polyreme as pr
import refusals
from polyreme.algo.aggregate.advice import Advice
from polyreme.api import show_advice
from polyreme.errors import ConfigError

NAMES = {member.__name__ for member in by.MEMBERS}


def _said(n: int, f: int, *more: str) -> refusals.Said:
    return refusals.command(("advise", "robust", "--workers", str(n), "--byzantine", str(f), *more))


def _of(n: int, f: int) -> dict[str, Advice]:
    return {each.kind: each for each in pr.advise("robust", workers=n, byzantine=f)}


def test_every_robust_aggregator_is_said_to_guarantee_what_papers_prove() -> None:
    found = _of(16, 3)
    assert set(found) == NAMES
    bound = 3 / 13
    assert {each.bound for each in found.values()} == {bound}
    assert {name for name, each in found.items() if each.epsilon == pytest.approx(bound)} == {
        "MultiKrum",
        "TrimmedMean",
        "MinimumDiameterAveraging",
        "MoNNA",
        "MeanAroundMedian",
    }
    assert found["CoordinateMedian"].epsilon == pytest.approx(7 / 9)
    assert found["GeometricMedian"].epsilon == 1
    assert math.isinf(found["CenteredClipping"].epsilon)
    assert all(each.exact for each in found.values() if each.epsilon == bound)
    assert not any(each.epsilon < bound for each in found.values())


@pytest.mark.parametrize(("n", "f"), [(1, 0), (2, 1), (5, 1), (7, 3), (16, 7), (40, 5)])
def test_what_is_refused_is_what_a_spec_is_refused_for_and_the_breakdown_point_is_not(
    n: int, f: int
) -> None:
    found = _of(n, f)
    rows = torch.randn(n, 3)
    for member in by.MEMBERS:
        each = found[member.__name__]
        assert (each.refused is not None) == bool(member(byzantine=f).refused(n))
        if each.breakdown is None:
            assert member(byzantine=0).refused(n)
            continue
        assert pr.aggregate.combined(member(byzantine=each.breakdown), rows).isfinite().all()
        assert member(byzantine=each.breakdown + 1).refused(n)


def test_large_numbers_of_workers_are_no_harder() -> None:
    found = _of(10**9, 10)
    assert found["MinimumDiameterAveraging"].refused is not None
    assert found["MinimumDiameterAveraging"].breakdown == 0
    assert found["TrimmedMean"].breakdown == (10**9 - 1) // 2


def test_json_has_every_field_and_null_where_there_is_no_number() -> None:
    said = _said(16, 4, "--json")
    assert said.code == 0
    rows = {row["kind"]: row for row in json.loads(said.out)["robust"]}
    assert set(rows) == NAMES
    assert all(set(row) == set(Advice.__dataclass_fields__) for row in rows.values())
    assert rows["CenteredClipping"]["epsilon"] is None
    assert rows["Bulyan"]["epsilon"] is None
    assert "n >= 4 f + 3 rows: 19 for f = 4, not 16" in rows["Bulyan"]["refused"]
    assert rows["TrimmedMean"]["epsilon"] == pytest.approx(1 / 3)


def test_advice_in_a_pipe_is_a_line_each() -> None:
    said = _said(16, 4)
    assert said.code == 0
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert {row[0] for row in rows} == NAMES
    assert {len(row) for row in rows} == {8}
    cells = {row[0]: row[1:4] for row in rows}
    assert cells["Krum"] == ["<= 15", "45", "6"]
    assert cells["TrimmedMean"] == ["0.333", "1", "7"]
    assert cells["CenteredClipping"] == ["none", "none", "7"]
    assert cells["Bulyan"] == ["refused", "refused", "3"]


@pytest.mark.parametrize(("n", "f"), [(16, 3), (16, 4), (1, 0), (10**4, 4000), (3, 2)])
def test_advice_fits_a_terminal_of_80_columns(n: int, f: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    found = pr.advise("robust", workers=n, byzantine=f)
    show_advice(found, console, workers=n, byzantine=f)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    heads = [line for line in lines if line.startswith("aggregator")]
    assert [head.split()[1] for head in heads] == ["epsilon", "assumes,"]
    for each in found:
        (row,) = [
            line for line in lines[: lines.index(heads[1])] if line.startswith(each.kind + " ")
        ]
        assert row.rstrip().endswith(each.memory)


@pytest.mark.parametrize(
    ("arguments", "path", "legal"),
    [
        (("robust", "--workers", "16", "--byzantine", "16"), "--byzantine", "0, 5, 7 (or"),
        (("robust", "--workers", "1", "--byzantine", "1"), "--byzantine", "0 (or"),
        (("robust", "--workers", "0", "--byzantine", "0"), "command line --workers", "1 (or"),
        (("robust", "--workers", "4", "--byzantine", "-1"), "command line --byzantine", "0 (or"),
        (("robust", "--workers", "4.5", "--byzantine", "1"), "command line --workers", "1 (or"),
        (("robust", "--workers", "4"), "command line --byzantine", "0 (or"),
        (("robust", "--byzantine", "1"), "command line --workers", "1 (or"),
        (("fast", "--workers", "4", "--byzantine", "1"), "command line about", "robust"),
        ((), "command line about", "robust"),
    ],
)
def test_impossible_questions_are_refused_with_what_is_legal(
    arguments: tuple[str, ...], path: str, legal: str
) -> None:
    said = refusals.command(("advise", *arguments, "--json"))
    assert refusals.complaints(said, [path]) == []
    (error,) = json.loads(said.out)["errors"]
    assert error["legal"].startswith(legal)


@pytest.mark.parametrize(("workers", "byzantine"), [(0, 0), (-3, 1), (4, 4), (4, -1)])
def test_impossible_numbers_are_refused_in_python_too(workers: int, byzantine: int) -> None:
    with pytest.raises(ConfigError, match="Legal: "):
        pr.advise("robust", workers=workers, byzantine=byzantine)
    with pytest.raises(ConfigError, match='Legal: "robust"'):
        pr.advise("fast", workers=4, byzantine=1)  # type: ignore[arg-type]
