"""ViT: patches of an image, blocks, a class from the first token.

Axes: B samples, T patches and one, D hidden, C classes.
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
from ..tensor import Cutting, Number, Read, Region, Run, TensorPlan

READS = ("pixel_values",)


class Embed(nn.Module):
    """Pixels [B, channel, height, width] to hidden [B, T, D]."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed."""
        dtype = next(self.embeddings.parameters()).dtype
        return self.embeddings(pixel_values.to(dtype))


class Block(nn.Module):
    """One block on hidden [B, T, D]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Attend and transform."""
        out = self.block(hidden_BTD)
        return out[0] if isinstance(out, tuple) else out


class Head(nn.Module):
    """Hidden [B, T, D] to logits [B, C]."""

    def __init__(self, layernorm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.layernorm = layernorm
        self.classifier = classifier

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score the image."""
        return self.classifier(self.layernorm(hidden_BTD)[:, 0])


def check(_skeleton: Skeleton, _sample: SampleSpec) -> list[Violation]:
    """Any configuration can be cut."""
    return []


def cut(skeleton: Skeleton, _sample: SampleSpec) -> list[Part]:
    """Embed, blocks, head (with the final norm)."""
    config = skeleton.config
    degree = math.gcd(config.num_attention_heads, config.intermediate_size)
    model = skeleton.part("vit")
    stack = "layers" if hasattr(model, "layers") else "encoder.layer"
    n_tokens = model.embeddings.patch_embeddings.num_patches + 1
    first = model.get_submodule(f"{stack}.0")
    # Older 5.x versions of the library name the matrices otherwise: no plan is made for those.
    named = hasattr(first, "mlp") and hasattr(first.attention, "q_proj")
    blocks = _block_plan(config, n_tokens) if named else None

    parts = [
        Part(
            name="embed",
            kind="embed",
            inputs=("batch:pixel_values",),
            outputs=("hidden",),
            make=lambda: Embed(skeleton.part("vit.embeddings")),
            names={"embeddings": "vit.embeddings"},
            splits={"tp": config.hidden_size},
            tensor=TensorPlan(outputs={"hidden": "tokens"}, n_tokens=n_tokens, whole="out"),
        )
    ]
    for index in range(config.num_hidden_layers):
        parts.append(
            Part(
                name=f"block.{index}",
                kind="block",
                inputs=(f"{parts[-1].name}.hidden",),
                outputs=("hidden",),
                make=lambda: Block(skeleton.part(f"vit.{stack}.0")),
                names={"block": f"vit.{stack}.{index}"},
                splits={"tp": degree},
                tensor=blocks,
            )
        )
    parts.append(
        Part(
            name="head",
            kind="head",
            inputs=(f"{parts[-1].name}.hidden",),
            outputs=("logits",),
            make=lambda: Head(skeleton.part("vit.layernorm"), skeleton.part("classifier")),
            names={"layernorm": "vit.layernorm", "classifier": "classifier"},
            splits={"tp": config.num_labels},
            # A few classes from one token are not worth a collective: every part computes them.
            tensor=TensorPlan(n_tokens=n_tokens, whole="in"),
        )
    )
    return parts


def _block_plan(config: Any, n_tokens: int) -> TensorPlan:
    attention, n_heads = "block.attention", config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    heads = Run(what="num_attention_heads", units=n_heads, width=width)
    inner = Run(what="intermediate_size", units=config.intermediate_size)
    reads = (Read(n_tokens=n_tokens),)
    return TensorPlan(
        cuttings=(
            *(
                Cutting(path=f"{attention}.{leaf}", side="out", runs=(heads,))
                for leaf in ("q_proj", "k_proj", "v_proj")
            ),
            Cutting(path=f"{attention}.o_proj", side="in", runs=(heads,)),
            Cutting(path="block.mlp.fc1", side="out", runs=(inner,)),
            Cutting(path="block.mlp.fc2", side="in", runs=(inner,)),
        ),
        regions=(
            Region(entry=attention, exit=f"{attention}.o_proj", reads=reads),
            Region(entry="block.mlp", exit="block.mlp.fc2", reads=reads),
        ),
        numbers=(Number(path=attention, name="num_attention_heads", of=heads),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
    )
