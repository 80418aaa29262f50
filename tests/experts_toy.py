"""A small model with experts, and figures of round numbers for it."""

from __future__ import annotations

from polyreme.graph.layer import LayerGraph
from polyreme.graph.options import Transformers
from polyreme.planner.draft import Draft, Strategy
from polyreme.profile.record import CollectiveTimes, LayerTimes, Profile
from polyreme.sample import SampleSpec, TensorSpec

T, D, INNER, EXPERTS, TOP = 12, 32, 48, 4, 2
# Of a block: queries and outputs, keys and values of 2 of 4 heads, router, two norms.
DENSE = 2 * D * D + 2 * 16 * D + EXPERTS * D + 2 * D
EXPERT = 2 * INNER * D + D * INNER
TABLE = 40 * D
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def routed(*, inner: int = INNER, experts: int = EXPERTS, n_blocks: int = 2) -> LayerGraph:
    """Mixtral of few blocks."""
    spec = TensorSpec((T,), "int64")
    config = {
        "hidden_size": D,
        "intermediate_size": inner,
        "num_hidden_layers": n_blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": TOP,
    }
    sample = SampleSpec(fields={"input_ids": spec, "labels": spec}, n_classes=40)
    return Transformers(model_type="mixtral", config=config).graph(sample)


def curve(n_devices: int, n_hosts: int, bytes_s: float) -> CollectiveTimes:
    """Seconds in proportion to bytes: what starts them takes none."""
    return CollectiveTimes(
        n_devices=n_devices,
        n_hosts=n_hosts,
        size_bytes=(1, 2**40),
        seconds=(1 / bytes_s, 2**40 / bytes_s),
    )


def figures(graph: LayerGraph, *, bytes_s: float = 1e8, routed_bytes_s: float = 1e9) -> Profile:
    """Exchanges from all to all on one host at a rate of their own, across two at half of it."""
    times = LayerTimes(
        microbatch=(1, 8),
        forward_s=(1e-3, 8e-3),
        backward_s=(2e-3, 16e-3),
        saved_bytes_per_sample=20_000,
        recompute_bytes_per_sample=2_000,
    )
    others = tuple(curve(n, hosts, bytes_s) for n in (2, 4, 8) for hosts in (1, 2))
    dealt = tuple(curve(n, hosts, routed_bytes_s / hosts) for n in (2, 4, 8) for hosts in (1, 2))
    return Profile(
        layers={layer.kind: times for layer in graph.layers},
        collectives={op: dealt if op == "all_to_all" else others for op in OPERATIONS},
        optimizer_s_per_byte=0.0,
        matmul_flops=1e12,
        overlap=0.0,
        context_bytes=1000,
        precision="fp32",
        assumed=False,
        date="2026-01-01",
        hardware="round",
        versions={},
        inputs_hash="",
    )


def draft(graph: LayerGraph, block: Strategy, *, microbatches: int = 1, batch: int = 8) -> Draft:
    """One in which blocks run so, and the ends alike but for experts, which they lack."""
    end = Strategy(
        replica=block.replica, shard=block.shard, cp=block.cp, tp=block.tp, level=block.level
    )
    return Draft(
        strategies={
            layer.name: end if graph.expert_plan(layer.name) is None else block
            for layer in graph.layers
        },
        microbatches=microbatches,
        global_batch=batch,
        bucket_bytes=10**9,
        overlap=True,
    )
