"""Small models, presets and options: counts from papers, faults before torch is needed."""

import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyreme.errors import ConfigError
from polyreme.graph import options, presets
from polyreme.graph.run import run
from polyreme.graph.vision import BatchNorm
from polyreme.sample import SampleSpec, TensorSpec

torch.set_num_threads(1)


def text(n_tokens, n_classes):
    fields = ("input_ids", "decoder_input_ids", "labels")
    spec = TensorSpec((n_tokens,), "int64")
    return SampleSpec(fields=dict.fromkeys(fields, spec), n_classes=n_classes)


def image(size, channels, n_classes):
    pixels = TensorSpec((channels, size, size), "float32")
    labels = TensorSpec((), "int64")
    return SampleSpec(fields={"pixel_values": pixels, "labels": labels}, n_classes=n_classes)


def materialised(graph, seed=0):
    modules = {}
    for layer in graph.layers:
        modules[layer.name] = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, modules[layer.name], seed)
    return modules


# Counts that the models' publishers state, or that their shapes give by hand:
# gpt3: V D + P D + 96 (12 D^2 + 13 D) + 2 D with D = 12288, V = 50257, P = 2048.
@pytest.mark.parametrize(
    ("name", "n_params"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt3-175b", (50257 + 2048) * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288),
        ("t5-large", 737_668_096),
        ("vit-base", 86_567_656),
        ("vit-huge", 632_045_800),
    ],
)
def test_presets_have_the_published_size(name, n_params):
    is_text = presets.PRESETS[name].model_type not in ("vit", "swin")
    sample = text(512, 1000) if is_text else image(224, 3, 1000)
    graph = options.Preset(preset=name).graph(sample)
    assert graph.param_count == n_params
    assert all(layer.flops >= 0 for layer in graph.layers)


@pytest.mark.parametrize(("name", "millions"), [("bert-huge", 672), ("swin-huge", 701)])
def test_presets_have_the_size_of_the_paper_s_table(name, millions):
    sample = text(512, 1000) if name == "bert-huge" else image(224, 3, 1000)
    graph = options.Preset(preset=name).graph(sample)
    assert graph.param_count / 1e6 == pytest.approx(millions, rel=2e-3)


def test_flops_of_llama_follow_from_its_shapes():
    n_tokens = 1024
    graph = options.Preset(preset="llama-7b").graph(text(n_tokens, 32000))
    block = 2 * n_tokens * (4 * 4096**2 + 3 * 4096 * 11008) + 4 * n_tokens**2 * 4096
    # Releases of transformers differ in whether rotary angles are a product: 2 * T * 64 flops.
    rotary = 2 * n_tokens * 64
    assert graph.layer("block.31").flops in (block, block + rotary)
    head = 2 * n_tokens * 4096 * 32000
    assert graph.flops == 32 * graph.layer("block.31").flops + head


def test_of_all_experts_a_token_s_flops_are_those_of_its_own():
    n_tokens = 256
    graph = options.Preset(preset="mixtral-8x7b").graph(text(n_tokens, 32000))
    attention = 2 * n_tokens * (2 * 4096**2 + 2 * 4096 * 1024) + 4 * n_tokens**2 * 4096
    router = 2 * n_tokens * 4096 * 8
    block = attention + router + 2 * 2 * n_tokens * 3 * 4096 * 14336
    rotary = 2 * n_tokens * 64
    assert graph.layer("block.31").flops in (block, block + rotary)
    assert graph.layer("block.0").splits == {"tp": 1, "cp": 1, "ep": 8}
    plan = graph.expert_plan("block.0")
    assert (plan.n_experts, plan.top_k, plan.n_tokens, plan.n_features) == (8, 2, n_tokens, 4096)
    shapes = dict(graph.build("block.0").named_parameters())
    assert {shapes[name].shape[0] for name in plan.params} == {8}
    n_own = sum(shapes[name].numel() for name in plan.params)
    assert n_own == 8 * 3 * 4096 * 14336
    assert graph.expert_plan("embed") is graph.expert_plan("head") is None


def test_every_preset_is_described():
    rows = presets.describe()
    assert {row[0] for row in rows} == set(presets.PRESETS)
    assert all(summary and source for _, summary, source in rows)


