"""Swin: stages of windowed blocks, patches merged between them.

Axes: B samples, T patches of the stage, D channels of the stage, C classes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from transformers.models.swin.modeling_swin import window_partition, window_reverse

from ...errors import Violation
from ...sample import SampleSpec
from ..parts import Part
from ..skeleton import Skeleton
from ..tensor import Along, Cutting, Meeting, Number, Read, Region, Run, TensorPlan

READS = ("pixel_values",)


class Embed(nn.Module):
    """Pixels [B, channel, height, width] to hidden [B, T, D]."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed."""
        dtype = next(self.embeddings.parameters()).dtype
        return self.embeddings(pixel_values.to(dtype))[0]


class Merging(nn.Module):
    """Four neighbours to one: hidden [B, T, D] to [B, ~T / 4, 2 D], with T = rows x columns."""

    def __init__(self, inner: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.inner = inner
        self.grid = grid

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Merge."""
        return self.inner(hidden_BTD, self.grid)


class Block(nn.Module):
    """A block on hidden [B, T, D] with T = rows x columns, attending within windows.

    With a `meeting` the hidden is one part's tokens of it; windows are then made of all of them.
    """

    def __init__(self, inner: Any, grid: tuple[int, int]) -> None:
        super().__init__()
        self.inner = inner
        self.grid = grid
        self.meeting: Meeting | None = None

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Attend and transform."""
        inner, meeting = self.inner, self.meeting
        if meeting is None:
            out = inner(hidden_BTD, self.grid)
            return out[0] if isinstance(out, tuple) else out
        whole_BTD = meeting.gather(inner.layernorm_before(hidden_BTD))
        attended_BTD = meeting.total(self._attended(whole_BTD)) + inner.attention.o_proj.bias
        hidden_BTD = hidden_BTD + inner.drop_path(inner.dropout(attended_BTD))
        return hidden_BTD + inner.dropout(inner.mlp(inner.layernorm_after(hidden_BTD)))

    def _attended(self, normed_BTD: torch.Tensor) -> torch.Tensor:
        """As the library's block does it, between its two sums with the hidden."""
        inner, (height, width) = self.inner, self.grid
        inner.set_shift_and_window_size(self.grid)
        grid_BHWD, _ = inner.maybe_pad(normed_BTD.unflatten(1, self.grid), height, width)
        size = inner.window_size
        _, n_rows, n_columns, _ = grid_BHWD.shape
        windows = window_partition(inner.cyclic_shift(grid_BHWD), size).flatten(1, 2)
        mask = inner.get_attn_mask(n_rows, n_columns, dtype=windows.dtype, device=windows.device)
        out, _ = inner.attention(windows, mask)
        back_BHWD = window_reverse(out.unflatten(1, (size, size)), size, n_rows, n_columns)
        back_BHWD = inner.cyclic_shift(back_BHWD, reverse=True)
        return back_BHWD[:, :height, :width].flatten(1, 2)


class Head(nn.Module):
    """Hidden [B, T, D] to logits [B, C], over the mean of all patches."""

    def __init__(self, layernorm: nn.Module, pooler: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.layernorm = layernorm
        self.pooler = pooler
        self.classifier = classifier

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score the image."""
        pooled_BD1 = self.pooler(self.layernorm(hidden_BTD).transpose(1, 2))
        return self.classifier(pooled_BD1.flatten(1))


def check(_skeleton: Skeleton, _sample: SampleSpec) -> list[Violation]:
    """Any configuration can be cut."""
    return []


def cut(skeleton: Skeleton, _sample: SampleSpec) -> list[Part]:
    """Embed, blocks and mergings stage by stage, head (with the final norm)."""
    config = skeleton.config
    patches = skeleton.part("swin.embeddings").patch_embeddings
    height, width = patches.grid_size
    first = skeleton.part("swin.encoder.layers.0").blocks[0]
    # Older 5.x versions of the library name the matrices otherwise: no plan is made for those.
    plans = hasattr(first, "mlp") and hasattr(first.attention, "q_proj")
    parts = [
        Part(
            name="embed",
            kind="embed",
            inputs=("batch:pixel_values",),
            outputs=("hidden",),
            make=lambda: Embed(skeleton.part("swin.embeddings")),
            names={"embeddings": "swin.embeddings"},
            splits={"tp": config.embed_dim},
            tensor=_alike((height, width), "out"),
        )
    ]
    for stage, depth in enumerate(config.depths):
        grid = (height, width)
        for index in range(depth):
            parts.append(_block(skeleton, stage, index, grid, parts[-1].name, plans=plans))
        if stage + 1 < len(config.depths):
            parts.append(_merging(skeleton, stage, grid, parts[-1].name))
            height, width = (height + 1) // 2, (width + 1) // 2
    parts.append(
        Part(
            name="head",
            kind="head",
            inputs=(f"{parts[-1].name}.hidden",),
            outputs=("logits",),
            make=lambda: Head(
                skeleton.part("swin.layernorm"),
                skeleton.part("swin.pooler"),
                skeleton.part("classifier"),
            ),
            names={"layernorm": "swin.layernorm", "classifier": "classifier"},
            splits={"tp": config.num_labels},
            tensor=_alike((height, width), "in"),
        )
    )
    return parts


def _block(
    skeleton: Skeleton, stage: int, index: int, grid: tuple[int, int], before: str, *, plans: bool
) -> Part:
    config = skeleton.config
    shifted = index % 2 == 1
    n_heads = config.num_heads[stage]
    width = config.embed_dim * 2**stage
    n_before = sum(config.depths[:stage]) + index
    dropped = config.drop_path_rate * n_before / max(sum(config.depths) - 1, 1)

    def make() -> nn.Module:
        block_class = type(skeleton.part(f"swin.encoder.layers.{stage}").blocks[0])
        with torch.device("meta"):
            block = block_class(
                config=config,
                dim=width,
                input_resolution=grid,
                num_heads=n_heads,
                drop_path_rate=dropped,
                shift_size=config.window_size // 2 if shifted else 0,
            )
        return Block(block.float(), grid)

    return Part(
        name=f"stage.{stage}.block.{index}",
        kind=f"stage.{stage}.shifted" if shifted else f"stage.{stage}.block",
        inputs=(f"{before}.hidden",),
        outputs=("hidden",),
        make=make,
        names={"inner": f"swin.encoder.layers.{stage}.blocks.{index}"},
        splits={"tp": math.gcd(n_heads, int(config.mlp_ratio * width))},
        tensor=_block_plan(n_heads, width, int(config.mlp_ratio * width), grid, config.window_size)
        if plans
        else None,
    )


def _in_windows(grid: tuple[int, int], window: int) -> int:
    """Patches of a grid with what is missing to whole windows.

    >>> _in_windows((8, 12), 7), _in_windows((4, 4), 7)
    (196, 16)
    """
    size = min(window, *grid)
    return math.prod(-(-length // size) * size for length in grid)


def _alike(grid: tuple[int, int], whole: Literal["in", "out", "both"]) -> TensorPlan:
    """Embedding, merging and head are a small part of the work: every part computes them."""
    outputs: dict[str, Along] = {} if whole == "in" else {"hidden": "tokens"}
    return TensorPlan(outputs=outputs, n_tokens=math.prod(grid), whole=whole)


def _block_plan(
    n_heads: int, width: int, n_inner: int, grid: tuple[int, int], window: int
) -> TensorPlan:
    """Attention reads the patches of its windows."""
    attention, n_tokens = "inner.attention", math.prod(grid)
    heads = Run(what="num_heads", units=n_heads, width=width // n_heads)
    inner = Run(what="mlp_ratio x channels", units=n_inner)
    table = f"{attention}.relative_position_bias.relative_position_bias_table"
    return TensorPlan(
        cuttings=(
            *(
                Cutting(path=f"{attention}.{leaf}", side="out", runs=(heads,))
                for leaf in ("q_proj", "k_proj", "v_proj")
            ),
            Cutting(path=f"{attention}.o_proj", side="in", runs=(heads,)),
            Cutting(path=table, side="out", runs=(Run(what="num_heads", units=n_heads),)),
            Cutting(path="inner.mlp.fc1", side="out", runs=(inner,)),
            Cutting(path="inner.mlp.fc2", side="in", runs=(inner,)),
        ),
        regions=(
            Region(
                entry=attention,
                exit=f"{attention}.o_proj",
                reads=(Read(n_tokens=_in_windows(grid, window)),),
                arranged=True,
            ),
            Region(entry="inner.mlp", exit="inner.mlp.fc2", reads=(Read(n_tokens=n_tokens),)),
        ),
        numbers=(Number(path=attention, name="num_attention_heads", of=heads),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
        alike=("inner.drop_path",),
    )


def _merging(skeleton: Skeleton, stage: int, grid: tuple[int, int], before: str) -> Part:
    path = f"swin.encoder.layers.{stage}.downsample"
    return Part(
        name=f"stage.{stage}.merge",
        kind=f"stage.{stage}.merge",
        inputs=(f"{before}.hidden",),
        outputs=("hidden",),
        make=lambda: Merging(skeleton.part(path), grid),
        names={"inner": path},
        splits={"tp": skeleton.config.embed_dim * 2 ** (stage + 1)},
        tensor=_alike(grid, "both"),
    )
