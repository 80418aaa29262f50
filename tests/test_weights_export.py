"""Checkpoints of any layout are exported, and imported weights trained."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
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
from laid import among
from polyreme.cli import app
from polyreme.errors import ConfigError, RunError
from polyreme.graph.options import ResNet20
from polyreme.runtime import checkpoint, checkpoints, loop, pieces, tensorfile
from polyreme.runtime.final import save_final
from polyreme.runtime.parted import dealt
from polyreme.runtime.saver import Saver
from polyreme.runtime.state import Progress
from polyreme.runtime.synced import write_synced
from polyreme.runtime.weights import import_weights
from polyreme.runtime.weights_export import _Weights, export_weights
from polyreme.runtime.weights_names import wanted
from test_graph_huggingface import CASES, IMAGE, graph_of, library_model
from test_weights import contents, saved
from tiny import VOCABULARY, Case, Samples, plan, save

torch.set_num_threads(1)


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
    parts = dealt({name: among(tensor, world) for name, tensor in laid.items()})
    index = pieces.write(Path(folder), world.rank, parts)
    write_synced(checkpoint.part_index(Path(folder), world.rank), msgspec.json.encode(index))


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


def _cut(shape: tuple[int, ...], draw: random.Random) -> list[tuple[slice, ...]]:
    """A tensor cut in rectangles at random places, again and again; in a random order."""
    boxes = [tuple(slice(0, n) for n in shape)]
    for _ in range(draw.randrange(5)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randint(box[dim].start, box[dim].stop)
        halves = slice(box[dim].start, at), slice(at, box[dim].stop)
        boxes += [(*box[:dim], half, *box[dim + 1 :]) for half in halves]
    full = [box for box in boxes if all(part.start < part.stop for part in box)]
    return draw.sample(full, len(full))


@pytest.mark.parametrize("block_bytes", [4, 16, 64, 4096])
def test_however_a_tensor_is_cut_it_is_exported_in_small_blocks(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(tensorfile, "BLOCK_BYTES", block_bytes)
    draw = random.Random(block_bytes)
    shapes = [(), (1,), (7,), (6, 5), (1, 9), (5, 4, 3), (3, 1, 4), (2, 3, 2, 5)] * 20
    tensors = {f"param/{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    parts: list[list[pieces.Part]] = [[] for _ in range(5)]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for rank, box in enumerate(_cut(shape, draw) if shape else [()]):
            offset = tuple(part.start for part in box)
            part = pieces.Part(name=name, shape=shape, offset=offset, local=tensor[box])
            parts[rank].append(part)
    index = pieces.Index.merged([pieces.write(tmp_path, n, each) for n, each in enumerate(parts)])
    held = {name: tensorfile.header(tmp_path / name)[0] for name in index.files}
    weights = _Weights(folder=tmp_path, tensors=index.tensors, held=held, origin=None)
    for name, tensor in tensors.items():
        blocks = [bytes(block) for block in weights.blocks(name)]
        assert b"".join(blocks) == tensor.numpy().tobytes(), tensor.shape
        assert max(map(len, blocks)) <= block_bytes


@pytest.mark.parametrize("way", ["import", "export"])
def test_a_source_that_cannot_be_read_is_no_fault_of_the_place_to_write(tmp_path, monkeypatch, way):
    saved("vit", tmp_path / "source")
    if way == "export":
        import_weights(graph_of("vit"), tmp_path / "source", tmp_path / "run")

    def torn(file, held):
        yield b""
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tensorfile, "blocks", torn)
    source = tmp_path / ("run" if way == "export" else "source")
    move = export_weights if way == "export" else import_weights
    with pytest.raises(RunError, match=r"safetensors cannot be read: Input/output error"):
        move(graph_of("vit"), source, tmp_path / "to")
    assert not (tmp_path / "to").exists()


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
from polyreme.runtime.weights_export import _Weights, export_weights
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


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
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
    (start,) = checkpoints.find(str(run), run / "elsewhere")
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
    assert checkpoints.newest(tmp_path / "run").name == "step-2"
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
