"""Weights go from Hugging Face's safetensors to a checkpoint and back without loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyreme.errors import ConfigError, RunError
from polyreme.graph.options import ResNet20
from polyreme.runtime import checkpoint, checkpoints, tensorfile
from polyreme.runtime.state import Progress
from polyreme.runtime.weights import import_weights
from polyreme.runtime.weights_export import export_weights
from polyreme.runtime.weights_names import wanted
from test_graph_huggingface import CASES, IMAGE, graph_of, library_model

torch.set_num_threads(1)

FAMILIES = ["llama", "llama tied", "gpt2", "bert", "bert sentence", "t5", "vit", "swin", "gemma3"]
LIBRARY_S = {"config.json", "model.safetensors", "model.safetensors.index.json"}


def saved(case: str, folder: Path, *, dtype=torch.float32, shard="50GB"):
    model = library_model(case, *CASES[case]).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    for other in folder.glob("generation_config.json"):
        other.unlink()
    return model


def there_and_back(graph, source: Path, tmp_path: Path) -> Path:
    import_weights(graph, source, tmp_path / "run")
    export_weights(graph, tmp_path / "run", tmp_path / "back")
    return tmp_path / "back"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.slice(5)
@pytest.mark.parametrize("case", FAMILIES)
def test_every_file_comes_back_as_it_was(case, shard, tmp_path):
    dtype = torch.bfloat16 if case == "gpt2" else torch.float32
    saved(case, tmp_path / "source", dtype=dtype, shard=shard)
    before = contents(tmp_path / "source")
    assert ("model.safetensors.index.json" in before) == (shard == "20KB")
    back = there_and_back(graph_of(case), tmp_path / "source", tmp_path)
    assert contents(back) == before
    meta = checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-0")
    assert meta.progress == Progress()


def test_buffers_and_counts_of_batch_norm_come_back(tmp_path):
    graph = ResNet20(width=4, blocks=1).graph(IMAGE)
    draw = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in wanted(graph).items():
        count = name.endswith("num_batches_tracked")
        state[name.partition("/")[2]] = (
            torch.tensor(7) if count else torch.randn(shape, generator=draw)
        )
    save_file(state, tmp_path / "net.safetensors", metadata={"by": "hand"})
    before = (tmp_path / "net.safetensors").read_bytes()
    back = there_and_back(graph, tmp_path / "net.safetensors", tmp_path)
    assert contents(back) == {"net.safetensors": before}
    index = checkpoint.read_index(tmp_path / "run" / "checkpoints" / "step-0")
    assert index.tensors["buffer/stem.norm.num_batches_tracked"].dtype == "I64"


@pytest.mark.parametrize("equal", [True, False])
def test_both_copies_of_tied_weights_must_be_equal_and_come_back(equal, tmp_path):
    source = tmp_path / "source"
    saved("llama tied", source)
    state = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, -1] += 0 if equal else 1e-6
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    before = contents(source)
    if equal:
        assert contents(there_and_back(graph_of("llama tied"), source, tmp_path)) == before
        return
    with pytest.raises(
        ConfigError, match=r"differ: lm_head\.weight and model\.embed_tokens\.weight"
    ):
        import_weights(graph_of("llama tied"), source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tied_weights_under_the_other_name_alone_are_found(tmp_path):
    source = tmp_path / "source"
    saved("llama tied", source)
    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, source / "model.safetensors")
    before = contents(source)
    assert contents(there_and_back(graph_of("llama tied"), source, tmp_path)) == before


def test_a_headless_model_s_names_are_understood_and_come_back(tmp_path):
    source = tmp_path / "source"
    saved("gpt2", source)
    state = load_file(source / "model.safetensors")
    state = {key.removeprefix("transformer."): value for key, value in state.items()}
    assert "wte.weight" in state
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    before = contents(source)
    assert contents(there_and_back(graph_of("gpt2"), source, tmp_path)) == before
    index = checkpoint.read_index(tmp_path / "run" / "checkpoints" / "step-0")
    assert "param/transformer.wte.weight" in index.tensors


def test_what_is_missing_unknown_and_misshapen_is_said_at_once(tmp_path):
    source = tmp_path / "source"
    saved("llama", source)
    state = load_file(source / "model.safetensors")
    del state["model.norm.weight"]
    state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()
    state |= {f"odd.{number}": torch.zeros(number) for number in range(9)}
    save_file(state, source / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        import_weights(graph_of("llama"), source, tmp_path / "run")
    missing, unknown, misshapen = (violation.rule for violation in raised.value.violations)
    assert missing == "lacks model.norm.weight [32]"
    assert "odd.4 [4] and 4 more (9 in all)" in unknown
    assert misshapen == "holds other shapes: lm_head.weight is [39, 32] there and [40, 32] here"
    assert list(tmp_path.iterdir()) == [source]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garbled(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"data_offsets", b"data_offsetz", 1))


@pytest.mark.parametrize("damage", [cut, emptied, lengthened, garbled, Path.unlink])
def test_a_damaged_file_is_named(damage, tmp_path):
    source = tmp_path / "source"
    saved("llama", source, shard="20KB")
    victim = sorted(source.glob("*.safetensors"))[1]
    damage(victim)
    with pytest.raises(ConfigError) as raised:
        import_weights(graph_of("llama"), source, tmp_path / "run")
    assert [violation.value for violation in raised.value.violations] == [str(victim)]
    assert list(tmp_path.iterdir()) == [source]


def test_an_index_that_is_wrong_is_named(tmp_path):
    source = tmp_path / "source"
    saved("llama", source, shard="20KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for place, said in (
        ("../elsewhere.safetensors", "a file elsewhere"),
        (None, "it is in model-"),
    ):
        wrong = dict(index["weight_map"])
        other = next(file for file in wrong.values() if file != wrong["lm_head.weight"])
        wrong["lm_head.weight"] = place or other
        path.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ConfigError, match=said):
            import_weights(graph_of("llama"), source, tmp_path / "run")
    path.write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        import_weights(graph_of("llama"), source, tmp_path / "run")


@pytest.mark.parametrize("there", ["folder", "file"])
def test_what_stands_where_it_is_written_is_not_touched(there, tmp_path):
    saved("vit", tmp_path / "source")
    import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    to = tmp_path / "to"
    if there == "folder":
        to.mkdir()
        (to / "mine").write_text("mine")
    else:
        to.write_text("mine")
    for move, source in ((import_weights, "source"), (export_weights, "run")):
        with pytest.raises(ConfigError, match="--to"):
            move(graph_of("vit"), tmp_path / source, to)
    assert (to / "mine" if there == "folder" else to).read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_weights(graph_of("vit"), tmp_path / "run", tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == LIBRARY_S - {
        "model.safetensors.index.json"
    }


def test_a_disk_that_fills_leaves_nothing_and_says_what_is_needed(tmp_path, monkeypatch):
    saved("vit", tmp_path / "source")
    write = tensorfile.write

    def full(*args):
        write(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "write", full)
    with pytest.raises(
        RunError, match=r"No space left on device; it needs [\d,]+ bytes, [\d,]+ are"
    ):
        import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_import_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    saved("vit", tmp_path / "source")

    class Killed(BaseException):
        pass

    def killed(*args):
        shutil.copytree(tmp_path / ".run.partial", tmp_path / "seen")
        raise Killed

    monkeypatch.setattr(checkpoint, "complete", killed)
    with pytest.raises(Killed):
        import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    assert list((tmp_path / "seen").rglob("rank-*.safetensors"))
    assert checkpoints.newest(tmp_path / "seen") is None
    monkeypatch.undo()
    shutil.move(tmp_path / "seen", tmp_path / ".run.partial")  # as a kill leaves it
    import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-0")
    assert not (tmp_path / ".run.partial").exists()


def test_what_the_library_ignores_is_kept_for_the_way_back(tmp_path):
    source = tmp_path / "source"
    saved("gpt2", source)
    state = load_file(source / "model.safetensors")
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    before = contents(source)
    assert contents(there_and_back(graph_of("gpt2"), source, tmp_path)) == before
