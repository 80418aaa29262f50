"""The small Llamas that benchmarks train: their sizes, meaningless data, and a run of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import AdamW
from polyreme.graph.options import Transformers
from polyreme.plan.grid import Degrees, even_split
from polyreme.plan.ir import LayerPlan, Plan, Stage, accumulation_order
from polyreme.runtime.job import Job
from polyreme.sample import SampleSpec, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from polyreme.algo.train import Train
    from polyreme.plan.ir import Level

RULE = AdamW(lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with a vocabulary of bytes, and how much it trains on in a step."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tokens: int
    global_batch: int

    @property
    def config(self) -> dict[str, int]:
        """Keywords of transformers' LlamaConfig."""
        return {
            "vocab_size": 256,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": self.tokens,
        }


SIZES = {
    "3M": Size(hidden=256, intermediate=704, layers=4, heads=8, tokens=128, global_batch=8),
    "700M": Size(hidden=2048, intermediate=5632, layers=16, heads=16, tokens=2048, global_batch=8),
}


class RandomTokens:
    """Byte tokens without meaning."""

    metric = "heldout_loss"
    fingerprint = "random"
    n_train, n_heldout = 4096, 0

    def __init__(self, n_tokens: int) -> None:
        tokens = TensorSpec((n_tokens,), "int64")
        self.sample = SampleSpec(fields={"input_ids": tokens, "labels": tokens}, n_classes=256)
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(256, (self.n_train, n_tokens + 1), generator=generator)

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Rows and their successors."""
        rows = self._rows[torch.from_numpy(indices)]
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def baselines(self) -> dict[str, float]:
        """None."""
        return {}


def job(size: Size, train: Train, *, level: Level, n_ranks: int, precision: str = "fp32") -> Job:
    """A run in one microbatch: replicas at level none, else shards."""
    source = RandomTokens(size.tokens)
    graph = Transformers(model_type="llama", config=size.config).graph(source.sample)
    devices = tuple(range(n_ranks))
    replica, shard = (n_ranks, 1) if level == "none" else (1, n_ranks)
    names = tuple(layer.name for layer in graph.layers)
    layer_plan = LayerPlan(
        split=even_split(devices, Degrees(replica=replica, shard=shard, tp=1)), level=level
    )
    plan = Plan(
        stages=(Stage(layers=names, placements=(devices,)),),
        layer_plans=dict.fromkeys(names, layer_plan),
        order=(accumulation_order(1),) * n_ranks,
        microbatches=1,
        global_batch=size.global_batch,
        seq_len=size.tokens,
        precision=precision,
    )
    return Job(
        graph=graph, plan=plan, source=source, train=train, algorithm=DataParallel(rule=RULE)
    )
