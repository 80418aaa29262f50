"""The worked example of the page on models does what the page says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec

from polyreme.graph.options import TASKS, Model
from polyreme.sample import SampleSpec, TensorSpec

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_example_prints_what_the_page_says(tmp_path):
    module, script = blocks("python")
    (printed,) = blocks("text")
    (tmp_path / "mine.py").write_text(module)
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert out.stdout == printed


def test_the_spec_of_the_example_gives_the_same_graph(tmp_path, monkeypatch):
    module, _ = blocks("python")
    (tmp_path / "mine.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    model = msgspec.convert(tomllib.loads(blocks("toml")[1])["model"], Model)
    sample = SampleSpec(
        fields={"features": TensorSpec((64,), "float32"), "labels": TensorSpec((), "int64")},
        n_classes=10,
    )
    graph = model.graph(sample)
    assert f"{graph.param_count} {graph.flops}" in blocks("text")[0]


def test_every_way_to_name_a_model_reads():
    for table in blocks("toml")[0].split("[model]")[1:]:
        fields = tomllib.loads(table.partition("\n")[2])
        kind = next((key for key in ("preset", "path") if key in fields), None)
        model = msgspec.convert(fields if kind is None else {"kind": kind, **fields}, Model)
        assert [
            v.path for v in model.check() if v.path not in ("model.path", "model.factory")
        ] == []


def test_the_page_lists_every_type():
    words = set(re.findall(r"\w+", PAGE.partition("Types that can be cut:")[2].partition("##")[0]))
    assert set(TASKS) <= words
