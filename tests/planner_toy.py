"""A small model with every awkward kind of parameter, and round figures for its costs."""

from __future__ import annotations

import torch
from torch import nn

from polyreme.cluster.types import Cluster, DeviceType, Host, Link
from polyreme.graph.layer import Layer, LayerGraph
from polyreme.plan.ir import Workload
from polyreme.planner.draft import Draft, Strategy
from polyreme.profile.record import CollectiveTimes, LayerTimes, Profile
from polyreme.sample import TensorSpec

TOKENS, WIDTH, WORDS = 3, 5, 7
HIDDEN = TensorSpec((TOKENS, WIDTH))
MS = 1e-3


class Block(nn.Module):
    """Dim 0 uneven over 2 and 3 devices, below the number of devices, or absent; one frozen."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(4, WIDTH), requires_grad=False)
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x) * self.scale + self.row + self.frozen.sum(0)
        return self.norm(y.flatten(0, 1)).view_as(x)


class ToyBuilder:
    def build(self, layer: Layer) -> nn.Module:
        with torch.device("meta"):
            if layer.kind == "embed":
                return nn.Embedding(WORDS, WIDTH)
            if layer.kind == "head":
                return nn.Linear(WIDTH, WORDS)
            return Block(batch_norm=layer.kind == "normed")

    def initialise(self, layer: Layer, module: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in module.state_dict(keep_vars=True).values():
            with torch.no_grad():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
                else:
                    tensor.zero_()


def toy(n_blocks: int = 1, *, tied: bool = True) -> LayerGraph:
    """embed, blocks of one kind, one block with batch norm, head (tied to embed)."""
    builder = ToyBuilder()
    kinds = ["embed", *["block"] * n_blocks, "normed", "head"]
    layers: list[Layer] = []
    previous = "batch:input_ids"
    for index, kind in enumerate(kinds):
        name = kind if kind in ("embed", "head") else f"block.{index - 1}"
        layer = Layer(
            name=name, kind=kind, inputs=(), outputs={}, params={}, param_count=0, flops=0
        )
        module = builder.build(layer)
        params = {own: f"{name}.{own}" for own in module.state_dict()}
        ties: tuple[str, ...] = ()
        count = sum(param.numel() for param in module.parameters())
        if kind == "head" and tied:
            params["weight"] = "embed.weight"
            ties = ("embed.weight",)
            count -= WORDS * WIDTH
        output = "logits" if kind == "head" else "hidden"
        layers.append(
            Layer(
                name=name,
                kind=kind,
                inputs=(previous,),
                outputs={output: TensorSpec((TOKENS, WORDS)) if kind == "head" else HIDDEN},
                params=params,
                param_count=count,
                flops=1.0,
                ties=ties,
            )
        )
        previous = f"{name}.{output}"
    return LayerGraph(
        name="toy",
        layers=tuple(layers),
        inputs={"input_ids": TensorSpec((TOKENS,), "int64")},
        output="head.logits",
        builder=builder,
    )


def workload(global_batch: int = 12, precision: str = "fp32") -> Workload:
    return Workload(
        global_batch=global_batch,
        seq_len=TOKENS,
        precision=precision,
        optimizer_states=2,
        optimizer_scalars=1,
    )


def cluster(*hosts: int, memory_bytes: int = 2**30) -> Cluster:
    link = Link(latency_s=0.0, bandwidth_bytes_s=1e9, source="round")
    kind = DeviceType(name="round", memory_bytes=memory_bytes, source="round")
    return Cluster(
        name="toys",
        device_types={"round": kind},
        hosts=tuple(
            Host(name=f"host-{index}", device_type="round", n_devices=count)
            for index, count in enumerate(hosts)
        ),
        intra=link,
        inter=link,
    )


def profile(
    *,
    forward_ms: float = 1.0,
    collective_ms: float = 0.5,
    overlap: float = 0.0,
    saved_bytes: int = 1000,
    context_bytes: int = 0,
) -> Profile:
    """Each layer: forward as given, backward 3 times that, a sample; collectives cost the same."""
    times = LayerTimes(
        microbatch=(1, 2, 1000),
        forward_s=(forward_ms * MS, 2 * forward_ms * MS, 1000 * forward_ms * MS),
        backward_s=(3 * forward_ms * MS, 6 * forward_ms * MS, 3000 * forward_ms * MS),
        saved_bytes_per_sample=saved_bytes,
        recompute_bytes_per_sample=saved_bytes // 10,
    )
    groups = tuple(
        CollectiveTimes(
            n_devices=n_devices,
            n_hosts=n_hosts,
            size_bytes=(1, 2**40),
            seconds=(n_hosts * collective_ms * MS,) * 2,
        )
        for n_devices in range(2, 9)
        for n_hosts in (1, 2)
    )
    return Profile(
        layers=dict.fromkeys(("embed", "block", "normed", "head"), times),
        collectives=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), groups),
        optimizer_s_per_byte=0.0,
        matmul_flops=1e12,
        overlap=overlap,
        context_bytes=context_bytes,
        precision="fp32",
        assumed=False,
        date="2026-01-01",
        hardware="round",
        versions={},
        inputs_hash="",
    )


def toy_draft(microbatches: int = 1, global_batch: int = 12, **how) -> Draft:
    """The toy with one strategy for all layers."""
    return Draft(
        strategies=dict.fromkeys((layer.name for layer in toy().layers), Strategy(**how)),
        microbatches=microbatches,
        global_batch=global_batch,
        bucket_bytes=2**20,
        overlap=True,
    )