def test_overrides_of_a_preset_are_fields_of_its_configuration():
    preset = options.Preset(preset="llama-7b", config={"num_hidden_layers": 3})
    assert len(preset.graph(text(8, 100)).layers) == 5
    wrong = options.Preset(preset="llama-7b", config={"num_layer": 3, "hiden_size": 4})
    with pytest.raises(ConfigError) as raised:
        wrong.graph(text(8, 100))
    assert [violation.path for violation in raised.value.violations] == [
        "model.config.hiden_size",
        "model.config.num_layer",
    ]
    assert "num_hidden_layers" in raised.value.violations[0].legal


@pytest.mark.parametrize(
    ("model", "sample", "says"),
    [
        (options.Preset(preset="vit-base"), text(8, 10), "has no field 'pixel_values'"),
        (options.Preset(preset="vit-base"), image(32, 3, 10), "is not the form of the data's"),
        (options.Preset(preset="llama-7b"), image(32, 3, 10), "has no field 'input_ids'"),
        (options.Preset(preset="llama-7b"), text(8, 32001), "is less than the 32001 classes"),
        (options.Preset(preset="bert-huge"), text(513, 100), "is less than the 513 tokens"),
        (
            options.Transformers(
                model_type="llama", config={"hidden_size": 30, "num_attention_heads": 4}
            ),
            text(8, 10),
            "not a multiple",
        ),
        (
            options.Transformers(
                model_type="bert",
                config={"hidden_size": 8, "num_attention_heads": 2},
                task="sequence_classification",
            ),
            text(8, 10),
            "one label a token",
        ),
        (options.Transformers(model_type="gpt2", config={"add_cross_attention": True}),
         text(8, 10), "needs an encoder"),
        (options.Transformers(model_type="mixtral", config={"output_router_logits": True}),
         text(8, 10), "adds a loss of the router's balance"),
        (options.ResNet20(), text(8, 10), "does not fit resnet20"),
        (options.CharLSTM(), image(8, 1, 10), "does not fit char_lstm"),
        (options.MLP(), text(8, 10), "does not fit mlp"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_the_data_is_refused(model, sample, says):
    with pytest.raises(ConfigError, match=says):
        model.graph(sample)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "preset", "preset": "lama"}, 'is not a preset. Legal: "llama-7b", "llama3-8b"'),
        ({"kind": "path", "path": "/nowhere"}, "has no config.json"),
        ({"kind": "transformers", "model_type": "lama"}, 'Legal: "llama", "qwen2"'),
        ({"kind": "transformers", "model_type": "t5", "task": "causal_lm"}, 'Legal: "seq2seq_lm"'),
    ],
)
def test_options_check_without_torch(fields, says):
    code = f"""
import sys, msgspec
from polyreme.graph import options
found = msgspec.convert({fields!r}, options.Model).check()
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(found[0])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert says in out.stdout


def test_unknown_fields_of_every_kind_are_refused():
    for kind in ("preset", "path", "transformers", "resnet20", "char_lstm", "mlp", "python"):
        fields = {"kind": kind, "preset": "", "path": "", "model_type": "", "factory": ""}
        known = {"preset": "preset", "path": "path", "transformers": "model_type"}
        known |= {"python": "factory"}
        kept = {key: value for key, value in fields.items() if key in ("kind", known.get(kind))}
        msgspec.convert(kept, options.Model)
        with pytest.raises(msgspec.ValidationError, match="unknown field `widht`"):
            msgspec.convert({**kept, "widht": 3}, options.Model)


def test_resnet20_has_the_paper_s_size():
    graph = options.ResNet20().graph(image(32, 3, 10))
    assert graph.name == "resnet20"
    assert graph.param_count == 269_722  # the paper: 0.27 M
    assert len(graph.layers) == 11
    # 40.55 M multiply-adds in the convolutions
    assert graph.flops == pytest.approx(2 * 40.55e6, rel=2e-3)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resnet_learns_in_every_precision(norm, dtype):
    sample = image(8, 1, 10)
    graph = options.ResNet20(width=4, blocks=1, norm=norm).graph(sample)
    modules = materialised(graph)
    for module in modules.values():
        for tensor in module.parameters():
            tensor.data = tensor.data.to(dtype)
    pixels = torch.randn(3, 1, 8, 8)
    if dtype is torch.float64:
        pixels = pixels.double()
    logits = run(graph, modules, {"pixel_values": pixels})
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    gradients = [p.grad for module in modules.values() for p in module.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_torch_s_own_and_wide_when_narrow_is_given(training):
    ours, theirs = BatchNorm(3).train(training), nn.BatchNorm2d(3).train(training)
    x = torch.randn(4, 3, 5, 5) + 2
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert torch.equal(ours.running_var, theirs.running_var)
    assert torch.equal(ours.num_batches_tracked, theirs.num_batches_tracked)
    narrow = BatchNorm(3).train(training)
    narrow.weight.data = narrow.weight.data.bfloat16()
    narrow.bias.data = narrow.bias.data.bfloat16()
    out = narrow(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert narrow.running_mean.dtype == torch.float32
    same = nn.BatchNorm2d(3).train(training)(x.bfloat16().float())
    assert torch.equal(out, same.bfloat16())
    exact = BatchNorm(3).train(training)
    assert exact(x.double()).dtype == torch.float64


def test_lstm_equals_torch_s_stack_and_its_flops_are_counted():
    sample = text(6, 11)
    graph = options.CharLSTM(embed=3, hidden=5, layers=2).graph(sample)
    modules = materialised(graph)
    stack = nn.LSTM(3, 5, num_layers=2, batch_first=True)
    state = {}
    for index in range(2):
        for name, value in modules[f"lstm.{index}"].lstm.state_dict().items():
            state[name.replace("_l0", f"_l{index}")] = value
    stack.load_state_dict(state)
    ids = torch.randint(11, (4, 6))
    hidden = stack(modules["embed"].embed(ids))[0]
    torch.testing.assert_close(
        run(graph, modules, {"input_ids": ids}), modules["head"].linear(hidden)
    )
    assert graph.layer("lstm.1").flops == 2 * 6 * 4 * 5 * (5 + 5)
    assert graph.layer("lstm.0").flops == 2 * 6 * 4 * 5 * (3 + 5)


@pytest.mark.parametrize("hidden", [(), (4,), (4, 4)])
def test_mlp_has_a_layer_a_linear_map(hidden):
    sample = SampleSpec(
        fields={"features": TensorSpec((6,), "float32"), "labels": TensorSpec((), "int64")},
        n_classes=2,
    )
    graph = options.MLP(hidden=hidden).graph(sample)
    assert len(graph.layers) == len(hidden) + 1
    x = torch.randn(3, 6)
    modules = materialised(graph)
    value = x
    for index, layer in enumerate(graph.layers):
        linear = modules[layer.name].linear
        value = value @ linear.weight.T + linear.bias
        value = value if index == len(hidden) else value.clamp(min=0)
    torch.testing.assert_close(run(graph, modules, {"features": x}), value)
    with FlopCounterMode(display=False) as counter:
        run(graph, modules, {"features": x})
    assert graph.flops * 3 == counter.get_total_flops()


def test_values_are_dropped_after_their_last_reader():
    sample = text(6, 11)
    graph = options.CharLSTM(embed=3, hidden=5, layers=2).graph(sample)
    modules = materialised(graph)
    import weakref

    alive = []
    counts = []

    def watched(module):
        def call(*arguments):
            counts.append(sum(reference() is not None for reference in alive))
            out = module(*arguments)
            alive.append(weakref.ref(out))
            return out

        return call

    with torch.no_grad():
        run(
            graph,
            {name: watched(module) for name, module in modules.items()},
            {"input_ids": torch.zeros(2, 6, dtype=torch.int64)},
        )
    assert counts == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "model", [options.ResNet20(width=4, blocks=1), options.MLP(), options.MLP(hidden=())]
)
def test_initial_values_depend_on_seed_and_name_alone(model):
    graph = model.graph(image(8, 1, 10))
    name = graph.layers[-1].name
    torch.manual_seed(5)
    state = torch.get_rng_state()
    alone = graph.build(name).to_empty(device="cpu")
    graph.initialise(name, alone, 1)
    assert torch.equal(torch.get_rng_state(), state)
    among = materialised(graph, seed=1)[name]
    other = materialised(graph, seed=2)[name]
    for ours, same, differs in zip(
        alone.parameters(), among.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        assert not torch.equal(ours, differs)
