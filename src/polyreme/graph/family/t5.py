"""T5: an encoder and a decoder whose blocks share the first block's position bias.

Axes: B samples, T tokens, D hidden, N heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import Violation
from ...sample import SampleSpec
from ..parts import Part
from ..skeleton import Skeleton
from ..tensor import Along, Context, Cutting, Number, Read, Region, Run, TensorPlan
from .vocabulary import scores, table

READS = ("input_ids", "decoder_input_ids")


class Embed(nn.Module):
    """Token ids [B, T] to hidden [B, T, D]."""

    def __init__(self, shared: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.dropout = dropout

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed."""
        return self.dropout(self.shared(input_ids))


class Block(nn.Module):
    """One block. The first of a stack gives the position bias [B, N, T, T] beside hidden."""

    def __init__(self, block: nn.Module, first: bool) -> None:
        super().__init__()
        self.block = block
        self.first = first

    def forward(
        self, hidden_BTD: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend and transform. `others`: the bias unless first, then the encoder's output."""
        bias = None if self.first else others[0]
        encoded = others[0 if self.first else 1 :]
        out = self.block(
            hidden_BTD,
            position_bias=bias,
            encoder_hidden_states=encoded[0] if encoded else None,
        )
        if not self.first:
            return out[0]
        # The library's is a transposed view, which attention would copy in every layer.
        bias_1NTT = out[1].contiguous()
        return out[0], bias_1NTT.expand(hidden_BTD.shape[0], -1, -1, -1)


class Norm(nn.Module):
    """The encoder's last step."""

    def __init__(self, norm: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = dropout

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return self.dropout(self.norm(hidden_BTD))


class Head(nn.Module):
    """Hidden [B, T, D] to logits [B, T, V], through the decoder's norm."""

    def __init__(
        self, norm: nn.Module, dropout: nn.Module, lm_head: nn.Module, scale: float
    ) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = dropout
        self.lm_head = lm_head
        self.scale = scale

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        return self.lm_head(self.dropout(self.norm(hidden_BTD)) * self.scale)


def check(_skeleton: Skeleton, _sample: SampleSpec) -> list[Violation]:
    """Any configuration can be cut."""
    return []


def cut(skeleton: Skeleton, sample: SampleSpec) -> list[Part]:
    """Embed, encoder blocks, encoder norm; embed, decoder blocks, head."""
    encoder = _stack(skeleton, sample, "encoder", "input_ids", None)
    encoded = Part(
        name="encoder.norm",
        kind="encoder.norm",
        inputs=(f"{encoder[-1].name}.hidden",),
        outputs=("hidden",),
        make=lambda: Norm(
            skeleton.part("encoder.final_layer_norm"), skeleton.part("encoder.dropout")
        ),
        names={"norm": "encoder.final_layer_norm"},
        splits=encoder[-1].splits,
        tensor=TensorPlan(
            outputs={"hidden": "tokens"}, n_tokens=sample.fields["input_ids"].shape[0]
        ),
    )
    decoder = _stack(skeleton, sample, "decoder", "decoder_input_ids", "encoder.norm.hidden")
    head = Part(
        name="head",
        kind="head",
        inputs=(f"{decoder[-1].name}.hidden",),
        outputs=("logits",),
        make=lambda: _head(skeleton),
        names={"norm": "decoder.final_layer_norm", "lm_head": "lm_head"},
        splits=decoder[0].splits,
        tensor=scores(
            "lm_head", skeleton.config.vocab_size, sample.fields["decoder_input_ids"].shape[0]
        ),
    )
    return [*encoder, encoded, *decoder, head]


def _stack(
    skeleton: Skeleton, sample: SampleSpec, side: str, ids: str, encoded: str | None
) -> list[Part]:
    config = skeleton.config
    n_tokens = sample.fields[ids].shape[0]
    n_blocks = config.num_layers if side == "encoder" else config.num_decoder_layers
    degree = math.gcd(config.num_heads, config.d_ff)
    parts = [
        Part(
            name=f"{side}.embed",
            kind=f"{side}.embed",
            inputs=(f"batch:{ids}",),
            outputs=("hidden",),
            make=lambda: Embed(skeleton.part("shared"), skeleton.part(f"{side}.dropout")),
            names={"shared": "shared"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=table("shared", config.vocab_size, n_tokens),
        )
    ]
    n_encoded = sample.fields["input_ids"].shape[0] if encoded else None
    for index in range(n_blocks):
        first = index == 0
        inputs = [f"{parts[-1].name}.hidden"]
        inputs += [] if first else [f"{side}.block.0.bias"]
        inputs += [encoded] if encoded else []
        parts.append(
            Part(
                name=f"{side}.block.{index}",
                kind=f"{side}.first" if first else f"{side}.block",
                inputs=tuple(inputs),
                outputs=("hidden", "bias") if first else ("hidden",),
                make=lambda index=index: _block(skeleton, side, index),  # type: ignore[misc]
                names={"block": f"{side}.block.{index}"},
                splits={"tp": degree, "cp": n_tokens},
                tensor=_block_plan(config, n_tokens, n_encoded, first=first),
            )
        )
    return parts


def _block(skeleton: Skeleton, side: str, index: int) -> nn.Module:
    stack = skeleton.part(side)
    with torch.device("meta"):
        block = type(stack.block[0])(stack.config, index == 0, index)
    return Block(block.float(), index == 0)


def _block_plan(config: Any, n_tokens: int, n_encoded: int | None, *, first: bool) -> TensorPlan:
    """The bias that travels between blocks holds the heads of its part only."""
    heads = Run(what="num_heads", units=config.num_heads, width=config.d_kv)
    inner = Run(what="d_ff", units=config.d_ff)
    own = Read(n_tokens=n_tokens)
    attentions: dict[str, tuple[Read, ...]] = {"block.layer.0.SelfAttention": (own,)}
    if n_encoded is not None:
        encoded = Read(argument="key_value_states", n_tokens=n_encoded)
        attentions["block.layer.1.EncDecAttention"] = (own, encoded)
    dense = f"block.layer.{len(attentions)}.DenseReluDense"
    cuttings = [
        Cutting(path=f"{attention}.{leaf}", side="in" if leaf == "o" else "out", runs=(heads,))
        for attention in attentions
        for leaf in "qkvo"
    ]
    cuttings += [
        Cutting(path=f"{dense}.{leaf}", side="in" if leaf == "wo" else "out", runs=(inner,))
        for leaf in (("wi_0", "wi_1", "wo") if config.is_gated_act else ("wi", "wo"))
    ]
    outputs: Mapping[str, Along] = {"hidden": "tokens"}
    if first:
        table_path = "block.layer.0.SelfAttention.relative_attention_bias"
        biases = (Run(what="num_heads", units=config.num_heads),)
        cuttings.append(Cutting(path=table_path, side="out", runs=biases))
        outputs = {"hidden": "tokens", "bias": "heads"}
    read = [reads[-1].n_tokens or n_tokens for reads in attentions.values()]
    return TensorPlan(
        cuttings=tuple(cuttings),
        contexts=tuple(
            Context(n_tokens=n, run=heads, n_queries=n_tokens, queries=heads) for n in read
        ),
        regions=(
            *(
                Region(entry=attention, exit=f"{attention}.o", reads=reads)
                for attention, reads in attentions.items()
            ),
            Region(entry=dense, exit=f"{dense}.wo", reads=(own,)),
        ),
        numbers=tuple(
            number
            for attention in attentions
            for number in (
                Number(path=attention, name="n_heads", of=heads),
                Number(path=attention, name="inner_dim", of=heads, features=True),
            )
        ),
        outputs=outputs,
        n_tokens=n_tokens,
    )


def _head(skeleton: Skeleton) -> nn.Module:
    config = skeleton.config
    scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return Head(
        skeleton.part("decoder.final_layer_norm"),
        skeleton.part("decoder.dropout"),
        skeleton.part("lm_head"),
        config.d_model**-0.5 if scaled else 1.0,
    )
