"""BERT: bidirectional blocks; scores masked tokens, or the whole sample.

Axes: B samples, T tokens, D hidden, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...errors import Violation
from ...sample import SampleSpec
from ..parts import Part
from ..skeleton import Skeleton
from ..tensor import Context, Cutting, Number, Read, Region, Run, Setting, TensorPlan
from .positions import check_positions
from .vocabulary import scores, table

READS = ("input_ids",)


class Embed(nn.Module):
    """Token ids [B, T] to hidden [B, T, D]; all tokens are of the first segment."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed."""
        return self.embeddings(input_ids=input_ids)


class Block(nn.Module):
    """One encoder block on hidden [B, T, D]; every token sees every other."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Attend and transform."""
        out = self.block(hidden_BTD)
        return out[0] if isinstance(out, tuple) else out


class TokenHead(nn.Module):
    """Hidden [B, T, D] to logits [B, T, V]."""

    def __init__(self, transform: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.decoder = decoder

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        return self.decoder(self.transform(hidden_BTD))


class SampleHead(nn.Module):
    """Hidden [B, T, D] to logits [B, C], from the first token."""

    def __init__(self, pooler: nn.Module, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = dropout
        self.classifier = classifier

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score the sample."""
        return self.classifier(self.dropout(self.pooler(hidden_BTD)))


def check(skeleton: Skeleton, sample: SampleSpec) -> list[Violation]:
    """Encoders only, no longer than there are positions."""
    found = check_positions(skeleton.config, sample)
    for field, wanted in (("is_decoder", False), ("add_cross_attention", False)):
        if getattr(skeleton.config, field, wanted) != wanted:
            rule = "makes a decoder of it, and it is cut as an encoder"
            path = f"model.config.{field}"
            found.append(Violation(path=path, value=True, rule=rule, legal="false"))
    if skeleton.task == "masked_lm" and not skeleton.config.tie_word_embeddings:
        rule = "leaves the head's bias without use"
        path = "model.config.tie_word_embeddings"
        found.append(Violation(path=path, value=False, rule=rule, legal="true"))
    return found


def cut(skeleton: Skeleton, sample: SampleSpec) -> list[Part]:
    """Embed, blocks, head."""
    config = skeleton.config
    n_tokens = sample.fields["input_ids"].shape[0]
    degree = math.gcd(config.num_attention_heads, config.intermediate_size)
    parts = [
        Part(
            name="embed",
            kind="embed",
            inputs=("batch:input_ids",),
            outputs=("hidden",),
            make=lambda: Embed(skeleton.part("bert.embeddings")),
            names={"embeddings": "bert.embeddings"},
            splits={"tp": config.vocab_size, "cp": n_tokens},
            tensor=table(
                "embeddings.word_embeddings",
                config.vocab_size,
                n_tokens,
                positions=("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
            ),
        )
    ]
    blocks = _block_plan(config, n_tokens)
    for index in range(config.num_hidden_layers):
        parts.append(
            Part(
                name=f"block.{index}",
                kind="block",
                inputs=(f"{parts[-1].name}.hidden",),
                outputs=("hidden",),
                make=lambda index=index: Block(  # type: ignore[misc]
                    skeleton.block("bert.encoder.layer", index)
                ),
                names={"block": f"bert.encoder.layer.{index}"},
                splits={"tp": degree, "cp": n_tokens},
                tensor=blocks,
            )
        )
    return [*parts, _head(skeleton, f"{parts[-1].name}.hidden", n_tokens)]


def _head(skeleton: Skeleton, hidden: str, n_tokens: int) -> Part:
    def tokens() -> nn.Module:
        predictions = skeleton.part("cls.predictions")
        return TokenHead(predictions.transform, predictions.decoder)

    def whole() -> nn.Module:
        model = skeleton.model()
        return SampleHead(
            model.get_submodule("bert.pooler"),
            model.get_submodule("dropout"),
            model.get_submodule("classifier"),
        )

    masked = skeleton.task == "masked_lm"
    config = skeleton.config
    predictions = "cls.predictions"
    return Part(
        name="head",
        kind="head",
        inputs=(hidden,),
        outputs=("logits",),
        make=tokens if masked else whole,
        names={"transform": f"{predictions}.transform", "decoder": f"{predictions}.decoder"}
        if masked
        else {"pooler": "bert.pooler", "classifier": "classifier"},
        splits={"tp": config.vocab_size, "cp": n_tokens}
        if masked
        else {"tp": math.gcd(config.hidden_size, config.num_labels)},
        # A few classes from one token are not worth a collective: every part computes them.
        tensor=scores("decoder", config.vocab_size, n_tokens)
        if masked
        else TensorPlan(n_tokens=n_tokens, whole="in"),
    )


def _block_plan(config: Any, n_tokens: int) -> TensorPlan:
    attention, n_heads = "block.attention.self", config.num_attention_heads
    heads = Run(what="num_attention_heads", units=n_heads, width=config.hidden_size // n_heads)
    inner = Run(what="intermediate_size", units=config.intermediate_size)
    reads = (Read(n_tokens=n_tokens),)
    return TensorPlan(
        cuttings=(
            *(
                Cutting(path=f"{attention}.{leaf}", side="out", runs=(heads,))
                for leaf in ("query", "key", "value")
            ),
            Cutting(path="block.attention.output.dense", side="in", runs=(heads,)),
            Cutting(path="block.intermediate.dense", side="out", runs=(inner,)),
            Cutting(path="block.output.dense", side="in", runs=(inner,)),
        ),
        regions=(
            Region(entry=attention, exit="block.attention.output.dense", reads=reads),
            Region(entry="block.intermediate", exit="block.output.dense", reads=reads),
        ),
        numbers=(
            Number(path=attention, name="num_attention_heads", of=heads),
            Number(path=attention, name="all_head_size", of=heads, features=True),
        ),
        contexts=(Context(n_tokens=n_tokens, run=heads, n_queries=n_tokens, queries=heads),),
        # In one go: a chunk of tokens is not one of each part's, and parts would meet for each.
        settings=(Setting(path="block", name="chunk_size_feed_forward", value=0),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
    )
