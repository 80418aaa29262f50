"""What is said of a wrong value begins with one that can be typed, and is then accepted."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from polyreme import spec
from polyreme.errors import ConfigError

LLAMA = {"kind": "transformers", "model_type": "llama"}
BERT = {"kind": "transformers", "model_type": "bert"}
RESNET = {"kind": "resnet20"}
PYTHON = {"kind": "python"}
TEXT = {"kind": "text", "path": "corpus.txt"}
TOKENS = {"kind": "tokens", "path": "three.bin", "vocab": 9}
ARRAYS = {"kind": "arrays", "path": "arrays.npz", "x_train": "x", "y_train": "y"}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("Some text. " * 10)
    Path("three.bin").write_bytes(b"abc")
    Path("model.py").write_text("def make(): ...\ndef build(): ...\n")
    with zipfile.ZipFile("arrays.npz", "w") as packed:
        packed.writestr("x.npy", b"")
        packed.writestr("y.npy", b"")


def _first(legal: str) -> Any:
    """The first value of what is legal, read as TOML."""
    ends = [end for end in range(1, len(legal) + 1) if legal[end : end + 1] in ("", " ", ",", ")")]
    for end in ends:
        try:
            return tomllib.loads(f"value = {legal[:end]}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    raise AssertionError(f"nothing to type: {legal}")


@pytest.mark.parametrize(
    ("path", "value", "first", "tables"),
    [
        ("model.preset", "lama-7b", "llama-7b", {"model": {}}),
        ("model.model_type", "lama", "llama", {"model": LLAMA}),
        ("model.task", "causal_lm", "masked_lm", {"model": BERT}),
        ("model.factory", "model.py:mak", "model.py:make", {"model": PYTHON}),
        ("model.factory", "model.py", "model.py:build", {"model": PYTHON}),
        ("model.factory", "nowhere.py:make", "model.py:make", {"model": PYTHON}),
        ("data.tokenizer", "gpt2", "bytes", {"data": TEXT}),
        ("data.heldout", "corpus.txt", 0.1, {"data": TEXT}),
        ("data.partition", {"kind": "classes"}, "iid", {"data": TEXT}),
        ("data.dtype", "uint16", "uint8", {"data": TOKENS}),
        ("data.header_bytes", 4, 0, {"data": {**TOKENS, "dtype": "uint8"}}),
        ("data.y_train", "why", "y", {"model": RESNET, "data": ARRAYS}),
        ("cluster.preset", "8xH1000", "8xH100", {}),
        ("cluster.preset", "2x4xtitan", "2x4xTitan-Xp", {}),
        ("cluster.preset", "preset:1xH10", "preset:1xH100", {}),
        ("cluster.preset", "H100", "8xH100", {}),
        ("cluster.preset", "0xA100", "8xA100", {}),
        ("cluster.devices", 9, 8, {"cluster": {"preset": "8xH100"}}),
    ],
)
def test_the_first_legal_value_is_accepted(
    path: str, value: object, first: object, tables: dict[str, Any]
) -> None:
    document = {"model": LLAMA, "data": TEXT, **tables}
    document["train"] = {"steps": 9} if document["model"] == RESNET else {"steps": 9, "seq_len": 4}
    table, key = path.split(".")
    document[table] = {**document.get(table, {}), key: value}
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    (violation,) = caught.value.violations
    assert violation.path == path
    assert value in (violation.value, {"kind": violation.value})
    assert _first(violation.legal) == first
    document[table] = {**document[table], key: first}
    spec.parse(document)


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({}, "data.text"),
        ({"text": "t", "columns": {"labels": "y", "features": "x"}}, "data.columns"),
        ({"columns": {"labels": "y"}}, "data.columns"),
        ({"columns": {"features": "x", "pixel_values": "i", "labels": "y"}}, "data.columns"),
    ],
)
def test_columns_of_a_dataset_that_make_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], path: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    (tmp_path / "state.json").write_text("{}")
    document = {"model": {"kind": "mlp"}, "data": {"kind": "datasets", "path": ".", **data}}
    document["train"] = {"steps": 9, "seq_len": 4} if "text" in data else {"steps": 9}
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    assert path in {violation.path for violation in caught.value.violations}


def test_a_relative_path_is_shown_where_it_was_looked_for(tmp_path: Path) -> None:
    document = {"model": {"path": "mine"}, "data": {"kind": "text", "path": "no.txt"}}
    document["train"] = {"steps": 9, "seq_len": 4}
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    model, data = caught.value.violations
    assert str(tmp_path / "mine" / "config.json") in model.rule
    assert str(tmp_path / "no.txt") in data.rule
