"""Weights go from Hugging Face's safetensors to a checkpoint and back without loss."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import polyreme as pr
from polyreme.cli import app
from polyreme.errors import ConfigError, RunError
from polyreme.graph.options import ResNet20
from polyreme.runtime import checkpoint, loop, pieces, tensorfile
from polyreme.runtime.final import save_final
from polyreme.runtime.saver import Saver, save
from polyreme.runtime.state import Progress
from polyreme.runtime.weights import import_weights
from polyreme.runtime.weights_export import export_weights
from polyreme.runtime.weights_names import wanted
from test_graph_huggingface import CASES, IMAGE, graph_of, library_model
from tiny import VOCABULARY, Case, Samples, plan

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
    assert checkpoint.newest(tmp_path / "seen") is None
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


def _written(world, folder: str, tensors: dict, layout: str):
    """One rank's part of a checkpoint of these tensors, sharded along the rows or the columns."""
    placements = {
        "rows": (Replicate(), Shard(0)),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(0), Shard(1)),
    }[layout]
    grid = torch.arange(world.n_ranks).reshape(2, -1)
    mesh = DeviceMesh("cpu", grid)
    laid = {
        name: distribute_tensor(
            tensor,
            mesh,
            [
                p if isinstance(p, Replicate) or p.dim < tensor.dim() else Replicate()
                for p in placements
            ],
            src_data_rank=None,
        )
        for name, tensor in tensors.items()
    }
    index = pieces.write(Path(folder), world.rank, pieces.written(laid, world.rank, world.n_ranks))
    checkpoint.write_synced(
        checkpoint.part_index(Path(folder), world.rank), msgspec.json.encode(index)
    )


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
def test_pieces_of_several_ranks_are_joined_into_shards(layout, pool, tmp_path):
    graph = graph_of("llama tied")
    draw = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in wanted(graph).items()}
    state = tensors | {"optimizer/model.norm.weight/exp_avg": torch.zeros(32)}
    partial = tmp_path / "run" / "checkpoints" / ".step-3.x.partial"
    partial.mkdir(parents=True)
    pool(4).run(_written, str(partial), state, layout)
    checkpoint.complete(partial, checkpoint.describe(graph, Progress(step=3), n_ranks=4))
    moved = export_weights(graph, tmp_path / "run", tmp_path / "out", shard_bytes=20_000)
    assert len(moved.files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        key = name.partition("/")[2]
        file = index["weight_map"].pop(key)
        assert torch.equal(load_file(tmp_path / "out" / file)[key], tensor)
    assert index["weight_map"] == {}
    model_class = type(library_model("llama tied", *CASES["llama tied"]))
    model, said = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert torch.equal(model.lm_head.weight, tensors["param/model.embed_tokens.weight"])


def test_an_export_is_cast_where_asked_but_never_to_infinity(tmp_path):
    graph = ResNet20(width=4, blocks=1).graph(IMAGE)
    state = {
        name.partition("/")[2]: torch.full(shape, 7) if "num_batches" in name else torch.rand(shape)
        for name, shape in wanted(graph).items()
    }
    state["head.linear.bias"][:2] = torch.tensor([float("nan"), 1e5])
    save_file(state, tmp_path / "net.safetensors")
    export_weights(graph, tmp_path / "net.safetensors", tmp_path / "out", dtype=torch.bfloat16)
    for key, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        is_buffer = "running" in key or "num_batches" in key
        like = state[key] if is_buffer else state[key].bfloat16()
        torch.testing.assert_close(tensor, like, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RunError, match=r"head\.linear\.bias holds values that are too large"):
        export_weights(graph, tmp_path / "net.safetensors", tmp_path / "half", dtype=torch.float16)
    assert not (tmp_path / "half").exists()


def test_a_checkpoint_that_was_changed_is_not_exported(tmp_path):
    saved("vit", tmp_path / "source")
    import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-0" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank-00000\.safetensors is not what was written"):
        export_weights(graph_of("vit"), tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        export_weights(graph_of("vit"), tmp_path / "source", tmp_path / "out")
    shutil.rmtree(tmp_path / "run")
    import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")
    with pytest.raises(ConfigError, match="lacks"):
        export_weights(graph_of("llama"), tmp_path / "run", tmp_path / "out")


PEAK = """
import re, sys
from pathlib import Path
import torch
from polyreme.graph.options import MLP
from polyreme.runtime.weights import import_weights
from polyreme.runtime.weights_export import export_weights
from polyreme.runtime.weights_names import wanted
from polyreme.sample import SampleSpec, TensorSpec
torch.set_num_threads(1)
fields = {"features": TensorSpec((2048,), "float32"), "labels": TensorSpec((), "int64")}
graph = MLP(hidden=(2048, 3072), bias=False).graph(SampleSpec(fields=fields, n_classes=2048))
wanted(graph)
home = Path(sys.argv[1])


def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
before = peak()
import_weights(graph, home / "source", home / "run")
export_weights(graph, home / "run", home / "back")
print(peak() - before)
"""


def test_memory_stays_below_one_and_a_half_shards(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    shapes = {"0": (2048, 2048), "1": (3072, 2048), "2": (2048, 3072)}
    for number, shape in shapes.items():
        key = f"linear.{number}.linear.weight"
        save_file({key: torch.zeros(shape, dtype=torch.bfloat16)}, source / f"{number}.safetensors")
    largest = max(path.stat().st_size for path in source.iterdir())
    run = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=100)
    assert contents(tmp_path / "back") == contents(source)
    assert int(done.stdout) < 1.5 * largest, largest


def tiny_llama():
    return CASES["llama tied"][0].graph(Samples().sample)


def _trained(world, run: Path) -> None:
    """Two steps from what ``--resume`` finds in the folder."""
    torch.set_num_threads(1)
    case = Case(steps=2)
    job = dataclasses.replace(case.job(), graph=tiny_llama())
    split = {"shard": 2, "level": "params", "global_batch": 6, "precision": "fp32"}
    job = dataclasses.replace(job, plan=plan(job.graph, **split))
    start = checkpoint.find(str(run), run / "elsewhere")
    outcome = loop.train(
        job,
        world,
        save=Saver(run, job.graph, world, keep=2),
        load=lambda state: checkpoint.load(state, start, graph=job.graph),
    )
    save(outcome.state, run, graph=job.graph, keep=2)
    save_final(outcome.state, run, graph=job.graph)


def test_imported_weights_are_trained_by_two_processes_and_read_by_the_library(pool, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(**CASES["llama tied"][0].config, vocab_size=VOCABULARY)
    source = LlamaForCausalLM(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    import_weights(tiny_llama(), tmp_path / "source", tmp_path / "run")
    pool(2).run(_trained, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run").name == "step-2"
    export_weights(tiny_llama(), tmp_path / "run", tmp_path / "out")
    final = load_file(tmp_path / "run" / "final.safetensors")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[key], final[key]) for key in final)
    before = source.model.layers[0].self_attn.q_proj.weight.detach()
    moved = (exported["model.layers.0.self_attn.q_proj.weight"] - before).abs()
    assert moved.max() > 0
    assert moved.mean() < 0.2 * before.abs().mean(), "it went on from the imported weights"
    model, said = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    like = LlamaForCausalLM(config).float().eval()
    like.load_state_dict({**final, "lm_head.weight": final["model.embed_tokens.weight"]})
    ids = torch.arange(VOCABULARY)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, like(ids).logits)


SPEC = """
model = { kind = "mlp", hidden = [3] }
data = { kind = "digits" }
train = { steps = 1, global_batch = 4 }
"""


def test_the_command_goes_both_ways_and_says_what_it_wrote(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    shapes = {"0.linear.weight": (3, 3072), "0.linear.bias": (3,), "1.linear.bias": (10,)}
    shapes["1.linear.weight"] = (10, 3)
    source = tmp_path / "net.safetensors"
    save_file({f"linear.{key}": torch.randn(shape) for key, shape in shapes.items()}, source)

    def run(*words: str):
        spec = str(tmp_path / "spec.toml")
        asked = CliRunner().invoke(app, ["weights", words[0], spec, *words[1:], "--json"])
        return asked.exit_code, json.loads(asked.stdout)

    there = ["--to", str(tmp_path / "run")]
    code, said = run("import", "--from", str(source), *there, "--dtype", "float16")
    assert (code, said["errors"][0]["path"]) == (2, "--dtype")
    code, said = run("import", "--from", str(source), *there)
    assert (code, said["tensors"], said["n_bytes"]) == (0, 4, 4 * (9216 + 3 + 10 + 30))
    code, said = run("export", "--from", str(tmp_path / "run"), "--to", str(tmp_path / "back"))
    assert (code, said["files"]) == (0, ["net.safetensors"])
    assert (tmp_path / "back" / "net.safetensors").read_bytes() == source.read_bytes()
    code, said = run("export", "--from", str(tmp_path / "run"), *there)
    assert (code, said["errors"][0]["path"]) == (2, "--to")
    moved = pr.weights(
        "export",
        tmp_path / "spec.toml",
        source=tmp_path / "run",
        to=tmp_path / "half",
        dtype="float16",
    )
    assert moved.n_bytes == 2 * (9216 + 3 + 10 + 30)
