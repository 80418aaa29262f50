"""Small models for images and feature vectors: the CIFAR residual network, the MLP.

Axes: B samples, C channels, H rows, W columns, D features.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import ConfigError, Violation
from ..sample import SampleSpec
from .layer import Layer, LayerGraph
from .parts import Part, assemble

if TYPE_CHECKING:
    from .options import MLP, ResNet20


class BatchNorm(nn.BatchNorm2d):
    """Batch norm whose arithmetic is at least as wide as its statistics, whatever is cast.

    Parameters in bfloat16 beside float32 statistics are widened; the output has the input's type.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the parent's name
        """Normalise each channel by the batch (training) or the running statistics."""
        assert self.running_mean is not None
        assert self.running_var is not None
        wide = torch.promote_types(input.dtype, self.running_mean.dtype)
        mean, variance = self.running_mean.to(wide), self.running_var.to(wide)
        out = F.batch_norm(
            input.to(wide),
            mean,
            variance,
            self.weight.to(wide),
            self.bias.to(wide),
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        if self.training:
            if wide != self.running_mean.dtype:  # else batch_norm has moved them itself
                self.running_mean.copy_(mean)
                self.running_var.copy_(variance)
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        return out.to(input.dtype)


class Stem(nn.Module):
    """Image [B, channel, H, W] to feature maps [B, C, H, W]."""

    def __init__(self, n_channels: int, width: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_channels, width, 3, padding=1, bias=False)
        self.norm = _norm(norm, width)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Convolve."""
        return F.relu(self.norm(self.conv(pixel_values.to(self.conv.weight.dtype))))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut without parameters (option A of the paper)."""

    def __init__(self, n_in: int, n_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, n_out)
        self.stride = stride
        self.n_added = n_out - n_in

    def forward(self, maps_BCHW: torch.Tensor) -> torch.Tensor:
        """Transform."""
        shortcut = maps_BCHW[:, :, :: self.stride, :: self.stride]
        if self.n_added:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.n_added))
        out = F.relu(self.norm1(self.conv1(maps_BCHW)))
        return F.relu(self.norm2(self.conv2(out)) + shortcut)


class Classifier(nn.Module):
    """Feature maps [B, C, H, W] to logits [B, classes], over their mean."""

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, n_classes)

    def forward(self, maps_BCHW: torch.Tensor) -> torch.Tensor:
        """Score."""
        return self.linear(maps_BCHW.mean(dim=(2, 3)))


class Dense(nn.Module):
    """A linear map of everything but the batch axis, then ReLU unless it is the last."""

    def __init__(self, n_in: int, n_out: int, bias: bool, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=bias)
        self.last = last

    def forward(self, features_BD: torch.Tensor) -> torch.Tensor:
        """Transform."""
        out = self.linear(features_BD.flatten(1).to(self.linear.weight.dtype))
        return out if self.last else F.relu(out)


def resnet(options: ResNet20, sample: SampleSpec) -> LayerGraph:
    """Stem, residual blocks, classifier."""
    n_channels = _field(sample, ("pixel_values",), "resnet20")[1][0]
    parts = [
        _part("stem", "batch:pixel_values", lambda: Stem(n_channels, options.width, options.norm))
    ]
    n_in = options.width
    for stage in range(3):
        n_out = options.width * 2**stage
        for index in range(options.blocks):
            stride = 2 if stage and not index else 1
            shape = (n_in, n_out, stride, options.norm)
            kind = f"stage.{stage}.first" if stride == 2 else f"stage.{stage}.block"
            parts.append(
                _part(
                    f"stage.{stage}.block.{index}",
                    f"{parts[-1].name}.out",
                    lambda shape=shape: ResidualBlock(*shape),
                    kind,
                )
            )
            n_in = n_out
    last = f"{parts[-1].name}.out"
    parts.append(_part("head", last, lambda: Classifier(n_in, sample.n_classes)))
    return assemble(f"resnet{6 * options.blocks + 2}", parts, sample, _fill)


def mlp(options: MLP, sample: SampleSpec) -> LayerGraph:
    """One layer a linear map."""
    name, shape = _field(sample, ("features", "pixel_values"), "mlp")
    widths = [math.prod(shape), *options.hidden, sample.n_classes]
    parts: list[Part] = []
    for index in range(len(widths) - 1):
        sizes = (widths[index], widths[index + 1], options.bias, index == len(widths) - 2)
        parts.append(
            _part(
                f"linear.{index}",
                f"{parts[-1].name}.out" if parts else f"batch:{name}",
                lambda sizes=sizes: Dense(*sizes),
                f"linear.{sizes[0]}x{sizes[1]}{'.last' if sizes[3] else ''}",
            )
        )
    return assemble("mlp", parts, sample, _fill)


def _part(name: str, value: str, make: object, kind: str | None = None) -> Part:
    assert callable(make)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return make()

    return Part(
        name=name,
        kind=kind or name,
        inputs=(value,),
        outputs=("out",),
        make=on_meta,
        names={"": name},
    )


def _fill(module: nn.Module, _layer: Layer, _seed: int) -> None:
    """Torch's own initial values; convolutions as He et al. 2015, eq. 10."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, nonlinearity="relu")
        elif isinstance(child, nn.Linear | nn.BatchNorm2d | nn.GroupNorm):
            child.reset_parameters()


def _norm(norm: str, width: int) -> nn.Module:
    return BatchNorm(width) if norm == "batch" else nn.GroupNorm(math.gcd(8, width), width)


def _field(sample: SampleSpec, names: tuple[str, ...], model: str) -> tuple[str, tuple[int, ...]]:
    for name in names:
        if name in sample.fields and not sample.fields["labels"].shape:
            return name, sample.fields[name].shape
    raise ConfigError(
        [
            Violation(
                path="data",
                value=", ".join(sample.fields),
                rule=f"does not fit {model}, which reads {' or '.join(names)} and a label a sample",
                legal="data of images or features with classes",
            )
        ]
    )
