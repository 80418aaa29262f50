"""Random legal plans over small models of every family."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beside import Family
from polyreme.graph.layer import LayerGraph
from polyreme.plan.order import ORDERS
from test_verify import FAMILIES

LEVELS = ("none", "optimizer", "grads", "params")
TURNS = ("llama tied", "qwen3", "gpt2", "bert", "t5", "t5 gated, untied", "vit", "swin", "phi3")
PLAYED = [name for name, order in ORDERS.items() if order.synchronous]


@dataclass(frozen=True)
class Drawn:
    """A family and a plan for it, as `tiny.plan` takes it."""

    family: str
    plan: Mapping[str, Any]
    global_batch: int

    @property
    def n_processes(self) -> int:
        n = 1
        for axis in ("replica", "shard", "tp", "pp"):
            n *= self.plan.get(axis, 1)
        return n

    def case(self, **more: Any) -> Family:
        """The run of it; `more` are fields of the case, or of the plan under `plan`."""
        options, sample = FAMILIES[self.family]
        plan = {**self.plan, **more.pop("plan", {})}
        return Family(
            options=options, sample=sample, plan=plan, global_batch=self.global_batch, **more
        )


def graph_of(family: str) -> LayerGraph:
    options, sample = FAMILIES[family]
    return options.graph(sample)


def draw(
    seed: int, family: str | None = None, most: int = 8, global_batch: int | None = None
) -> Drawn:
    """A plan by a seed: degrees, an order, uneven stages, levels and recomputation by layer."""
    rng = random.Random(seed)
    family = family or TURNS[seed % len(TURNS)]
    graph = graph_of(family)
    names = [layer.name for layer in graph.layers]
    plans = [graph.tensor_plan(name) for name in names]
    tps = [n for n in (1, 2, 4) if all(p is not None and p.legal(n) for p in plans)]
    while True:
        tp, pp = rng.choice(tps), rng.choice((1, 2, 2, 3, 4))
        replica, shard = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))
        if not 2 <= tp * pp * replica * shard <= most:
            continue
        microbatches = rng.randint(1, 5)
        if global_batch is not None and replica * shard * microbatches > global_batch:
            continue
        order = rng.choice(PLAYED) if pp > 1 else "1f1b"
        kind = ORDERS[order]
        if kind.slices > 1 and not graph.sliced:
            continue
        n_stages = pp * kind.chunks
        if pp > 1 and (n_stages > len(names) or kind.refused(pp, microbatches)):
            continue
        break
    sp = tp > 1 and kind.slices == 1 and rng.random() < 0.5
    plan: dict[str, Any] = {
        "tp": tp,
        "sp": sp,
        "pp": pp,
        "replica": replica,
        "shard": shard,
        "microbatches": microbatches,
        "order": order,
        "bucket_bytes": rng.choice((1, 2000, 10**6)),
        "overlap": rng.random() < 0.7,
    }
    if pp > 1:
        ends = sorted(rng.sample(range(1, len(names)), n_stages - 1))
        plan["cuts"] = [b - a for a, b in zip([0, *ends], [*ends, len(names)], strict=True)]
    if shard > 1:
        plan["level"] = _levels(rng, graph)
    recomputed = [name for name in names if kind.slices == 1 and rng.random() < 0.3]
    plan["recompute"] = {"": False, **dict.fromkeys(recomputed, True)}
    n_data = replica * shard
    batch = n_data * microbatches + rng.randrange(n_data * microbatches + 1)
    plan["prefetch"] = rng.random() < 0.5
    plan["decouple"], plan["priority"] = rng.random() < 0.4, rng.random() < 0.5
    return Drawn(family=family, plan=plan, global_batch=global_batch or batch)


def _levels(rng: random.Random, graph: LayerGraph) -> dict[str, str]:
    """A level for each layer; those that share parameters have the same."""
    usual = rng.choice(LEVELS)
    found = {"": usual}
    owner: dict[str, str] = {}
    for layer in graph.layers:
        level = rng.choice(LEVELS) if rng.random() < 0.3 else usual
        for name in layer.ties:
            level = found.get(owner[name], usual)
        found[layer.name] = level
        owner |= {name: layer.name for name in layer.params.values() if name not in owner}
    return found
