"""The page on algorithms, and the list of them: made from the code, and true."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import polyreme as pr
from polyreme import api
from polyreme.algo import members as algo_members
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Compressor, Sign
from polyreme.algo.feedback import DGC
from polyreme.algo.members import Member, attacks, members, schedules
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.topology import Gossip, ParameterServer, Torus2D
from polyreme.algo.topology.graph import Matrix
from polyreme.api import algorithms

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def _example() -> tuple[str, str]:
    """The user's module, and the script that uses it."""
    module = next(each for each in _blocks("python") if each.startswith("# file: mine.py"))
    script = next(each for each in _blocks("python") if "from mine import" in each)
    return module, script


def test_the_tables_are_what_the_code_says() -> None:
    assert algorithms.renewed(PAGE) == PAGE, "run: make docs"


def test_lines_outside_of_tables_are_not_long() -> None:
    assert [each for each in PAGE.splitlines() if len(each) > 140 and each[0] != "|"] == []


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    module, script = _example()
    (printed,) = _blocks("text")
    (tmp_path / "mine.py").write_text(module)
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert out.stdout == printed
    assert "Warning" not in out.stderr


def test_the_example_takes_the_bytes_and_seconds_that_the_page_reckons(tmp_path: Path) -> None:
    spec = Path(__file__).parents[1] / "examples" / "algorithms.toml"
    short = ("train.steps=8", "train.schedule={kind='constant'}")
    found = pr.simulate(spec, overrides=short, workers=64, out=tmp_path / "run")
    assert found.wire_bytes == 63 * (12_332 + 9 * 32) == 795_060
    comm_s = 2 * 63 * 0.01 + 795_060 / 12.5e6
    assert 8 * found.step_s_median == pytest.approx(2.0 + comm_s, rel=1e-6)
    assert "795,060 bytes" in PAGE


def test_the_example_is_named_by_a_spec_once_it_is_in_the_union() -> None:
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(_example()[0], scope)
    found = msgspec.convert({"kind": "Int8", "per": "model"}, Compressor | scope["Int8"])
    assert found == scope["Int8"](per="model")
    assert algo_members.source(scope["Int8"])


def test_the_spec_of_the_page_is_legal() -> None:
    tables = tomllib.loads(_blocks("toml")[0])
    found = msgspec.convert(tables["data_parallel"], DataParallel)
    assert found.check() == found.refused(4) == []


def test_the_page_names_every_function_of_compression() -> None:
    listed = PAGE.partition("There is one for each compressor")[2].partition("\n\n")[0]
    functions = {name for name in vars(pr.compress) if name.islower() and name[0] != "_"}
    names = {each for each in functions if callable(getattr(pr.compress, each))} - {"packed"}
    assert set(re.findall(r"`(\w+)`", listed)) == names


@pytest.mark.parametrize(
    ("algorithm", "path"),
    [
        (DataParallel(feedback=DGC(masking=False), rule=SGD(momentum=0.9)), "rule.momentum"),
        (DataParallel(feedback=DGC(masking=False), rule=AdamW()), "rule.kind"),
        (DataParallel(feedback=DGC(), compress=Sign(), rule=SGD()), "feedback.masking"),
        (DataParallel(topology=Gossip(graph=Matrix(path="none.npy"))), "topology.graph.path"),
        (DataParallel(topology=ParameterServer(servers=7)), "topology.servers"),
        (DataParallel(topology=Torus2D(rows=4)), "topology.rows"),
    ],
)
def test_what_the_page_says_is_refused_is(algorithm: DataParallel, path: str) -> None:
    found = [*algorithm.check(), *algorithm.refused(6)]
    assert [each.path for each in found] == [f"data_parallel.{path}"]


# The list


@pytest.mark.parametrize(
    "member", [*members(), *schedules(), *attacks()], ids=lambda m: f"{m.part}-{m.kind}"
)
def test_every_member_says_what_it_is(member: Member) -> None:
    assert member.line.endswith(".")
    assert len(member.line) <= 120


@pytest.mark.parametrize("member", members(), ids=lambda m: f"{m.part}-{m.kind}")
def test_every_member_has_a_source(member: Member) -> None:
    assert "Source:" in (member.cls.__doc__ or ""), f"{member.cls.__module__} names none"
    assert member.source
    assert len(member.source) <= 260


def test_every_part_of_the_algorithm_is_listed() -> None:
    parts = {
        name
        for name, hint in typing.get_type_hints(DataParallel).items()
        if name in DataParallel.__struct_fields__ and name != "local_clip_norm"
    }
    below = {"topology.graph", "topology.method", "aggregate.before"}
    assert parts | below == {each.part for each in members()}
    assert {"Ring", "Torus", "Matrix"} <= {
        each.kind for each in members() if each.part == "topology.graph"
    }


def test_no_member_is_listed_twice() -> None:
    """Rotated's inner compressors and a server's way back are compressors that stand already."""
    named = [(each.part, each.kind) for each in members()]
    assert len(named) == len(set(named))


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = api.listing("algorithms")
    assert [row["name"] for row in rows] == [
        f"{each.part}: {each.kind}" for each in (*members(), *schedules(), *attacks())
    ]
    row = next(row for row in rows if row["name"] == "topology.method: CHOCO")
    assert row["source"].startswith("Koloskova")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (
            "A rule. Source: You et al. 2017, algorithm 1. It is quick.",
            "You et al. 2017, algorithm 1",
        ),
        (
            "A rule.\n\nSource: A et al. 2019,\nsection 2.\nDiffers: here.",
            "A et al. 2019, section 2",
        ),
        ("A rule.", ""),
    ],
)
def test_a_source_is_one_sentence(text: str, source: str) -> None:
    thing = type("Thing", (), {"__doc__": text})
    assert algo_members.source(thing) == source


def test_what_is_counted_is_right_where_it_is_known() -> None:
    """Rows of the tables whose figures follow from the definition."""
    rows = {
        (part, line.split("`")[1]): line
        for part, block in _by_part()
        for line in block.splitlines()
        if line.startswith("| `")
    }
    assert "100 % of the bytes" in rows["compress", "Dense"]
    assert "50 % of the bytes" in rows["compress", "Cast"]
    assert "1 exchange a step" in rows["sync", "EveryStep"]
    assert "0.125 exchanges a step" in rows["sync", "LocalSteps"]
    assert "2 vectors, a count" in rows["rule", "AdamW"]
    assert "14 rounds, 1.75 messages" in rows["topology", "Ring"]
    assert "7 neighbours" in rows["topology.graph", "Complete"]
    assert "exact, unbiased, adds" in rows["compress", "Dense"]


def _by_part() -> list[tuple[str, str]]:
    parts = re.split(r"`data_parallel\.([a-z.]+)`\n", PAGE.partition(algorithms.BEGIN)[2])
    return list(zip(parts[1::2], parts[2::2], strict=True))
