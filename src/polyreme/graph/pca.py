"""Principal components as a graph of one layer.

Axes: B samples, D features, K components, S stored numbers of a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ConfigError, Violation
from ..sample import SampleSpec
from .layer import Layer, LayerGraph
from .linear import as_stored
from .loss import IGNORE_LABEL
from .parts import Part, assemble

if TYPE_CHECKING:
    from .factor_options import PCA


class Directions(nn.Module):
    """Directions, of which the span counts: they are made orthonormal when they are used.

    `mean` [D], if there is one, is taken from features first.
    """

    mean: torch.Tensor | None

    def __init__(self, n_features: int, components: int, center: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_features, components))
        self.register_buffer("mean", torch.empty(n_features) if center else None)

    def forward(self, first: torch.Tensor, values_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Components [B, K]: of features [B, D], or of indices and values [B, S]."""
        basis_DK, _ = torch.linalg.qr(self.weight)
        if values_BS is None:
            found_BK = first.flatten(1).to(basis_DK.dtype) @ basis_DK
        else:
            found_BK = (values_BS.to(basis_DK.dtype)[..., None] * basis_DK[first]).sum(1)
        return found_BK if self.mean is None else found_BK - self.mean.to(basis_DK.dtype) @ basis_DK


class Captured:
    """Half the squared length of samples' components, below 0; labels are left out."""

    classifies = False

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss, and how many samples there are."""
        n = torch.tensor(float(len(logits)), device=logits.device)
        return -(logits * logits).sum() / 2, n

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """None."""
        return torch.full((len(logits),), IGNORE_LABEL, device=logits.device)


def pca(options: PCA, sample: SampleSpec) -> LayerGraph:
    """One layer; its flops are 2 for each stored number of a sample and direction."""
    if "features" not in sample.fields:
        rule, legal = "gives no features, of which directions are sought", '"svmlight", "arrays"'
        value = ", ".join(sample.fields)
        raise ConfigError([Violation(path="data.kind", value=value, rule=rule, legal=legal)])
    (n_features,) = sample.fields["features"].shape
    components = options.components
    if components > n_features:
        rule, legal = f"is more than the {n_features} features", f"1 to {n_features}"
        raise ConfigError(
            [Violation(path="model.components", value=components, rule=rule, legal=legal)]
        )
    sample, inputs = as_stored(sample)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Directions(n_features, components, options.center)

    part = Part(
        name="pca",
        kind="pca",
        inputs=inputs,
        outputs=("out",),
        make=on_meta,
        names={"": "pca"},
    )
    graph = assemble("pca", [part], sample, _orthonormal)
    return graph.scored(Captured(), 2.0 * components * (sample.stored or n_features))


def _orthonormal(module: nn.Module, _layer: Layer, _seed: int) -> None:
    assert isinstance(module, Directions)
    nn.init.orthogonal_(module.weight)
    if module.mean is not None:
        nn.init.zeros_(module.mean)  # until the rows are known
