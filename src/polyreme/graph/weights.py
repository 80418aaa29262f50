"""Weights of a folder, read from safetensors by whole-model name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import safe_open

from ..errors import ConfigError, Violation

if TYPE_CHECKING:
    from .skeleton import Skeleton


class FolderWeights:
    """Tensors by name from one or many safetensors files; nothing is read before it is asked for.

    Names in the files may be those of an older or a headless model, where transformers itself
    knows how they are called now.
    """

    def __init__(self, folder: Path, skeleton: Skeleton) -> None:
        self._files = _index(folder)
        with torch.device("meta"):
            model = skeleton.model_class(skeleton.config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._keys = stored_names(self._files, model)
        for alias, owner in skeleton.aliases.items():
            if owner not in self._keys and alias in self._keys:
                self._keys[owner] = self._keys[alias]
        found = []
        for name, shape in shapes.items():
            name = skeleton.aliases.get(name, name)
            if name not in self._keys:
                found.append(_violation(folder, name, "is not in the safetensors", "all weights"))
            elif (stored := self._shape(name)) != shape:
                rule = f"has shape {list(stored)} in the safetensors"
                found.append(_violation(folder, name, rule, f"{list(shape)}, by config.json"))
        if found:
            raise ConfigError(list({violation.value: violation for violation in found}.values()))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of a whole-model name, on CPU."""
        key = self._keys[name]
        with safe_open(self._files[key], framework="pt") as file:
            return file.get_tensor(key)

    def _shape(self, name: str) -> tuple[int, ...]:
        key = self._keys[name]
        with safe_open(self._files[key], framework="pt") as file:
            return tuple(file.get_slice(key).get_shape())


def _index(folder: Path) -> Mapping[str, Path]:
    """The file of each key."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = msgspec.json.decode(index.read_bytes())["weight_map"]
        return {key: folder / file for key, file in shards.items()}
    single = folder / "model.safetensors"
    files = {}
    for path in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def stored_names(files: Collection[str], model: Any) -> dict[str, str]:
    """Whole-model name -> key in the files, which may be named as an older model's are."""
    wanted = model.state_dict()
    if wanted.keys() <= set(files):
        return {name: name for name in wanted}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known = get_model_conversion_mapping(model)
    renamings = [rule for rule in known if isinstance(rule, WeightRenaming)]
    keys = {}
    for key in files:
        name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, wanted)
        keys[name] = key
    return keys | {name: name for name in wanted if name in files}


def _violation(folder: Path, name: str, rule: str, legal: str) -> Violation:
    return Violation(path=f"model.path ({folder})", value=name, rule=rule, legal=legal)
