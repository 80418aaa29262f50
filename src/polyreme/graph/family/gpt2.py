"""GPT-2: learned positions, one module for token and position embeddings.

Axes: B samples, T tokens, D hidden.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from ...errors import Violation
from ...sample import SampleSpec
from ..parts import Part
from ..prefix import Prefix
from ..skeleton import Skeleton
from ..tensor import Context, Cutting, Number, Read, Region, Run, TensorPlan
from .decoder import Block, Head
from .positions import check_positions
from .vocabulary import scores, table

READS = ("input_ids",)


class Embed(nn.Module):
    """Token ids [B, T] to hidden [B, T, D]: token and position embeddings, dropout."""

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte = wte
        self.wpe = wpe
        self.drop = drop
        self.prefix: Prefix | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed; of a slice of tokens behind others, at their positions."""
        start = 0 if self.prefix is None else self.prefix.start
        end = start + input_ids.shape[1]
        positions = torch.arange(start, end, device=input_ids.device)[None]
        return self.drop(self.wte(input_ids) + self.wpe(positions))


def check(skeleton: Skeleton, sample: SampleSpec) -> list[Violation]:
    """No encoder is attended to, and positions suffice."""
    found = check_positions(skeleton.config, sample)
    if skeleton.config.add_cross_attention:
        path = "model.config.add_cross_attention"
        rule = "needs an encoder, and there is none"
        found.append(Violation(path=path, value=True, rule=rule, legal="false"))
    return found


def cut(skeleton: Skeleton, sample: SampleSpec) -> list[Part]:
    """Embed, blocks, head (with the final norm)."""
    config = skeleton.config
    n_tokens = sample.fields["input_ids"].shape[0]
    inner = config.n_inner or 4 * config.hidden_size
    blocks = _block_plan(config, inner, n_tokens)

    def embed() -> nn.Module:
        model = skeleton.part("transformer")
        return Embed(model.wte, model.wpe, model.drop)

    def head() -> nn.Module:
        model = skeleton.model()
        return Head(model.get_submodule("transformer.ln_f"), model.get_submodule("lm_head"), None)

    def block(index: int) -> nn.Module:
        return Block(skeleton.block("transformer.h", index), None, None, skeleton.attention)

    parts = [
        Part(
            name="embed",
            kind="embed",
            inputs=("batch:input_ids",),
            outputs=("hidden",),
            make=embed,
            names={"wte": "transformer.wte", "wpe": "transformer.wpe"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=table("wte", config.vocab_size, n_tokens, positions=("wpe",)),
        )
    ]
    for index in range(config.num_hidden_layers):
        parts.append(
            Part(
                name=f"block.{index}",
                kind="block",
                inputs=(f"{parts[-1].name}.hidden",),
                outputs=("hidden",),
                make=lambda index=index: block(index),  # type: ignore[misc]
                names={"block": f"transformer.h.{index}"},
                splits={"tp": math.gcd(config.num_attention_heads, inner), "cp": n_tokens},
                tensor=blocks,
            )
        )
    parts.append(
        Part(
            name="head",
            kind="head",
            inputs=(f"{parts[-1].name}.hidden",),
            outputs=("logits",),
            make=head,
            names={"norm": "transformer.ln_f", "lm_head": "lm_head"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=scores("lm_head", config.vocab_size, n_tokens),
        )
    )
    return [dataclasses.replace(part, sliced=True) for part in parts]


def _block_plan(config: Any, inner: int, n_tokens: int) -> TensorPlan:
    attention, n_heads = "block.attn", config.num_attention_heads
    heads = Run(what="num_attention_heads", units=n_heads, width=config.hidden_size // n_heads)
    features = Run(what="n_inner", units=inner)
    reads = (Read(n_tokens=n_tokens),)
    return TensorPlan(
        cuttings=(
            Cutting(path=f"{attention}.c_attn", side="out", runs=(heads, heads, heads)),
            Cutting(path=f"{attention}.c_proj", side="in", runs=(heads,)),
            Cutting(path="block.mlp.c_fc", side="out", runs=(features,)),
            Cutting(path="block.mlp.c_proj", side="in", runs=(features,)),
        ),
        regions=(
            Region(entry=attention, exit=f"{attention}.c_proj", reads=reads),
            Region(entry="block.mlp", exit="block.mlp.c_proj", reads=reads),
        ),
        numbers=(
            Number(path=attention, name="split_size", of=heads, features=True),
            Number(path=attention, name="num_heads", of=heads),
        ),
        contexts=(Context(n_tokens=n_tokens, run=heads, n_queries=n_tokens, queries=heads),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
        sequence=("",),
    )
