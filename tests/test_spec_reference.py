"""The reference of the spec keeps in step with its structs."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme import spec
from polyreme.spec import reference

ROOT = Path(__file__).parent.parent


def test_the_reference_is_what_the_structs_say() -> None:
    written = (ROOT / "docs" / "spec.md").read_text()
    assert written == reference.markdown(), "run: make docs"


def test_the_example_of_the_reference_is_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(reference.EXAMPLE)
    spec.load(path)


@pytest.mark.parametrize("table", spec.Spec.__struct_fields__)
def test_every_key_of_the_reference_has_a_meaning(table: str) -> None:
    section = reference.markdown().split(f"## `[{table}]`\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []
