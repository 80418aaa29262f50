"""Saved bytes: what autograd keeps for a backward pass, counted without running one."""

from __future__ import annotations

import pytest
import torch

from polyreme.graph.layer import LayerGraph
from polyreme.graph.options import CharLSTM, ResNet20, Transformers
from polyreme.profile.saved import saved_bytes
from polyreme.sample import SampleSpec, TensorSpec
from profile_toy import WIDTH, tiny_graph


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2), ("fp64", 8)])
def test_a_linear_layer_saves_its_input_and_no_weight(precision, width) -> None:
    saved = saved_bytes(tiny_graph("linear", "linear"), precision)["linear"]
    assert saved.saved == saved.recompute == WIDTH * width


def test_a_tensor_saved_by_two_layers_is_counted_once() -> None:
    graph = tiny_graph("linear", "relu", "linear")
    saved = saved_bytes(graph, "fp32")
    total = sum(saved[layer.kind].saved for layer in graph.layers)
    assert total == 2 * WIDTH * 4  # the batch, and the relu's output that is the next one's input
    assert total == _measured_saved(graph)


@pytest.mark.parametrize(
    "kinds",
    [("linear-relu", "linear"), ("linear", "pass", "linear"), ("dropout", "linear", "dropout")],
)
def test_saved_bytes_are_what_autograd_keeps_in_a_real_pass(kinds) -> None:
    graph = tiny_graph(*kinds)
    saved = saved_bytes(graph, "fp32")
    assert sum(saved[layer.kind].saved for layer in graph.layers) == _measured_saved(graph)


def _measured_saved(graph: LayerGraph, batch: int = 5) -> float:
    """Bytes a sample that autograd keeps in one real pass."""
    kept = {}
    weights = set()

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    values = {
        f"batch:{name}": torch.zeros(batch, *spec.shape, dtype=torch.int64)
        if spec.dtype == "int64"
        else torch.randn(batch, *spec.shape)
        for name, spec in graph.inputs.items()
    }
    modules = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in graph.layers:
            module = graph.build(layer.name).to_empty(device="cpu")
            graph.initialise(layer.name, module, 0)
            modules.append(module)
            weights |= {
                tensor.untyped_storage()._cdata
                for tensor in (*module.parameters(), *module.buffers())
            }
            out = module(*(values[name] for name in layer.inputs))
            outputs = out if isinstance(out, tuple) else (out,)
            values |= zip((f"{layer.name}.{name}" for name in layer.outputs), outputs, strict=True)
    nbytes = sum(
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights
    )
    return nbytes / batch


TOKENS = SampleSpec(
    fields={"input_ids": TensorSpec((32,), "int64"), "labels": TensorSpec((32,), "int64")},
    n_classes=40,
)
IMAGES = SampleSpec(
    fields={"pixel_values": TensorSpec((1, 32, 32), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=10,
)
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
MIXTRAL = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 8}
PAIRS = SampleSpec(
    fields={**TOKENS.fields, "decoder_input_ids": TensorSpec((32,), "int64")}, n_classes=40
)
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}


@pytest.mark.parametrize(
    ("model", "sample"),
    [
        (Transformers(model_type="llama", config=LLAMA), TOKENS),
        (Transformers(model_type="mixtral", config=MIXTRAL), TOKENS),
        (Transformers(model_type="t5", config=T5), PAIRS),
        (CharLSTM(), TOKENS),
        (ResNet20(), IMAGES),
    ],
    ids=["llama", "mixtral", "t5", "lstm", "resnet20"],
)
def test_a_models_saved_bytes_are_those_of_a_real_pass(model, sample) -> None:
    """A tensor counted twice or not at all; what does not grow with the batch counted as if."""
    graph = model.graph(sample)
    saved = saved_bytes(graph, "fp32", fused=False)
    found = [saved[layer.kind] for layer in graph.layers]
    total = sum(each.saved + each.fixed.saved / 2 for each in found)
    assert total == pytest.approx(_measured_saved(graph, batch=2), rel=1e-3)


def test_attention_does_not_save_the_square_matrix() -> None:
    graph = tiny_graph("attention", "attention", "attention", shape=(64 * 32,))
    saved = saved_bytes(graph, "fp32")["attention"].saved
    assert 3 * saved == pytest.approx(_measured_saved(graph), abs=3)
    assert saved < 4 * 64 * 64 * 4


def test_dropout_of_attention_keeps_no_square_matrix_where_kernels_are_fused() -> None:
    """Plans for accelerators with the memory of the host's plain formula."""
    config = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.1}
    long = {name: TensorSpec((256,), "int64") for name in ("input_ids", "labels")}
    graph = Transformers(model_type="gpt2", config=config).graph(
        SampleSpec(fields=long, n_classes=40)
    )
    plain, fused = (saved_bytes(graph, "fp32", fused=each)["block"].saved for each in (False, True))
    square = 4 * 256 * 256 * 4  # heads x tokens x tokens, in float32
    assert plain > 2 * square > fused
