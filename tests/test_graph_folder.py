"""Weights move between transformers' folders and layers without loss."""

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from polyreme.errors import ConfigError
from polyreme.graph import from_module
from polyreme.graph.options import Folder
from polyreme.graph.run import run
from test_graph_huggingface import CASES, batch_of, library_model

torch.set_num_threads(1)

KINDS = ["llama", "llama tied", "gpt2", "bert", "bert sentence", "t5", "vit", "swin", "gemma3"]


def played(graph, batch, seed=0):
    modules = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, module, seed)
        modules[layer.name] = module.eval()
    with torch.no_grad():
        return run(graph, modules, batch), modules


@pytest.mark.parametrize("case", KINDS)
def test_a_saved_folder_gives_the_saved_model(case, tmp_path):
    options, sample = CASES[case]
    model = library_model(case, options, sample)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    folder = Folder(path=str(tmp_path))
    assert folder.check() == []
    batch = batch_of(sample)
    ours, _ = played(folder.graph(sample), batch)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_layers_saved_by_their_whole_names_load_in_the_library(case, tmp_path):
    options, sample = CASES[case]
    graph = options.graph(sample)
    batch = batch_of(sample)
    ours, modules = played(graph, batch, seed=4)
    state = {}
    for layer in graph.layers:
        tensors = modules[layer.name].state_dict()
        for local, whole in layer.params.items():
            assert torch.equal(state.setdefault(whole, tensors[local]), tensors[local])
    model = library_model(case, options, sample)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, ours, rtol=1e-5, atol=1e-5)


def test_missing_and_misshapen_weights_are_named(tmp_path):
    options, sample = CASES["llama"]
    library_model("llama", options, sample).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.norm.weight"] = torch.zeros(31)
    save_file(state, path)
    with pytest.raises(ConfigError) as raised:
        Folder(path=str(tmp_path)).graph(sample)
    assert {violation.value for violation in raised.value.violations} == {
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    }


def test_a_folder_without_weights_or_with_a_broken_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in str(Folder(path=str(tmp_path)).check()[0])
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "llama"}))
    assert "has no safetensors" in str(Folder(path=str(tmp_path)).check()[0])
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "resnet"}))
    assert 'type "resnet"' in str(Folder(path=str(tmp_path)).check()[0])


def test_a_library_model_keeps_weights_and_frozen_flags():
    options, sample = CASES["llama tied"]
    model = library_model("llama tied", options, sample)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    graph = from_module(model, sample)
    batch = batch_of(sample)
    ours, modules = played(graph, batch)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(**batch).logits, rtol=1e-5, atol=1e-5)
    assert graph.param_count == sum(p.numel() for p in model.parameters())
    frozen = {
        graph.layer(name).params[local]
        for name, module in modules.items()
        for local, tensor in module.named_parameters()
        if not tensor.requires_grad
    }
    assert frozen == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    assert from_module(model.config, sample).param_count == graph.param_count


def test_tied_head_gets_the_embedding_s_initial_values():
    options, sample = CASES["llama tied"]
    graph = options.graph(sample)
    assert graph.layer("head").ties == ("model.embed_tokens.weight",)
    _, modules = played(graph, batch_of(sample), seed=3)
    assert torch.equal(modules["head"].lm_head.weight, modules["embed"].embed_tokens.weight)


def test_rotary_frequencies_stay_float32_in_a_cast_module():
    options, sample = CASES["llama"]
    graph = options.graph(sample)
    _, modules = played(graph, batch_of(sample))
    block = modules["block.0"]
    frequencies = block.rotary.rotary.inv_freq.clone()
    block.bfloat16()
    assert block.block.mlp.up_proj.weight.dtype == torch.bfloat16
    assert torch.equal(block.rotary.rotary.inv_freq, frequencies)
    assert block(torch.randn(1, 12, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
