"""Transformers models cut along their own modules into a LayerGraph."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..errors import ConfigError, Violation
from .options import TASKS, Task
from .parts import assemble
from .reads import SUFFIXES, task_of
from .skeleton import Skeleton, Weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ..sample import SampleSpec
    from .layer import LayerGraph

# Type -> transformers' module, class prefix, and the file of ours that cuts it.
_WHERE: Mapping[str, tuple[str, str, str]] = {
    "llama": ("llama", "Llama", "decoder"),
    "qwen2": ("qwen2", "Qwen2", "decoder"),
    "qwen3": ("qwen3", "Qwen3", "decoder"),
    "mistral": ("mistral", "Mistral", "decoder"),
    "mixtral": ("mixtral", "Mixtral", "decoder"),
    "gpt2": ("gpt2", "GPT2", "gpt2"),
    "gemma": ("gemma", "Gemma", "decoder"),
    "gemma2": ("gemma2", "Gemma2", "decoder"),
    "gemma3_text": ("gemma3", "Gemma3", "decoder"),
    "phi": ("phi", "Phi", "decoder"),
    "phi3": ("phi3", "Phi3", "decoder"),
    "bert": ("bert", "Bert", "bert"),
    "t5": ("t5", "T5", "t5"),
    "vit": ("vit", "ViT", "vit"),
    "swin": ("swin", "Swin", "swin"),
}
# Accepted by every configuration class beside its own fields.
_COMMON = (
    "num_labels",
    "rope_theta",
    "rope_scaling",
    "architectures",
    "model_type",
    "tie_word_embeddings",
)


def from_fields(
    name: str, model_type: str, fields: Mapping[str, Any], task: Task | None, sample: SampleSpec
) -> LayerGraph:
    """A model of this type and configuration, with fresh weights."""
    return from_config(name, configuration(model_type, fields, sample), task, sample)


def configuration(
    model_type: str, fields: Mapping[str, Any], sample: SampleSpec
) -> PretrainedConfig:
    """The configuration of these fields; what they leave open is the data's or the library's.

    Raises ConfigError for a field or value that the library does not take.
    """
    where, prefix, _ = _WHERE[model_type]
    module = importlib.import_module(f"transformers.models.{where}.configuration_{where}")
    text = "Text" if model_type.endswith("_text") else ""
    config_class = getattr(module, f"{prefix}{text}Config")
    known = [*inspect.signature(config_class.__init__).parameters][1:]
    known = sorted({*known, *config_class.attribute_map, *_COMMON})
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(
            [
                Violation(
                    path=f"model.config.{key}",
                    value=fields[key],
                    rule=f"is no field of a {model_type} configuration",
                    legal=", ".join(known),
                )
                for key in unknown
            ]
        )
    asked = {**_from_data(known, sample), **fields}
    try:
        config: PretrainedConfig = config_class(**asked)
    except Exception as error:  # the library has a class of errors of its own a version
        raise _refused(asked, error) from error
    return config


def from_folder(folder: Path, task: Task | None, sample: SampleSpec) -> LayerGraph:
    """The model of a folder, its weights read from the safetensors there by name."""
    from .weights import FolderWeights

    fields = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    where, prefix, _ = _WHERE[fields["model_type"]]
    module = importlib.import_module(f"transformers.models.{where}.configuration_{where}")
    text = "Text" if fields["model_type"].endswith("_text") else ""
    config = getattr(module, f"{prefix}{text}Config").from_dict(fields)
    skeleton = _skeleton(config, task or _task_of(config))
    return _cut(folder.resolve().name, skeleton, sample, FolderWeights(folder, skeleton))


def from_config(
    name: str, config: PretrainedConfig, task: Task | None, sample: SampleSpec
) -> LayerGraph:
    """The model of a transformers configuration, with fresh weights."""
    return _cut(name, _skeleton(config, task or _task_of(config)), sample)


def from_model(name: str, model: PreTrainedModel, sample: SampleSpec) -> LayerGraph:
    """A transformers model; its weights are the initial values, its frozen ones stay frozen."""
    task = _task_of(model.config, type(model).__name__)
    skeleton = _skeleton(model.config, task)
    frozen = {key for key, tensor in model.named_parameters() if not tensor.requires_grad}
    state = model.state_dict()
    return _cut(name, skeleton, sample, state, frozenset(frozen))


def _skeleton(config: PretrainedConfig, task: Task) -> Skeleton:
    where, prefix, _ = _WHERE[config.model_type]
    module = importlib.import_module(f"transformers.models.{where}.modeling_{where}")
    suffix = "LMHeadModel" if config.model_type == "gpt2" else SUFFIXES[task]
    try:
        return Skeleton(getattr(module, f"{prefix}{suffix}"), copy.deepcopy(config), task)
    except (ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise _refused(config.to_diff_dict(), error) from error


def _cut(
    name: str,
    skeleton: Skeleton,
    sample: SampleSpec,
    weights: Weights | None = None,
    frozen: frozenset[str] = frozenset(),
) -> LayerGraph:
    family = importlib.import_module(
        f".family.{_WHERE[skeleton.config.model_type][2]}", __package__
    )
    found = _check_fields(skeleton, family.READS, sample)
    if not found:
        found = [*family.check(skeleton, sample), *_check_data(skeleton, sample)]
    if found:
        raise ConfigError(found)
    parts = family.cut(skeleton, sample)
    fill = skeleton.fill if weights is None else skeleton.copying(weights)
    return assemble(
        name,
        parts,
        sample,
        fill,
        aliases=skeleton.aliases,
        frozen=frozen,
        library=skeleton,
    )


def _task_of(config: PretrainedConfig, class_name: str | None = None) -> Task:
    """The task that the class or the configuration's own architecture names, else the first."""
    if config.model_type not in TASKS:
        rule = "is not a transformers model type that can be cut"
        legal = ", ".join(TASKS)
        raise ConfigError([_violation("model.model_type", config.model_type, rule, legal)])
    named = [class_name] if class_name else config.architectures or ()
    return task_of(TASKS[config.model_type], named)


