"""A user's own module becomes a graph without losing anything of it."""

import pytest
import torch
from torch import nn

from polyreme.errors import ConfigError
from polyreme.graph import from_module
from polyreme.graph.options import Python
from polyreme.graph.run import run
from polyreme.sample import SampleSpec, TensorSpec

torch.set_num_threads(1)

SAMPLE = SampleSpec(
    fields={"features": TensorSpec((6,), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=3,
)
WORDS = SampleSpec(
    fields={"input_ids": TensorSpec((5,), "int64"), "labels": TensorSpec((5,), "int64")},
    n_classes=7,
)
SOURCE = """
import dataclasses
import torch
from torch import nn

@dataclasses.dataclass
class Shape:
    width: int

def model(width=4):
    shape = Shape(width)
    return nn.Sequential(nn.Linear(6, shape.width), nn.ReLU(), nn.Linear(shape.width, 3))

def broken():
    raise OSError("no such thing")

def number():
    return 3
"""


class Blocks(nn.Module):
    """Blocks by name, with a 0-dim parameter, a frozen part and parts that nothing reads."""

    def __init__(self, extra=0.0):
        super().__init__()
        self.enter = nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(4, 3)
        self.never = nn.Linear(2, 2)
        self.lonely = nn.Parameter(torch.tensor(5.0))
        self.register_buffer("count", torch.tensor(3))
        self.extra = extra
        self.enter.weight.requires_grad_(False)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) + self.extra


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.branch = nn.Linear(4, 4)  # its output is not used
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.branch(x)
        return x + self.scale * self.drop(torch.relu(self.linear(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        return self.head(self.middle(self.embed(input_ids)))


def materialised(graph, seed=0):
    modules = {}
    for layer in graph.layers:
        module = graph.build(layer.name)
        assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        module.to_empty(device="cpu")
        graph.initialise(layer.name, module, seed)
        modules[layer.name] = module.eval()
    return modules


def named_blocks():
    return {"before": ("enter",), "blocks": "blocks", "after": ("leave",)}


def test_blocks_by_name_keep_every_tensor_and_flag():
    torch.manual_seed(0)
    net = Blocks()
    graph = from_module(net, SAMPLE, **named_blocks())
    assert [layer.name for layer in graph.layers] == [
        "enter", "blocks.0", "blocks.1", "blocks.2", "leave"
    ]  # fmt: skip
    assert len({layer.kind for layer in graph.layers}) == 3
    assert graph.param_count == sum(p.numel() for p in net.parameters())
    modules = materialised(graph)
    theirs = dict(net.named_parameters()) | dict(net.named_buffers())
    seen = set()
    for layer in graph.layers:
        module = modules[layer.name]
        ours = dict(module.named_parameters()) | dict(module.named_buffers())
        for local, whole in layer.params.items():
            assert torch.equal(ours[local], theirs[whole])
            assert ours[local].requires_grad == theirs[whole].requires_grad
            seen.add(whole)
    assert seen == set(net.state_dict())
    x = torch.randn(4, 6)
    assert torch.equal(run(graph, modules, {"features": x}), net.eval()(x))


def test_a_module_stays_in_the_mode_it_was_in():
    net = Blocks()
    net.blocks[1].eval()
    from_module(net, SAMPLE, **named_blocks())
    assert net.training
    assert net.blocks[0].drop.training
    assert not net.blocks[1].drop.training


def test_parts_that_are_not_the_whole_forward_are_refused():
    with pytest.raises(ConfigError, match="one after another"):
        from_module(Blocks(extra=1.0), SAMPLE, **named_blocks())
    with pytest.raises(ConfigError, match=r"is no part of the module\. Legal: enter"):
        from_module(Blocks(), SAMPLE, blocks="block")
    with pytest.raises(ConfigError, match="is a Linear"):
        from_module(Blocks(), SAMPLE, blocks="enter")
    with pytest.raises(ConfigError, match=r"gives \[3\] a sample"):
        from_module(Blocks(), WORDS_OF_FEATURES)
    with pytest.raises(ConfigError, match="has no parts"):
        from_module(nn.Sequential(), SAMPLE)
    with pytest.raises(ConfigError, match="raised RuntimeError"):
        from_module(nn.Sequential(nn.Linear(5, 3)), SAMPLE)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="has no values"):
        from_module(empty, SAMPLE)


WORDS_OF_FEATURES = SampleSpec(
    fields={"features": TensorSpec((6,), "float32"), "labels": TensorSpec((5,), "int64")},
    n_classes=3,
)


def test_a_module_without_names_is_one_layer():
    net = Blocks()
    graph = from_module(net, SAMPLE)
    (layer,) = graph.layers
    assert set(layer.params) == set(layer.params.values()) == set(net.state_dict())
    # 2 flops a multiply-add: 6x4, three blocks of two 4x4, 4x3
    assert layer.flops == 2 * (6 * 4 + 3 * 2 * 16 + 4 * 3)


@pytest.mark.parametrize("names", [{"before": ("embed", "middle", "head")}, {}])
def test_tied_parameters_are_counted_once_and_stay_tied(names):
    net = Tied()
    graph = from_module(net, WORDS, **names)
    assert graph.param_count == 7 * 4 + 4 * 4 + 4
    modules = materialised(graph)
    if names:
        assert graph.layer("head").ties == ("embed.weight",)
        assert graph.layer("head").params == {"weight": "embed.weight"}
        assert torch.equal(modules["head"].weight, net.embed.weight)
    else:
        assert modules["model"].head.weight is modules["model"].embed.weight
    ids = torch.randint(7, (2, 5))
    assert torch.equal(run(graph, modules, {"input_ids": ids}), net(ids))


def test_a_module_used_twice_in_a_sequence_is_tied_to_itself():
    shared = nn.Linear(6, 6)
    net = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 3))
    graph = from_module(net, SAMPLE)
    assert [layer.name for layer in graph.layers] == ["0", "1", "2", "3"]
    assert graph.layer("2").ties == ("0.weight", "0.bias")
    assert graph.layer("2").param_count == 0
    x = torch.randn(2, 6)
    assert torch.equal(run(graph, materialised(graph), {"features": x}), net(x))


def test_layers_that_look_alike_but_cost_differently_are_different_kinds():
    class Pick(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def forward(self, x):
            return x[..., : self.size]

    graph = from_module(nn.Sequential(Pick(6), Pick(5), Pick(3)), SAMPLE)
    assert len({layer.kind for layer in graph.layers}) == 3


def test_fused_attention_of_a_user_is_counted():
    class Attend(nn.Module):
        def forward(self, x):
            heads = x.view(1, 1, 1, 6).expand(1, 1, 4, 6)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0]

    graph = from_module(nn.Sequential(Attend(), nn.Linear(6, 3)), SAMPLE)
    assert graph.layer("0").flops == 2 * 2 * 4 * 4 * 6


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_factory_depends_on_the_seed_alone(source):
    options = Python(factory=f"{source}:model", arguments={"width": 5})
    assert options.check() == []
    graph = options.graph(SAMPLE)
    assert graph.layer("0").param_count == 35
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = materialised(graph, seed=1)["2"].weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert torch.equal(first, materialised(options.graph(SAMPLE), seed=1)["2"].weight)
    assert not torch.equal(first, materialised(graph, seed=2)["2"].weight)


@pytest.mark.parametrize(
    ("function", "says"),
    [("broken", "raised OSError: no such thing"), ("number", "returned a int")],
)
def test_a_factory_that_gives_no_module_is_refused(source, function, says):
    with pytest.raises(ConfigError, match=says):
        Python(factory=f"{source}:{function}").graph(SAMPLE)
    with pytest.raises(ConfigError, match="raised TypeError"):
        Python(factory=f"{source}:model", arguments={"widht": 3}).graph(SAMPLE)


def test_a_factory_is_checked_without_running_it(source, tmp_path):
    (tmp_path / "bad.py").write_text("def f(:")
    for factory, says in {
        f"{source}:modle": f'Legal: "{source}:model"',
        f"{tmp_path}/none.py:f": "names a file that is not there",
        f"{tmp_path}/bad.py:f": "is not Python",
        "nothing": "names no function",
    }.items():
        (violation,) = Python(factory=factory).check()
        assert says in str(violation)
