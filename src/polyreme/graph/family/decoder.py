"""Decoder-only models with rotary positions: Llama, Qwen, Mistral, Mixtral, Gemma 1 to 3, Phi.

Axes: B samples, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import Violation
from ...sample import SampleSpec
from ..experts import ExpertPlan
from ..parts import Part
from ..prefix import Prefix, argument
from ..skeleton import Skeleton
from .decoder_tensor import block_plan
from .vocabulary import scores, table

READS = ("input_ids",)


class Embed(nn.Module):
    """Token ids [B, T] to hidden [B, T, D]."""

    def __init__(self, embed_tokens: nn.Module, dropout: nn.Module | None) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.dropout = dropout

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed."""
        hidden_BTD = self.embed_tokens(input_ids)
        return hidden_BTD if self.dropout is None else self.dropout(hidden_BTD)


class Rotary(nn.Module):
    """Cosines and sines of positions, from the model's own module.

    Its frequencies stay float32 when the model is cast: in bfloat16 they would be wrong from
    the 256th position on. It does not compile with its layer: what reads the tables would make
    them anew for each of its own entries.
    """

    compiles: ClassVar[bool] = False

    def __init__(self, rotary: nn.Module, layer_type: str | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.layer_type = layer_type

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        dtypes = {name: buffer.dtype for name, buffer in self.rotary.named_buffers()}
        values = {name: buffer.clone() for name, buffer in self.rotary.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in list(self.rotary.named_buffers()):
            if buffer.dtype != dtypes[name]:
                kept = values[name]
                moved = torch.empty_like(kept, device=buffer.device)
                setattr(self.rotary, name, moved if kept.is_meta else moved.copy_(kept))
        return self

    def forward(self, hidden_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables [1, T, head] for every sample."""
        positions = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)[None]
        if self.layer_type is None:
            return self.rotary(hidden_BTD, position_ids=positions)
        return self.rotary(hidden_BTD, positions, self.layer_type)


class Block(nn.Module):
    """One decoder block on hidden [B, T, D].

    `n_tokens` is the length of the sequence where hidden holds some of its tokens only. With a
    `prefix` hidden is a slice of tokens behind those that it holds.
    """

    def __init__(
        self, block: nn.Module, rotary: Rotary | None, window: int | None, attention: str
    ) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self.window = window
        self.attention = attention
        self.n_tokens: int | None = None
        self.prefix: Prefix | None = None
        self._cache = argument(inspect.signature(block.forward).parameters)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Attend to what came before, then transform."""
        if self.prefix is not None:
            return self._behind(hidden_BTD, self.prefix)
        like_BTD = hidden_BTD
        if self.n_tokens is not None:
            shape = (hidden_BTD.shape[0], self.n_tokens, hidden_BTD.shape[2])
            like_BTD = hidden_BTD.new_empty(()).expand(shape)
        mask = causal_mask(like_BTD, self.window, self.attention)
        if self.rotary is None:
            out = self.block(hidden_BTD, attention_mask=mask)
        else:
            tables = self.rotary(like_BTD)
            out = self.block(hidden_BTD, attention_mask=mask, position_embeddings=tables)
        return out[0] if isinstance(out, tuple) else out

    def _behind(self, hidden_BTD: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        start = prefix.start
        shape = (hidden_BTD.shape[0], start + hidden_BTD.shape[1], hidden_BTD.shape[2])
        like_BTD = hidden_BTD.new_empty(()).expand(shape)
        mask = causal_mask(like_BTD, self.window, self.attention, whole=start > 0)
        mask = None if mask is None else mask[:, :, start:]
        how: dict[str, Any] = {self._cache: prefix, "attention_mask": mask}
        if self.rotary is not None:
            cos, sin = self.rotary(like_BTD)
            how["position_embeddings"] = (cos[:, start:], sin[:, start:])
        out = self.block(hidden_BTD, **how)
        return out[0] if isinstance(out, tuple) else out


class Head(nn.Module):
    """Hidden [B, T, D] to logits [B, T, V], through the final norm."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.softcap = softcap

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        logits_BTV = self.lm_head(self.norm(hidden_BTD))
        if self.softcap is None:
            return logits_BTV
        return torch.tanh(logits_BTV / self.softcap) * self.softcap


def causal_mask(
    hidden_BTD: torch.Tensor, window: int | None, attention: str, *, whole: bool = False
) -> torch.Tensor | None:
    """None where the fused attention's own causal path does (unless `whole`), or [1, 1, T, T].

    Boolean (true: seen) for the fused attention, additive otherwise.
    """
    n_tokens = hidden_BTD.shape[1]
    if attention == "sdpa" and not whole and (window is None or window >= n_tokens):
        return None
    position = torch.arange(n_tokens, device=hidden_BTD.device)
    distance = position[:, None] - position[None, :]
    seen = (distance >= 0) & (distance < (window or n_tokens))
    if attention == "sdpa":
        return seen[None, None]
    low = torch.finfo(hidden_BTD.dtype).min
    blank = torch.zeros(seen.shape, dtype=hidden_BTD.dtype, device=seen.device)
    return blank.masked_fill(~seen, low)[None, None]


def check(skeleton: Skeleton, _sample: SampleSpec) -> list[Violation]:
    """Only causal models are cut so, and only losses of their logits."""
    if getattr(skeleton.config, "use_bidirectional_attention", False):
        path = "model.config.use_bidirectional_attention"
        rule = "is not causal, and the task is"
        return [Violation(path=path, value=True, rule=rule, legal="false")]
    if getattr(skeleton.config, "output_router_logits", False):
        path = "model.config.output_router_logits"
        rule = "adds a loss of the router's balance, which layers by themselves do not have"
        return [Violation(path=path, value=True, rule=rule, legal="false")]
    return []


def cut(skeleton: Skeleton, sample: SampleSpec) -> list[Part]:
    """Embed, blocks, head (with the final norm)."""
    config = skeleton.config
    n_tokens = sample.fields["input_ids"].shape[0]
    norm = "final_layernorm" if config.model_type == "phi" else "norm"

    def embed() -> nn.Module:
        model = skeleton.part("model")
        return Embed(model.embed_tokens, getattr(model, "embed_dropout", None))

    def head() -> nn.Module:
        model = skeleton.model()
        softcap = getattr(config, "final_logit_softcapping", None)
        return Head(model.get_submodule(f"model.{norm}"), model.get_submodule("lm_head"), softcap)

    degree = math.gcd(
        config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    )
    blocks, routed = block_plan(config, n_tokens), _experts(config, n_tokens)
    splits = {"tp": degree, "cp": n_tokens}
    if routed is not None:  # matrices of experts have no tensor parts here
        splits = {"tp": 1, "cp": 1, "ep": routed.n_experts}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    parts = [
        Part(
            name="embed",
            kind="embed",
            inputs=("batch:input_ids",),
            outputs=("hidden",),
            make=embed,
            names={"embed_tokens": "model.embed_tokens"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=table("embed_tokens", config.vocab_size, n_tokens),
        )
    ]
    for index in range(config.num_hidden_layers):
        kind = "block" if len(set(types)) == 1 else f"block.{types[index]}"
        parts.append(
            Part(
                name=f"block.{index}",
                kind=kind,
                inputs=(f"{parts[-1].name}.hidden",),
                outputs=("hidden",),
                make=lambda index=index: _block(skeleton, index, types[index]),  # type: ignore[misc]
                names={"block": f"model.layers.{index}"},
                splits=splits,
                tensor=blocks,
                experts=routed,
            )
        )
    parts.append(
        Part(
            name="head",
            kind="head",
            inputs=(f"{parts[-1].name}.hidden",),
            outputs=("logits",),
            make=head,
            names={"norm": f"model.{norm}", "lm_head": "lm_head"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=scores("lm_head", config.vocab_size, n_tokens),
        )
    )
    return [dataclasses.replace(part, sliced=True) for part in parts]


def _experts(config: Any, n_tokens: int) -> ExpertPlan | None:
    """What a block's router deals tokens out to, if it has one."""
    if not hasattr(config, "num_local_experts"):
        return None
    return ExpertPlan(
        params=tuple(f"block.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")),
        n_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        n_tokens=n_tokens,
        n_features=config.hidden_size,
    )


def _block(skeleton: Skeleton, index: int, layer_type: str | None) -> nn.Module:
    rotary = skeleton.part("model.rotary_emb")
    by_type = layer_type if skeleton.config.model_type == "gemma3_text" else None
    window = getattr(skeleton.config, "sliding_window", None)
    if layer_type is not None and layer_type != "sliding_attention":
        window = None
    return Block(
        skeleton.block("model.layers", index), Rotary(rotary, by_type), window, skeleton.attention
    )
