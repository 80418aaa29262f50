"""Our own model kinds written as plain torch modules, whole, with the same parameter names.

Axes: B samples, C channels, H rows, W columns, T tokens, D hidden.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..graph.options import MLP, CharLSTM, ResNet20


class PlainResNet(nn.Module):
    """The residual network for small images, with torch's own normalisation."""

    def __init__(self, options: ResNet20, n_channels: int, n_classes: int) -> None:
        super().__init__()
        width, norm = options.width, options.norm
        stem = {"conv": _convolution(n_channels, width, 1), "norm": _norm(norm, width)}
        self.stem = nn.ModuleDict(stem)
        self.stage = nn.ModuleList()
        n_in = width
        for number in range(3):
            blocks = nn.ModuleList()
            for index in range(options.blocks):
                n_out, stride = width << number, 2 if number > 0 and index == 0 else 1
                blocks.append(_Residual(n_in, n_out, stride, norm))
                n_in = n_out
            self.stage.append(nn.ModuleDict({"block": blocks}))
        self.head = nn.ModuleDict({"linear": nn.Linear(n_in, n_classes)})

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        maps = torch.relu(self.stem["norm"](self.stem["conv"](images_BCHW)))
        for stage in self.stage:
            for block in stage["block"]:  # type: ignore[index]
                maps = block(maps)
        logits: torch.Tensor = self.head["linear"](maps.flatten(2).mean(2))
        return logits


class _Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _convolution(n_in, n_out, stride)
        self.norm1 = _norm(norm, n_out)
        self.conv2 = _convolution(n_out, n_out, 1)
        self.norm2 = _norm(norm, n_out)
        self.stride = stride

    def forward(self, maps_BCHW: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(maps_BCHW)))))
        kept = maps_BCHW[:, :, :: self.stride, :: self.stride]
        blank = inner.new_zeros(len(kept), inner.shape[1] - kept.shape[1], *kept.shape[2:])
        return torch.relu(inner + torch.cat([kept, blank], dim=1))


class PlainLSTM(nn.Module):
    """Embedding, LSTM layers, linear head over the vocabulary; dropout is left out."""

    def __init__(self, options: CharLSTM, n_classes: int) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"embed": nn.Embedding(n_classes, options.embed)})
        widths = [options.embed, *[options.hidden] * options.layers]
        self.lstm = nn.ModuleList(
            nn.ModuleDict({"lstm": nn.LSTM(n_in, n_out, batch_first=True)})
            for n_in, n_out in itertools.pairwise(widths)
        )
        self.head = nn.ModuleDict({"linear": nn.Linear(options.hidden, n_classes)})

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary]."""
        hidden_BTD = self.embed["embed"](ids_BT)
        for layer in self.lstm:
            hidden_BTD, _ = layer["lstm"](hidden_BTD)  # type: ignore[index]
        logits: torch.Tensor = self.head["linear"](hidden_BTD)
        return logits


class PlainMLP(nn.Module):
    """Linear maps with ReLU between."""

    def __init__(self, options: MLP, shape: Sequence[int], n_classes: int) -> None:
        super().__init__()
        widths = [math.prod(shape), *options.hidden, n_classes]
        self.linear = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(n_in, n_out, bias=options.bias)})
            for n_in, n_out in itertools.pairwise(widths)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        hidden_BD = features.flatten(1)
        for index, layer in enumerate(self.linear):
            hidden_BD = F.relu(hidden_BD) if index else hidden_BD
            hidden_BD = layer["linear"](hidden_BD)  # type: ignore[index]
        return hidden_BD


def _convolution(n_in: int, n_out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, kernel_size=3, stride=stride, padding=1, bias=False)


def _norm(norm: str, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(math.gcd(width, 8), width)
