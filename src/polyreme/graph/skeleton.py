"""A transformers model with one layer a stack, on meta: where the modules of layers come from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from . import experts
from .layer import Layer
from .options import Task
from .parts import Fill

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Weights(Protocol):
    """Tensors by whole-model name."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """The tensor of that name."""


class Skeleton:
    """Gives new modules of a model by path, without the model's depth.

    `config` is the whole model's. `aliases` maps names of tied parameters to their owner's.
    """

    def __init__(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, task: Task
    ) -> None:
        self.config: Any = config
        self.task = task
        self.model_class = model_class
        self._shallow: Any = copy.deepcopy(config)
        if hasattr(config, "num_local_experts"):
            for each in (self.config, self._shallow):
                experts.use(each)
        if hasattr(config, "depths"):
            self._shallow.depths = [1] * len(config.depths)
        else:
            self._shallow.num_hidden_layers = 1
            if hasattr(config, "num_decoder_layers"):
                self._shallow.num_decoder_layers = 1
        model = self.model()
        # The model picks its attention when it is built; blocks must have the same.
        self.attention: str = model.config._attn_implementation
        self.config._attn_implementation = self.attention
        tied = getattr(model_class, "_tied_weights_keys", None) or {}
        self.aliases: Mapping[str, str] = (
            tied if getattr(config, "tie_word_embeddings", False) else {}
        )

    def model(self) -> PreTrainedModel:
        """A new shallow model on meta, in float32."""
        with torch.device("meta"):
            return self.model_class(self._shallow).float()

    def part(self, path: str) -> Any:
        """A new module of this path."""
        return self.model().get_submodule(path)

    def block(self, path: str, index: int) -> Any:
        """A new block of the stack at this path (its first block's class), on meta."""
        stack = self.part(path)
        with torch.device("meta"):
            return type(stack[0])(self.config, layer_idx=index).float()

    @functools.cached_property
    def _initialiser(self) -> PreTrainedModel:
        model = self.model()
        model.config = self.config  # depth sets the scale of some weights
        return model

    def fill(self, module: nn.Module, layer: Layer, _seed: int) -> None:
        """The library's own initialisation; tied parameters are left alone."""
        owned = {local for local, name in layer.params.items() if name not in layer.ties}
        self._fill(module, owned)

    def copying(self, weights: Weights) -> Fill:
        """Takes values from whole-model names; buffers follow from the configuration."""

        def fill(module: nn.Module, layer: Layer, _seed: int) -> None:
            self._fill(module, set())
            tensors = module.state_dict(keep_vars=True)
            for local, whole in layer.params.items():
                tensors[local].copy_(weights[whole])

        return fill

    def _fill(self, module: nn.Module, owned: set[str]) -> None:
        kept = [
            tensor
            for name, tensor in module.named_parameters(remove_duplicate=False)
            if name not in owned
        ]
        for tensor in kept:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        module.apply(self._initialiser._init_weights)
        for tensor in kept:
            if hasattr(tensor, "_is_hf_initialized"):
                del tensor._is_hf_initialized
