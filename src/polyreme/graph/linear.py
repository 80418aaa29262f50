"""A linear model as a graph of one layer.

Axes: B samples, D features, K stored numbers of a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from ..errors import ConfigError, Violation
from ..sample import SampleSpec, TensorSpec
from .layer import Layer, LayerGraph
from .parts import Part, assemble

if TYPE_CHECKING:
    from .linear_options import Linear

LABEL = "labels"


class Weights(nn.Module):
    """A weight for each feature, of dense samples or of those that store some numbers."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features))

    def forward(self, first: torch.Tensor, values_BK: torch.Tensor | None = None) -> torch.Tensor:
        """Predictions [B]: of features [B, D], or of indices and values [B, K]."""
        weight = self.weight
        if values_BK is None:
            return first.flatten(1).to(weight.dtype) @ weight
        return (values_BK.to(weight.dtype) * weight[first]).sum(-1)


class LinearLoss:
    """The losses of a linear model; labels are -1 and 1, or numbers. `classes` says they are 0, 1.

    Values are those of `convex.loss`, on tensors.
    """

    classifies = True

    def __init__(self, loss: str, gamma: float, classes: bool) -> None:
        self._loss, self._gamma, self._classes = loss, gamma, classes

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss, and how many labels there are."""
        y = labels.to(logits.dtype)
        if self._classes:
            y = 2 * y - 1
        margin = y * logits
        if self._loss == "logistic":
            each = F.softplus(-margin)
        elif self._loss == "squared_hinge":
            each = F.relu(1 - margin) ** 2
        elif self._loss == "hinge":
            short, gamma = F.relu(1 - margin), self._gamma
            each = torch.where(short < gamma, short**2 / (2 * gamma), short - gamma / 2)
        else:
            each = (logits - y) ** 2 / 2
        return each.sum(), torch.tensor(float(len(each)), device=each.device)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The label on the prediction's side of 0; of numbers the prediction itself."""
        if self._loss == "squared":
            return logits
        above = (logits > 0).to(torch.int64)
        return above if self._classes else 2 * above - 1


def linear(options: Linear, sample: SampleSpec) -> LayerGraph:
    """One layer; its flops are 2 for each stored number of a sample."""
    if "features" not in sample.fields:
        rule, legal = "gives no features, which a linear model reads", '"svmlight", "arrays"'
        value = ", ".join(sample.fields)
        raise ConfigError([Violation(path="data.kind", value=value, rule=rule, legal=legal)])
    label = sample.fields[LABEL]
    classes = label.dtype == "int64" and sample.n_classes == 2
    if options.loss != "squared" and sample.n_classes != 2:
        rule = f"has {sample.n_classes} classes, and {options.loss} is of two"
        legal = 'two classes, loss = "squared", or data.positive = 1 (one class against the rest)'
        raise ConfigError([Violation(path="data", value="", rule=rule, legal=legal)])
    (n_features,) = sample.fields["features"].shape
    stored = sample.stored
    sample, inputs = as_stored(sample)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Weights(n_features)

    part = Part(
        name="linear",
        kind="linear",
        inputs=inputs,
        outputs=("out",),
        make=on_meta,
        names={"": "linear"},
    )
    graph = assemble("linear", [part], sample, _zero)
    flops = 2.0 * (n_features if stored is None else stored)
    return graph.scored(LinearLoss(options.loss, options.gamma, classes), flops)


def as_stored(sample: SampleSpec) -> tuple[SampleSpec, tuple[str, ...]]:
    """Samples with the fields that batches have, and which of them a layer reads."""
    if sample.stored is None:
        return sample, ("batch:features",)
    shape = (max(1, sample.stored),)
    fields = {"indices": TensorSpec(shape, "int64"), "values": TensorSpec(shape)}
    fields[LABEL] = sample.fields[LABEL]
    return msgspec.structs.replace(sample, fields=fields), ("batch:indices", "batch:values")


def _zero(module: nn.Module, _layer: Layer, _seed: int) -> None:
    nn.init.zeros_(module.weight)  # type: ignore[arg-type]
