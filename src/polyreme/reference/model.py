"""The plain model of a spec: the library's or the user's own module, whole, as they call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..graph.dropout import drop_nothing
from ..graph.options import (
    MLP,
    TASKS,
    CharLSTM,
    Folder,
    Model,
    Preset,
    Python,
    ResNet20,
    Transformers,
)
from ..graph.presets import PRESETS
from ..graph.run import run
from .own import PlainLSTM, PlainMLP, PlainResNet

if TYPE_CHECKING:
    from ..graph.layer import LayerGraph
    from ..sample import SampleSpec

_AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


class Plain(nn.Module):
    """A whole model on the fields of a batch. `named` gives its tensors by whole-model name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits; the model is given the fields one after another."""
        logits: torch.Tensor = self.model(*fields.values())
        return logits

    def named(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers; a tied one under each of its names."""
        return self.model.state_dict(keep_vars=True)


class Library(Plain):
    """A transformers model, called by the names of the fields; experts, if any, run in turn."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("eager")

    def forward(self, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.model(**fields).logits
        return logits


class Layers(Plain):
    """A graph's layers one after another, where there is no model but the graph."""

    def __init__(self, graph: LayerGraph, seed: int, device: torch.device) -> None:
        super().__init__(nn.ModuleList(graph.build(layer.name) for layer in graph.layers))
        self._graph = graph
        self.model.to_empty(device=device)
        self._names: list[tuple[nn.Module, str, str]] = []
        owners: dict[str, nn.Parameter] = {}
        for layer, module in zip(graph.layers, self.model, strict=True):  # type: ignore[call-overload]
            graph.initialise(layer.name, module, seed)
            for own, whole in layer.params.items():
                path, _, attribute = own.rpartition(".")
                holder = module.get_submodule(path)
                self._names.append((holder, attribute, whole))
                tensor = getattr(holder, attribute)
                if isinstance(tensor, nn.Parameter):
                    setattr(holder, attribute, owners.setdefault(whole, tensor))

    def forward(self, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits."""
        names = (layer.name for layer in self._graph.layers)
        modules: Any = dict(zip(names, self.model, strict=True))  # type: ignore[call-overload]
        return run(self._graph, modules, fields)

    def named(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers."""
        return {whole: getattr(holder, attribute) for holder, attribute, whole in self._names}


def plain(
    model: Model, graph: LayerGraph, sample: SampleSpec, seed: int, device: torch.device
) -> Plain:
    """The whole model with the initial values of a run on a device, in float32, without dropout.

    A folder's weights are read by the library, a user's module keeps its own; all others are
    filled layer by layer as the graph fills them there: each kind of device draws its own numbers.
    """
    with torch.random.fork_rng(devices=[]):
        made, has_values = _make(model, graph, sample, seed, device)
        if not has_values:
            _fill(made, graph, seed, device)
    made.float()
    drop_nothing(made)
    return made.train()


def _make(
    model: Model, graph: LayerGraph, sample: SampleSpec, seed: int, device: torch.device
) -> tuple[Plain, bool]:
    """The model, and whether it has its values already."""
    if isinstance(model, Preset | Transformers):
        return Library(_from_configuration(model, sample)), False
    if isinstance(model, Folder):
        return Library(_from_folder(model)), True
    if isinstance(model, Python):
        from ..graph.module import call_factory

        made = call_factory(model, seed)
        return Plain(made) if isinstance(made, nn.Module) else Layers(graph, seed, device), True
    shape = next(iter(graph.inputs.values())).shape
    if isinstance(model, ResNet20):
        return Plain(PlainResNet(model, shape[0], sample.n_classes)), False
    if isinstance(model, CharLSTM):
        return Plain(PlainLSTM(model, sample.n_classes)), False
    assert isinstance(model, MLP), "every kind of model has a plain form"
    return Plain(PlainMLP(model, shape, sample.n_classes)), False


def _from_configuration(model: Preset | Transformers, sample: SampleSpec) -> nn.Module:
    from ..graph.huggingface import configuration

    if isinstance(model, Preset):
        preset = PRESETS[model.preset]
        model_type, fields = preset.model_type, {**preset.config, **model.config}
        task = preset.task or TASKS[model_type][0]
    else:
        model_type, fields = model.model_type, dict(model.config)
        task = model.task or TASKS[model_type][0]
    config = configuration(model_type, fields, sample)
    config.use_cache = False
    made: nn.Module = _auto(task).from_config(config)
    return made


def _from_folder(model: Folder) -> nn.Module:
    from transformers import AutoConfig

    from ..graph.reads import task_of

    config = AutoConfig.from_pretrained(model.path)
    task = model.task or task_of(TASKS[config.model_type], config.architectures or ())
    config.use_cache = False
    made: nn.Module = _auto(task).from_pretrained(model.path, config=config, dtype=torch.float32)
    return made


def _auto(task: str) -> Any:
    import transformers

    return getattr(transformers, _AUTO[task])


def _fill(made: Plain, graph: LayerGraph, seed: int, device: torch.device) -> None:
    """Give the model the values that the graph's layers get, one layer at a time."""
    tensors = made.named()
    missing = {id(tensor) for tensor in tensors.values()}
    with torch.no_grad():
        for layer in graph.layers:
            module = graph.build(layer.name).to_empty(device=device)
            graph.initialise(layer.name, module, seed)
            values = module.state_dict()
            for own, whole in layer.params.items():
                tensors[whole].copy_(values[own])
                missing.discard(id(tensors[whole]))
    assert not missing, "every tensor of the model is in some layer"
