"""Tiny graphs that tests of profiles measure and count."""

from __future__ import annotations

import math

import torch
from torch import nn

from polyreme.graph.layer import Layer, LayerGraph
from polyreme.sample import TensorSpec

WIDTH = 8
MODULES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "linear-relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "dropout": lambda: nn.Dropout(0.5),
    "attention": lambda: Attention(),
    "pass": nn.Identity,
}


class Attention(nn.Module):
    """Four heads of 8 channels over 64 positions; query, key and value are one scaled tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        heads = (self.scale * x).reshape(x.shape[0], 64, 4, 8).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).reshape(x.shape)


class Modules:
    """Builds the kinds of `MODULES`; weights from the layer's name."""

    def build(self, layer):
        with torch.device("meta"):
            return MODULES[layer.kind]()

    def initialise(self, layer, module, seed):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, layer.name)))
        for weight in module.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=generator))


def tiny_graph(*kinds: str, shape: tuple[int, ...] = (WIDTH,)) -> LayerGraph:
    """A chain of these kinds over samples of one shape; the last one's output is the logits."""
    layers = []
    source = "batch:features"
    for index, kind in enumerate(kinds):
        with torch.device("meta"):
            module = MODULES[kind]()
        params = {name: f"{index}.{name}" for name, _ in module.named_parameters()}
        layers.append(
            Layer(
                name=f"layer.{index}",
                kind=kind,
                inputs=(source,),
                outputs={"out": TensorSpec(shape)},
                params=params,
                param_count=sum(weight.numel() for weight in module.parameters()),
                flops=2.0 * WIDTH * math.prod(shape) if kind.startswith("linear") else 0.0,
            )
        )
        source = f"layer.{index}.out"
    return LayerGraph(
        name="tiny",
        layers=tuple(layers),
        inputs={"features": TensorSpec(shape)},
        output=source,
        builder=Modules(),
    )
