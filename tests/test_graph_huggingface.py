"""Each family cut into layers computes, counts and names what transformers does."""

import functools
import importlib

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyreme.graph import parts
from polyreme.graph.huggingface import _WHERE
from polyreme.graph.options import TASKS, Transformers
from polyreme.graph.run import run
from polyreme.sample import SampleSpec, TensorSpec

torch.set_num_threads(1)

T, V = 12, 40
TEXT = SampleSpec(
    fields={"input_ids": TensorSpec((T,), "int64"), "labels": TensorSpec((T,), "int64")},
    n_classes=V,
)
PAIR = SampleSpec(
    fields={
        "input_ids": TensorSpec((T,), "int64"),
        "decoder_input_ids": TensorSpec((7,), "int64"),
        "labels": TensorSpec((7,), "int64"),
    },
    n_classes=V,
)
SENTENCE = SampleSpec(
    fields={"input_ids": TensorSpec((T,), "int64"), "labels": TensorSpec((), "int64")},
    n_classes=3,
)
IMAGE = SampleSpec(
    fields={"pixel_values": TensorSpec((1, 16, 16), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=5,
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

CASES = {
    "llama": (Transformers(model_type="llama", config=GROUPED), TEXT),
    "llama tied": (
        Transformers(model_type="llama", config={**GROUPED, "tie_word_embeddings": True}),
        TEXT,
    ),
    "llama3 rope": (
        Transformers(
            model_type="llama",
            config={
                **GROUPED,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8,
                },
            },
        ),
        TEXT,
    ),
    "qwen2": (Transformers(model_type="qwen2", config=GROUPED), TEXT),
    "qwen2 window": (
        Transformers(model_type="qwen2", config={**GROUPED, **MIXED, "use_sliding_window": True}),
        TEXT,
    ),
    "qwen3": (Transformers(model_type="qwen3", config={**GROUPED, "head_dim": 16}), TEXT),
    "mistral window": (
        Transformers(model_type="mistral", config={**GROUPED, "sliding_window": 5}),
        TEXT,
    ),
    "mistral window = T": (
        Transformers(model_type="mistral", config={**GROUPED, "sliding_window": T}),
        TEXT,
    ),
    "gpt2": (
        Transformers(model_type="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 4}),
        TEXT,
    ),
    "gpt2 scaled": (
        Transformers(
            model_type="gpt2",
            config={
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "scale_attn_by_inverse_layer_idx": True,
            },
        ),
        TEXT,
    ),
    "gemma": (Transformers(model_type="gemma", config={**GROUPED, "head_dim": 8}), TEXT),
    "gemma2": (
        Transformers(model_type="gemma2", config={**GROUPED, **MIXED, "head_dim": 8}),
        TEXT,
    ),
    "gemma3": (
        Transformers(model_type="gemma3_text", config={**GROUPED, **MIXED, "head_dim": 8}),
        TEXT,
    ),
    "phi": (Transformers(model_type="phi", config=SMALL), TEXT),
    "phi3": (Transformers(model_type="phi3", config={**GROUPED, "pad_token_id": 0}), TEXT),
    "bert": (Transformers(model_type="bert", config=SMALL), TEXT),
    "bert sentence": (
        Transformers(
            model_type="bert", config={**SMALL, "vocab_size": V}, task="sequence_classification"
        ),
        SENTENCE,
    ),
    "t5": (
        Transformers(
            model_type="t5",
            config={"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ),
        PAIR,
    ),
    "t5 gated, untied": (
        Transformers(
            model_type="t5",
            config={
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_decoder_layers": 3,
                "num_heads": 4,
                "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False,
            },
        ),
        PAIR,
    ),
    "vit": (Transformers(model_type="vit", config={**SMALL, "patch_size": 4}), IMAGE),
    "swin": (
        Transformers(
            model_type="swin",
            config={
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 2,
                "patch_size": 2,
            },
        ),
        IMAGE,
    ),
    "swin padded": (
        Transformers(
            model_type="swin",
            config={
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 3,
                "patch_size": 2,
            },
        ),
        IMAGE,
    ),
    "mixtral": (
        Transformers(model_type="mixtral", config={**GROUPED, "num_local_experts": 4}),
        TEXT,
    ),
}
CLASSES = {
    "llama": "llama.LlamaForCausalLM",
    "qwen2": "qwen2.Qwen2ForCausalLM",
    "qwen3": "qwen3.Qwen3ForCausalLM",
    "mistral": "mistral.MistralForCausalLM",
    "mixtral": "mixtral.MixtralForCausalLM",
    "gpt2": "gpt2.GPT2LMHeadModel",
    "gemma": "gemma.GemmaForCausalLM",
    "gemma2": "gemma2.Gemma2ForCausalLM",
    "gemma3": "gemma3.Gemma3ForCausalLM",
    "phi": "phi.PhiForCausalLM",
    "phi3": "phi3.Phi3ForCausalLM",
    "bert": "bert.BertForMaskedLM",
    "bert sentence": "bert.BertForSequenceClassification",
    "t5": "t5.T5ForConditionalGeneration",
    "vit": "vit.ViTForImageClassification",
    "swin": "swin.SwinForImageClassification",
}


def library_model(case, options, sample, device="cpu"):
    """The transformers model, made without anything of polyreme's."""
    name = CLASSES.get(case) or CLASSES[case.split(",")[0].split()[0].replace("llama3", "llama")]
    package, class_name = name.split(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    model_class = getattr(module, class_name)
    fields = dict(options.config)
    if "pixel_values" in sample.fields:
        fields |= {"image_size": 16, "num_channels": 1, "num_labels": sample.n_classes}
    elif not sample.fields["labels"].shape:
        fields["num_labels"] = sample.n_classes
    else:
        fields["vocab_size"] = sample.n_classes
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(model_class.config_class(**fields)).eval()
    if "num_local_experts" in fields and device == "meta":
        model.set_experts_implementation("batched_mm")  # the one that needs no data and is counted
    return model


def batch_of(sample, n=2, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    batch = {}
    for key, spec in sample.fields.items():
        if key == "labels":
            continue
        if spec.dtype == "int64":
            high = V
            batch[key] = torch.randint(0, high, (n, *spec.shape), generator=generator).to(device)
        else:
            batch[key] = torch.randn((n, *spec.shape), generator=generator).to(device)
    return batch


def modules_with(graph, state, dtype=torch.float32):
    """Every layer materialised, its buffers initialised, its parameters from a state dict."""
    modules = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 10**6)
        graph.initialise(layer.name, module, seed=0)
        local = {name: state[whole] for name, whole in layer.params.items()}
        module.load_state_dict(local, strict=True)
        modules[layer.name] = module.eval()
    return modules


@functools.cache
def graph_of(case):
    options, sample = CASES[case]
    return options.graph(sample)


@pytest.mark.parametrize("case", CASES)
def test_layers_compute_what_the_library_computes(case):
    options, sample = CASES[case]
    model = library_model(case, options, sample)
    batch = batch_of(sample)
    modules = modules_with(graph_of(case), model.state_dict())
    with torch.no_grad():
        ours = run(graph_of(case), modules, batch)
        theirs = model(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    out = graph_of(case).layers[-1].outputs["logits"]
    assert tuple(out.shape) == tuple(theirs.shape[1:])


@pytest.mark.parametrize("case", CASES)
def test_names_and_counts_are_the_library_s(case):
    options, sample = CASES[case]
    model = library_model(case, options, sample, device="meta")
    graph = graph_of(case)
    tied = dict(getattr(model, "all_tied_weights_keys", {}) or {})
    ours = {whole for layer in graph.layers for whole in layer.params.values()}
    assert ours == {tied.get(name, name) for name in model.state_dict()}
    assert graph.param_count == sum(p.numel() for p in model.parameters())
    owners = [w for layer in graph.layers for w in layer.params.values() if w not in layer.ties]
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    assert sum(sizes[name] for name in set(owners) & set(sizes)) == graph.param_count


@pytest.mark.parametrize("case", CASES)
def test_flops_are_the_whole_model_s(case):
    options, sample = CASES[case]
    model = library_model(case, options, sample, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch_of(sample, n=3, device="meta"))
    assert graph_of(case).flops == pytest.approx(counter.get_total_flops() / 3, rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_initial_values_are_distributed_as_the_library_s(case):
    options, sample = CASES[case]
    model = library_model(case, options, sample)
    theirs = dict(model.named_parameters())
    for layer in graph_of(case).layers:
        module = graph_of(case).build(layer.name).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 10**6)
        graph_of(case).initialise(layer.name, module, seed=3)
        for local, value in module.named_parameters():
            other = theirs[layer.params[local]]
            assert torch.isfinite(value).all(), local
            spread = 4 / value.numel() ** 0.5
            assert value.std(correction=0).item() == pytest.approx(
                other.std(correction=0).item(), rel=spread, abs=1e-7
            ), (layer.name, local)
            assert value.mean().item() == pytest.approx(
                other.mean().item(), abs=1e-7 + 2 * spread * other.std(correction=0).item()
            ), (layer.name, local)


@pytest.mark.parametrize("case", ["gpt2", "phi", "bert", "t5", "llama tied", "swin", "gemma2"])
def test_training_with_dropout_follows_the_library_to_the_gradient(case):
    options, sample = CASES[case]
    rates = {
        "llama tied": {"attention_dropout": 0.2},
        "gemma2": {"attention_dropout": 0.2},
        "swin": {"drop_path_rate": 0.5, "hidden_dropout_prob": 0.1},
        "phi": {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    }
    options = msgspec.structs.replace(options, config={**options.config, **rates.get(case, {})})
    graph = options.graph(sample)
    model = library_model(case, options, sample).train()
    modules = {
        name: module.train() for name, module in modules_with(graph, model.state_dict()).items()
    }
    batch = batch_of(sample)
    torch.manual_seed(5)
    ours = run(graph, modules, batch)
    torch.manual_seed(5)
    theirs = model(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0))
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    gradients = {}
    for layer in graph.layers:
        for local, tensor in modules[layer.name].named_parameters():
            if tensor.grad is not None:
                whole = layer.params[local]
                gradients[whole] = gradients.get(whole, 0) + tensor.grad
    for name, tensor in model.named_parameters():
        if tensor.grad is not None:
            torch.testing.assert_close(gradients[name], tensor.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_products_are_the_sums_of_experts_in_turn(dtype):
    """Values and gradients of a block; torch has no grouped product in float64."""
    options, sample = CASES["mixtral"]
    model = library_model("mixtral", options, sample).train()
    ours = modules_with(graph_of("mixtral"), model.state_dict())["block.0"].to(dtype)
    theirs = model.model.layers[0].mlp.to(dtype)
    model.set_experts_implementation("eager")
    hidden = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, wanted = ours.block.mlp(hidden), theirs(hidden)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    for part in (found, wanted):
        part.square().sum().backward()
    other = dict(theirs.named_parameters())
    for name, tensor in ours.block.mlp.named_parameters():
        scale = other[name].grad.abs().max().item()
        torch.testing.assert_close(
            tensor.grad, other[name].grad, rtol=tolerance, atol=tolerance * scale
        )


def test_every_type_of_the_options_is_tested_and_can_be_cut():
    assert set(_WHERE) == set(TASKS)
    assert {options.model_type for options, _ in CASES.values()} == set(TASKS)


def test_a_hundred_blocks_are_built_and_played_as_one(monkeypatch):
    options, sample = CASES["llama"]
    deep = msgspec.structs.replace(options, config={**GROUPED, "num_hidden_layers": 100})
    played = []
    monkeypatch.setattr(parts, "_play", lambda *a, real=parts._play: played.append(1) or real(*a))
    assert len(deep.graph(sample).layers) == 102
    assert len(played) == 3


def test_splits_are_the_largest_legal_degrees():
    graph = graph_of("llama")
    assert dict(graph.layer("block.0").splits) == {"tp": 2, "cp": T}
    assert dict(graph.layer("embed").splits) == {"tp": V, "cp": T}
    assert graph_of("gpt2").layer("block.1").splits["tp"] == 4
