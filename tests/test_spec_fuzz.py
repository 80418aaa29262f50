"""Every field of a spec made wrong in every way: always refused, always with a way out.

`benchmarks/bad_specs.py` tries them all; here stands a slice of each sort.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import bad_files
import bad_specs
import refusals
from polyreme import spec
from polyreme.data.options import Data
from polyreme.errors import ConfigError
from polyreme.graph.options import Model

DOCUMENTS = bad_specs.documents()
SINGLES = bad_specs.singles()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    bad_specs.files(folder)
    return folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def _refused(*wrong: bad_specs.Fault) -> None:
    document = bad_specs.made(DOCUMENTS[wrong[0].base], *wrong)
    reported = [fault.reported for fault in wrong]
    Path("wrong.toml").write_bytes(bad_specs.toml(document))
    said = refusals.command(["check", "wrong.toml", "--json"])
    assert refusals.complaints(said, reported, document) == []
    assert refusals.unmended(document, reported) == []


def test_documents_are_right_before_they_are_made_wrong() -> None:
    pytest.importorskip("datasets")
    kinds = set()
    for document in DOCUMENTS:
        read = spec.parse(document)
        kinds |= {type(read.model), type(read.data)}
    assert kinds == {*get_args(Model), *get_args(Data)}


def _fields(kind: Any, path: str = "") -> Iterator[tuple[str, str | None]]:
    """Path of every field of a spec, and the tag of the struct that has it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            below = f"{path}.{field.encode_name}".lstrip(".")
            yield below, kind.__struct_config__.tag
            yield from _fields(field.type, below)
    for part in get_args(kind):
        yield from _fields(part, path)


def test_every_field_of_every_table_is_made_wrong() -> None:
    wrong = set()
    for fault in SINGLES:
        document = bad_specs.made(DOCUMENTS[fault.base])
        if fault.table is not None:
            document = bad_specs.put(document, *fault.table)
        table = bad_specs.at(document, fault.path.rpartition(".")[0])
        # A model without a kind is told by its first key.
        kinds = [table.get("kind"), *list(table)[:1]] if isinstance(table, dict) else []
        path = re.sub(r"\[\d+\]", "", fault.path)
        wrong |= {(path, kind) for kind in (None, *kinds)}
    fields = set(_fields(spec.Spec))
    assert len(fields) > 100
    # Choices that stand nearer the top too are made wrong there.
    above = {(path.rpartition(".")[2], kind) for path, kind in wrong if path.count(".") < 3}
    missing = {(path, kind) for path, kind in fields - wrong if path.count(".") < 3}
    missing |= {
        each for each in fields - wrong if (each[0].rpartition(".")[2], each[1]) not in above
    }
    assert missing == set()


@pytest.mark.parametrize("part", range(3))
@pytest.mark.slice(1)
def test_a_wrong_field_is_refused_where_it_stands_and_with_a_way_out(part: int) -> None:
    for fault in random.Random(0).sample(SINGLES, 120)[part::3]:
        _refused(fault)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.slice(1)
def test_two_wrong_fields_are_both_reported(part: int) -> None:
    for pair in list(bad_specs.pairs(50, seed=1))[part::2]:
        _refused(*pair)


@pytest.mark.parametrize(("name", "content"), bad_files.texts(bad_files.SOUND))
def test_what_is_no_spec_is_refused(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    said = refusals.command(["check", str(path), "--json"])
    assert refusals.complaints(said, ()) == []


@pytest.mark.parametrize("part", range(2))
@pytest.mark.slice(1)
def test_wrong_files_and_settings_are_refused(tmp_path: Path, part: int) -> None:
    tried = list(bad_files.commands(tmp_path, seed=2))
    for what, name, arguments, reported in random.Random(3).sample(tried, 40)[part::2]:
        said = refusals.command(arguments)
        assert refusals.complaints(said, reported) == [], (what, name)


@pytest.mark.parametrize("n", [2, pytest.param(6, marks=pytest.mark.long)])
def test_whole_commands_end_with_2_and_no_traceback(n: int) -> None:
    for fault in random.Random(4).sample(SINGLES, n):
        document = bad_specs.made(DOCUMENTS[fault.base], fault)
        Path("whole.toml").write_bytes(bad_specs.toml(document))
        done = subprocess.run(
            [sys.executable, "-m", "polyreme", "check", "whole.toml", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        said = refusals.Said(code=done.returncode, out=done.stdout, err=done.stderr)
        assert refusals.complaints(said, [fault.reported], document) == []


@pytest.mark.parametrize("text", ["", "tests", "a\0b", "x" * 5000, "~nobody-here/x", "[", "é"])
@pytest.mark.parametrize("kind", ["text", "tokens", "arrays", "images", "svmlight", "datasets"])
def test_strange_paths_are_violations(kind: str, text: str) -> None:
    document = {
        "model": {"path": text},
        "data": {"kind": kind, "path": text, "heldout": text},
        "train": {"steps": 1},
        "cluster": {"file": text},
    }
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    assert all(each.path and each.rule and each.legal for each in caught.value.violations)


def _follow(document: dict[str, Any]) -> None:
    """Do what the errors say until there is none; none comes back."""
    seen = set()
    for _ in range(25):
        _, violations = spec.examine(document)
        if not violations:
            return
        key = (violations[0].path, repr(violations[0].value), violations[0].rule)
        assert key not in seen
        seen.add(key)
        document = refusals.way_out(document, violations[0])
    raise AssertionError("still wrong")


def test_following_the_legal_values_leads_out_of_any_fault() -> None:
    alone = [fault for fault in SINGLES if fault.path.split(".")[0] not in ("model", "data")]
    for fault in random.Random(5).sample(alone, 250):
        _follow(bad_specs.made(DOCUMENTS[fault.base], fault))