def _from_data(known: Sequence[str], sample: SampleSpec) -> dict[str, Any]:
    """What the data says about a configuration, where the user does not."""
    fields: dict[str, Any] = {}
    if "pixel_values" in sample.fields:
        channels, height, width = sample.fields["pixel_values"].shape
        fields |= {"num_channels": channels, "num_labels": sample.n_classes}
        fields["image_size"] = height if height == width else (height, width)
    elif "labels" in sample.fields and sample.fields["labels"].shape:
        fields["vocab_size"] = sample.n_classes
    else:
        fields["num_labels"] = sample.n_classes
    return {key: value for key, value in fields.items() if key in (*known, "num_labels")}


def _check_fields(skeleton: Skeleton, reads: Sequence[str], sample: SampleSpec) -> list[Violation]:
    return [
        Violation(
            path="data",
            value=", ".join(sample.fields),
            rule=f"has no field {key!r}, which a {skeleton.config.model_type} model reads",
            legal="data with that field, or another model",
        )
        for key in (*reads, "labels")
        if key not in sample.fields
    ]


def _check_data(skeleton: Skeleton, sample: SampleSpec) -> list[Violation]:
    config = skeleton.config
    found = []
    words = skeleton.task not in ("sequence_classification", "image_classification")
    held = config.vocab_size if words else config.num_labels
    if sample.n_classes > held:
        key = "vocab_size" if words else "num_labels"
        rule = f"is less than the {sample.n_classes} classes of the data"
        found.append(_violation(f"model.config.{key}", held, rule, f">= {sample.n_classes}"))
    if sample.fields["labels"].shape and not words:
        rule = f"has one label a token, and {skeleton.task} scores one a sample"
        found.append(_violation("data", "labels", rule, "one label a sample"))
    if not sample.fields["labels"].shape and words:
        rule = f"has one label a sample, and {skeleton.task} scores one a token"
        found.append(_violation("data", "labels", rule, "one label a token"))
    if skeleton.task == "image_classification":
        shape = tuple(sample.fields["pixel_values"].shape)
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        if shape != (config.num_channels, height, width):
            form = (config.num_channels, height, width)
            rule = f"is not the form of the data's images, {shape}"
            legal = "image_size and num_channels of the data (they are, where unset)"
            found.append(_violation("model.config.image_size", form, rule, legal))
    return found


def _refused(fields: Mapping[str, Any], error: Exception) -> ConfigError:
    rule = f"is refused by transformers: {' '.join(str(error).split())}"
    return ConfigError([_violation("model.config", dict(fields), rule, "a valid configuration")])


def _violation(path: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=path, value=cast("Any", value), rule=rule, legal=legal)
