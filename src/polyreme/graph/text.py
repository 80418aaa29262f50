"""The character LSTM.

Axes: B samples, T tokens, E embedding, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ConfigError, Violation
from ..sample import SampleSpec
from .layer import Layer, LayerGraph
from .parts import Part, assemble

if TYPE_CHECKING:
    from .options import CharLSTM


class Embed(nn.Module):
    """Token ids [B, T] to embeddings [B, T, E]."""

    def __init__(self, n_classes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_classes, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed."""
        return self.embed(input_ids)


class Recurrence(nn.Module):
    """One LSTM layer over hidden [B, T, .], from a zero state; dropout on its output."""

    def __init__(self, n_in: int, n_hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(n_in, n_hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Read the tokens in order."""
        return self.dropout(self.lstm(hidden_BTD)[0])


class Head(nn.Module):
    """Hidden [B, T, D] to logits [B, T, V]."""

    def __init__(self, n_hidden: int, n_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_hidden, n_classes)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        return self.linear(hidden_BTD)


def char_lstm(options: CharLSTM, sample: SampleSpec) -> LayerGraph:
    """Embedding, LSTM layers, head."""
    if "input_ids" not in sample.fields or not sample.fields["labels"].shape:
        raise ConfigError(
            [
                Violation(
                    path="data",
                    value=", ".join(sample.fields),
                    rule="does not fit char_lstm, which reads input_ids and a label a token",
                    legal="text",
                )
            ]
        )
    parts = [_embed(options, sample)]
    for index in range(options.layers):
        n_in = options.hidden if index else options.embed
        dropout = options.dropout if index + 1 < options.layers else 0.0
        parts.append(
            Part(
                name=f"lstm.{index}",
                kind=f"lstm.{n_in}x{options.hidden}",
                inputs=(f"{parts[-1].name}.hidden",),
                outputs=("hidden",),
                make=lambda n_in=n_in, dropout=dropout: _on_meta(  # type: ignore[misc]
                    Recurrence, n_in, options.hidden, dropout
                ),
                names={"": f"lstm.{index}"},
            )
        )
    head = Part(
        name="head",
        kind="head",
        inputs=(f"{parts[-1].name}.hidden",),
        outputs=("logits",),
        make=lambda: _on_meta(Head, options.hidden, sample.n_classes),
        names={"": "head"},
    )
    return assemble("char_lstm", [*parts, head], sample, _fill)


def _embed(options: CharLSTM, sample: SampleSpec) -> Part:
    return Part(
        name="embed",
        kind="embed",
        inputs=("batch:input_ids",),
        outputs=("hidden",),
        make=lambda: _on_meta(Embed, sample.n_classes, options.embed),
        names={"": "embed"},
    )


def _on_meta(module_class: type[nn.Module], *sizes: float) -> nn.Module:
    with torch.device("meta"):
        return module_class(*sizes)


def _fill(module: nn.Module, _layer: Layer, _seed: int) -> None:
    """Torch's own initial values."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding | nn.LSTM):
            child.reset_parameters()
