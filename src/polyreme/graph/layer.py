"""A model as a graph of layers: the unit that is profiled, planned, sharded and recomputed.

Axes: B samples, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..sample import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .experts import ExpertPlan
    from .skeleton import Skeleton
    from .tensor import TensorPlan


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `name` (``block.7``) is the key in profile, plan and checkpoint.

    `inputs` are ``batch:FIELD`` or ``LAYER.OUTPUT``; the module is called with them in this order
    and returns its `outputs` in theirs (a single output as a bare tensor). `params` maps the
    module's own parameter and buffer names to their names in the whole model (those of the
    model's library, so files interchange). `param_count` counts trainable and frozen parameters
    once, tied copies excluded. `flops` is the forward pass of one sample, counted from the real
    operators (2 per multiply-add). `splits` gives the largest legal degree by axis. `ties` lists
    whole-model names that this layer shares with an earlier layer, which owns them. A layer with
    `batch_statistics` (BatchNorm) normalises over its microbatch: a smaller one changes what is
    computed, and a second forward pass moves its running statistics again.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, TensorSpec]
    params: Mapping[str, str]
    param_count: int
    flops: float
    splits: Mapping[str, int] = {}
    ties: tuple[str, ...] = ()
    batch_statistics: bool = False


class Builder(Protocol):
    """How layers become modules; each process calls it itself, nothing is pickled.

    One whose layers can be split over tensor parts also has `tensor_plan(layer)`, one that has
    layers with experts `expert_plan(layer)`.
    """

    def build(self, layer: Layer) -> nn.Module:
        """The layer's module on the meta device, in float32."""

    def initialise(self, layer: Layer, module: nn.Module, seed: int) -> None:
        """Fill parameters and buffers in place (module already on a real device).

        The values depend on the seed and the layer's name alone, never on the layout or on which
        other layers were built. A model read from a folder takes its weights from there.
        """


class Loss(Protocol):
    """Scores logits against labels; `classifies` says whether one of them is most likely."""

    @property
    def classifies(self) -> bool:
        """Whether `argmax` is to be held against labels."""

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss, and how many labels carry it."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The label that is most likely."""


class LayerGraph:
    """Layers in topological order, with what builds them.

    `inputs` are the fields of a sample that the layers read, `output` names the logits
    (``head.logits``), `labels` the field they are scored against. `library` is the transformers
    model that was cut, if one was. `loss` is what scores them (unset: cross-entropy).
    """

    def __init__(
        self,
        *,
        name: str,
        layers: tuple[Layer, ...],
        inputs: Mapping[str, TensorSpec],
        output: str,
        builder: Builder,
        labels: str = "labels",
        library: Skeleton | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.name = name
        self.layers = layers
        self.inputs = dict(inputs)
        self.output = output
        self.labels = labels
        self.library = library
        self.loss = loss
        self._builder = builder
        self._by_name = {layer.name: layer for layer in layers}
        assert len(self._by_name) == len(layers), "layer names must be unique"

    def with_kinds(self, kinds: Mapping[str, str]) -> LayerGraph:
        """The same graph with the kind of each layer given by its name."""
        return LayerGraph(
            name=self.name,
            layers=tuple(
                msgspec.structs.replace(layer, kind=kinds[layer.name]) for layer in self.layers
            ),
            inputs=self.inputs,
            output=self.output,
            builder=self._builder,
            labels=self.labels,
            library=self.library,
            loss=self.loss,
        )

    def scored(self, loss: Loss, flops: float) -> LayerGraph:
        """The same graph, of one layer of so many flops, under another loss."""
        (layer,) = self.layers
        return LayerGraph(
            name=self.name,
            layers=(msgspec.structs.replace(layer, flops=flops),),
            inputs=self.inputs,
            output=self.output,
            builder=self._builder,
            labels=self.labels,
            loss=loss,
        )

    def layer(self, name: str) -> Layer:
        """The layer of that name; KeyError if there is none."""
        return self._by_name[name]

    def build(self, name: str) -> nn.Module:
        """A new module for the layer, on the meta device, in float32."""
        return self._builder.build(self._by_name[name])

    def initialise(self, name: str, module: nn.Module, seed: int) -> None:
        """Fill the module in place; the same values whatever the layout (see `Builder`)."""
        self._builder.initialise(self._by_name[name], module, seed)

    def tensor_plan(self, name: str) -> TensorPlan | None:
        """How the layer is split over tensor parts; None if it cannot be."""
        find = getattr(self._builder, "tensor_plan", None)
        plan: TensorPlan | None = None if find is None else find(self._by_name[name])
        return plan

    def expert_plan(self, name: str) -> ExpertPlan | None:
        """The experts of a layer; None if it has none."""
        find = getattr(self._builder, "expert_plan", None)
        plan: ExpertPlan | None = None if find is None else find(self._by_name[name])
        return plan

    @property
    def sliced(self) -> bool:
        """Whether tokens may go through all layers in slices, each behind those before it."""
        find = getattr(self._builder, "sliced", None)
        return find is not None and all(find(layer) for layer in self.layers)

    def tensor_degrees(self, limit: int) -> tuple[int, ...]:
        """Numbers of tensor parts, up to a limit, into which every layer can be split."""
        plans = [self.tensor_plan(layer.name) for layer in self.layers]
        return tuple(
            degree
            for degree in range(1, limit + 1)
            if degree == 1 or all(plan is not None and plan.legal(degree) for plan in plans)
        )

    @property
    def param_count(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return sum(layer.param_count for layer in self.layers)

    @property
    def flops(self) -> float:
        """Forward flops of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that a plan or profile depends on."""
        payload = msgspec.json.encode((self.name, self.layers, self.inputs, self.output))
        return hashlib.sha256(payload).hexdigest()[:16]
