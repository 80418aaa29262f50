"""Models and data that do not go together: known from their options, before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyreme import spec
from polyreme.data import gives, objective
from polyreme.errors import ConfigError
from polyreme.spec.fit import matched

SOURCE = {"kind": "python_source"}
DIGITS = {"kind": "digits"}
NARROW = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
NARROW |= {"num_attention_heads": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2}


def _transformers(model_type: str, task: str | None = None, **config: Any) -> dict[str, Any]:
    model = {"kind": "transformers", "model_type": model_type, "config": config}
    return model | ({"task": task} if task else {})


def _document(model: dict[str, Any], data: dict[str, Any], seq_len: int = 64) -> dict[str, Any]:
    train = {"steps": 2}
    if data["kind"] in ("python_source", "text", "tokens"):
        train["seq_len"] = seq_len
    return {"model": model, "data": data, "train": train}


def _refused(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    return {violation.path: violation.legal for violation in caught.value.violations}


REFUSED = [
    (_document(_transformers("llama", **NARROW), DIGITS), "data.kind", '"python_source"'),
    (_document({"kind": "char_lstm"}, DIGITS), "data.kind", '"python_source"'),
    (_document({"kind": "resnet20"}, SOURCE), "data.kind", '"digits"'),
    (_document({"kind": "mlp"}, SOURCE), "data.kind", '"digits"'),
    (_document({"preset": "vit-base"}, SOURCE), "data.kind", '"digits"'),
    (_document(_transformers("swin"), SOURCE), "data.kind", '"digits"'),
    (_document(_transformers("t5"), DIGITS), "data.kind", '"python_source"'),
    (_document({"preset": "t5-large"}, DIGITS), "data.kind", '"python_source"'),
    (
        _document(_transformers("bert", "sequence_classification", **NARROW), SOURCE),
        "model.task",
        '"masked_lm"',
    ),
    (
        _document(_transformers("llama", vocab_size=255, **NARROW), SOURCE),
        "model.config.vocab_size",
        "256",
    ),
    (
        _document({"preset": "llama-7b", "config": {"vocab_size": 9}}, SOURCE),
        "model.config.vocab_size",
        "256",
    ),
    (
        _document(_transformers("vit", num_labels=9, **NARROW), DIGITS),
        "model.config.num_labels",
        "10",
    ),
    (
        _document(_transformers("vit", image_size=64, **NARROW), DIGITS),
        "model.config.image_size",
        "32",
    ),
    (_document({"preset": "vit-base"}, DIGITS), "model.config.image_size", "32"),
    (
        _document(_transformers("vit", image_size=[32, 16], **NARROW), DIGITS),
        "model.config.image_size",
        "32",
    ),
    (
        _document(_transformers("vit", num_channels=1, **NARROW), DIGITS),
        "model.config.num_channels",
        "3",
    ),
    (_document(_transformers("gpt2", **GPT2), SOURCE, 1025), "train.seq_len", "1024"),
    (_document(_transformers("gpt2", n_positions=63, **GPT2), SOURCE), "train.seq_len", "63"),
    (
        _document(_transformers("gpt2", max_position_embeddings=63, **GPT2), SOURCE),
        "train.seq_len",
        "63",
    ),
    (_document({"preset": "gpt3-175b"}, SOURCE, 2049), "train.seq_len", "2048"),
    (_document(_transformers("bert", **NARROW), SOURCE, 513), "train.seq_len", "512"),
    (
        _document(_transformers("bert", vocab_size=256, **NARROW), SOURCE),
        "model.config.vocab_size",
        "257",  # bytes and the mask
    ),
    (
        _document(_transformers("t5", vocab_size=255, **T5), SOURCE),
        "model.config.vocab_size",
        "256",
    ),
]
ACCEPTED = [
    _document(_transformers("llama", vocab_size=256, **NARROW), SOURCE),
    _document(_transformers("llama", max_position_embeddings=8, **NARROW), SOURCE),  # rotary
    _document(_transformers("gpt2", **GPT2), SOURCE, 1024),
    _document(_transformers("bert", max_position_embeddings=64, **NARROW), SOURCE),
    _document(_transformers("bert", vocab_size=257, **NARROW), SOURCE),
    _document(_transformers("t5", **T5), SOURCE, 9),
    _document({"preset": "t5-large"}, SOURCE, 512),
    _document(_transformers("vit", num_labels=10, image_size=[32, 32], **NARROW), DIGITS),
    _document(_transformers("vit", num_channels=1, **NARROW), {**DIGITS, "channels": 1}),
    _document({"kind": "char_lstm"}, SOURCE),
    _document({"kind": "mlp"}, DIGITS),
]


@pytest.mark.parametrize(("document", "path", "first"), REFUSED)
def test_what_cannot_go_together_is_refused(
    document: dict[str, Any], path: str, first: str
) -> None:
    found = _refused(document)
    assert set(found) == {path}
    assert found[path].split(",")[0].split(" ")[0] == first


@pytest.mark.parametrize("document", [document for document, _, _ in REFUSED])
def test_nothing_is_refused_that_could_be_built(document: dict[str, Any]) -> None:
    sample = _sample(document)
    with pytest.raises(ConfigError):
        _model(document).graph(sample)


@pytest.mark.parametrize("document", ACCEPTED)
def test_what_is_accepted_can_be_built(document: dict[str, Any]) -> None:
    spec.parse(document)
    _model(document).graph(_sample(document))


def _model(document: dict[str, Any]) -> Any:
    """The model alone, as the spec reads it."""
    import msgspec

    from polyreme.graph import options

    config = dict(document["model"])
    if "preset" in config:
        return options.Preset(**config)
    return msgspec.convert(config, options.Model)


def _sample(document: dict[str, Any]) -> Any:
    from polyreme.sample import SampleSpec, TensorSpec

    if document["data"]["kind"] == "digits":
        image = TensorSpec((document["data"].get("channels", 3), 32, 32), "float32")
        fields = {"pixel_values": image, "labels": TensorSpec((), "int64")}
        return SampleSpec(fields=fields, n_classes=10)
    reads = _model(document).reads
    asked = reads.objectives[0] if reads.objectives else "next"
    n_classes = 257 if asked == "masked" else 256
    return objective.sample(asked, document["train"]["seq_len"], n_classes)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("text", {"path": "x"}),
        ("tokens", {"path": "x", "vocab": 9}),
        ("digits", {}),
        ("datasets", {"path": "x", "columns": {"features": "x", "labels": "y"}}),
        ("svmlight", {"path": "x"}),
        ("arrays", {"path": "x"}),
    ],
)
def test_a_user_s_module_may_read_anything(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    (tmp_path / "model.py").write_text("def make(): ...\n")
    data = {"kind": kind, **options}
    model = {"kind": "python", "factory": f"{tmp_path}/model.py:make"}
    spec.parse(_document(model, data), trusted=["data"])


def test_a_vocabulary_that_the_data_give_is_held_against_the_model(tmp_path: Path) -> None:
    data = {"kind": "tokens", "path": str(tmp_path / "no.bin"), "vocab": 32001}
    with pytest.raises(ConfigError) as caught:
        spec.parse(_document({"preset": "llama-7b"}, data), trusted=["data"])
    (violation,) = caught.value.violations
    assert (violation.path, violation.value) == ("model.config.vocab_size", 32000)
    spec.parse(_document({"preset": "llama-7b"}, {**data, "vocab": 32000}), trusted=["data"])


def test_a_folder_s_configuration_is_held_against_the_data(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    document = _document({"path": str(tmp_path)}, SOURCE)
    for fields in (
        {"model_type": "llama", "vocab_size": 99},
        {"model_type": "vit", "id2label": {"0": "a"}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert set(_refused(document)) <= {"model.path", "data.kind"}
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 63}')
    assert _refused(document)["train.seq_len"].startswith("63 ")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 256}')
    spec.parse(document)


@pytest.mark.parametrize(
    ("model", "learns"),
    [
        (_transformers("llama", **NARROW), "next"),
        ({"kind": "char_lstm"}, "next"),
        (_transformers("bert", **NARROW), "masked"),
        ({"preset": "bert-huge"}, "masked"),
        (_transformers("t5", **T5), "continuation"),
    ],
)
def test_text_is_read_for_what_the_model_learns(model: dict[str, Any], learns: str) -> None:
    left_open = spec.parse(_document(model, SOURCE))
    assert matched(left_open).data.objective == learns
    for asked in ("next", "masked", "continuation"):
        document = _document(model, {**SOURCE, "objective": asked})
        if asked == learns:
            assert matched(spec.parse(document)) == matched(left_open)
        else:
            assert _refused(document) == {"data.objective": f'"{learns}" (or leave it out)'}


def test_a_user_s_module_learns_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def make(): ...\n")
    model = {"kind": "python", "factory": f"{tmp_path}/model.py:make"}
    assert matched(spec.parse(_document(model, SOURCE))).data.objective == "next"
    told = spec.parse(_document(model, {**SOURCE, "objective": "masked"}))
    assert matched(told).data.objective == "masked"
    images = spec.parse(_document(model, DIGITS))
    assert matched(images) == images


def test_a_folder_learns_what_its_architecture_is_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    document = _document({"path": str(tmp_path)}, SOURCE)
    fields: dict[str, Any] = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    for named in (["BertForMaskedLM"], None, "BertModel", [7]):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": named}))
        assert matched(spec.parse(document)).data.objective == "masked"
    fields["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert set(_refused(document)) == {"model.path"}


@pytest.mark.parametrize(("more", "refused"), [({}, "30523"), ({"mask": 103}, None)])
def test_a_mask_among_the_tokens_needs_no_room(
    tmp_path: Path, more: dict[str, Any], refused: str | None
) -> None:
    data = {"kind": "tokens", "path": str(tmp_path / "no.bin"), "vocab": 30522, **more}
    document = _document({"preset": "bert-huge"}, data)
    if refused is None:
        spec.parse(document, trusted=["data"])
        return
    with pytest.raises(ConfigError, match=f"Legal: {refused}"):
        spec.parse(document, trusted=["data"])


def test_the_vocabulary_of_a_tokenizer_is_that_of_the_library(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE, Unigram, WordLevel

    models = (
        BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
        WordLevel({"a": 0, "b": 7}, unk_token="a"),
        Unigram([("a", -1.0), ("b", -2.0)], unk_id=0),
    )
    path = tmp_path / "tokenizer.json"
    for model in models:
        for added in ([], ["<end>"], ["[MASK]", "<end>"]):
            tokenizer = Tokenizer(model)
            tokenizer.add_special_tokens([AddedToken(each) for each in added])
            tokenizer.save(str(path))
            given = gives.text(str(path), None)
            assert given.n_classes == max(tokenizer.get_vocab().values()) + 1
            assert given.n_masked == given.n_classes + ("[MASK]" not in added)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": 3}'])
def test_a_tokenizer_that_cannot_be_read_says_nothing_yet(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    for name in ("tokenizer.json", "none.json"):
        assert gives.text(str(tmp_path / name), None) == gives.Gives(form="text")


def test_data_of_the_wrong_form_make_no_seq_len_wrong() -> None:
    document = _document(_transformers("llama"), SOURCE) | {"data": DIGITS}
    assert set(_refused(document)) == {"data.kind"}
    spec.parse(document | {"data": SOURCE})
    document = _document({"kind": "resnet20"}, DIGITS) | {"data": SOURCE}
    assert set(_refused(document)) == {"data.kind"}


def test_a_target_needs_something_held_out() -> None:
    document = _document({"kind": "char_lstm"}, {**SOURCE, "heldout": 0})
    spec.parse(document)
    assert set(_refused(document | {"report": {"target": "heldout_loss=2"}})) == {"data.heldout"}


def test_a_reference_must_be_a_run(tmp_path: Path) -> None:
    report = {"target": "heldout_loss=2", "reference": str(tmp_path)}
    document = _document({"kind": "char_lstm"}, SOURCE) | {"report": report}
    assert set(_refused(document)) == {"report.reference"}
    (tmp_path / "log.jsonl").write_text("")
    spec.parse(document)


def test_a_tracker_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document({"kind": "char_lstm"}, SOURCE) | {"report": {"trackers": ["wandb"]}}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert set(_refused(document)) == {"report.trackers[0]"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    spec.parse(document)


def test_all_of_it_is_found_without_torch_beside_other_faults() -> None:
    document = _document(_transformers("gpt2", n_positions=8, vocab_size=9), SOURCE)
    document["train"]["steps"] = 0
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "from polyreme import errors, spec\n"
        f"try: spec.parse({document!r})\n"
        "except errors.ConfigError as error: print(*[each.path for each in error.violations])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = done.stdout.split()
    assert found == ["train.steps", "model.config.vocab_size", "train.seq_len"], done.stderr
