"""The options of data sets, as a spec gives them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from polyreme.data import files
from polyreme.data.options import Data, Datasets, Dirichlet, Iid, PythonSource, Text

MEMBERS = get_args(Data)


def test_options_are_read_and_checked_without_torch_or_numpy() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import importlib.util, msgspec
from polyreme.data.options import Data
print(int(importlib.util.find_spec("datasets") is None))
for text in ('kind = "python_source"', 'kind = "digits"', 'kind = "text"\\npath = "/no"',
             'kind = "datasets"\\npath = "/no"', 'kind = "arrays"\\npath = "/no"'):
    print(len(msgspec.toml.decode(text, type=Data).check()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    missing, *found = map(int, done.stdout.split() or [0])
    assert found == [0, 0, 1, 2 + missing, 1], done.stderr  # an extra that is absent is one more


@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_refuses_a_misspelt_field_and_describes_itself(member: type) -> None:
    config = member.__struct_config__
    assert config.tag_field == "kind"
    assert config.frozen
    required = {
        f.name: 1 if f.name == "vocab" else "x"
        for f in msgspec.structs.fields(member)
        if f.required
    }
    good = {"kind": config.tag, **required}
    assert isinstance(msgspec.convert(good, Data), member)
    assert isinstance(msgspec.convert(good, Data).needs_seq_len, bool)
    with pytest.raises(msgspec.ValidationError, match="headout"):
        msgspec.convert({**good, "headout": 0.1}, Data)
    assert "\n" not in member.describe()


@pytest.mark.parametrize("member", [m for m in MEMBERS if "path" in m.__struct_fields__])
def test_every_missing_path_is_reported(member: type) -> None:
    options = member(
        path="/no/such", **({"vocab": 2} if "vocab" in member.__struct_fields__ else {})
    )
    assert ("data.path", "/no/such") in [(v.path, v.value) for v in options.check()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("iid", "iid"),
        ({"kind": "iid"}, Iid()),
        ({"kind": "dirichlet", "alpha": 1}, Dirichlet(alpha=1.0)),
    ],
)
def test_partitions_in_a_spec(given: object, expected: object) -> None:
    assert msgspec.convert({"kind": "digits", "partition": given}, Data).partition == expected


@pytest.mark.parametrize(
    "wrong", ["dirichlet", {"kind": "dirichlet", "alpha": 0}, {"kind": "classes", "per_worker": 0}]
)
def test_partitions_that_cannot_be(wrong: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "digits", "partition": wrong}, Data)


@pytest.mark.parametrize("heldout", [-0.1, 1, 1.5])
def test_shares_that_leave_nothing_are_refused(heldout: float) -> None:
    with pytest.raises(msgspec.ValidationError, match="heldout"):
        msgspec.convert({"kind": "text", "path": "x", "heldout": heldout}, Data)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    options = Text(
        path=str(tmp_path / "no"),
        heldout="/nor/this",
        tokenizer="/nor/that",
        partition=Dirichlet(alpha=1.0),
    )
    assert [violation.path for violation in options.check()] == [
        "data.path",
        "data.heldout",
        "data.partition",
        "data.tokenizer",
    ]


def test_a_python_without_source_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert [violation.path for violation in PythonSource().check()] == ["data.kind"]


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    found = Datasets(path="/no", text="x").check()
    assert 'pip install "polyreme[datasets]"' in found[0].legal


def test_files_of_a_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden/d.txt", "sub/.e.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(path: str) -> list[str]:
        return [file.name for file in files.find(f"{tmp_path}/{path}")]

    assert names("a.txt") == ["a.txt"]
    assert names("") == ["[x].txt", "a.txt", "b.txt", "c.txt"]
    assert names("[ab].txt") == ["a.txt", "b.txt"]
    assert names("**/*.txt") == ["[x].txt", "a.txt", "b.txt", "c.txt"]
    assert names("[x].txt") == ["[x].txt"]
    assert names("*.bin") == []


def test_what_the_page_shows_is_accepted() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    specs = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(specs) >= 3
    for spec in specs:
        msgspec.convert(tomllib.loads(spec)["data"], Data)
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    assert len(names["batch"]["labels"]) == 16
    for member in MEMBERS:
        assert f"| `{member.__struct_config__.tag}` |" in page
