"""`[model]` of a spec: which model is trained. Reads and checks without torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from ..errors import ConfigError, Violation, literal, nearest_first
from ..nearby import nearby
from .factor_options import PCA as PCA
from .factor_options import MatrixFactorization as MatrixFactorization
from .linear_options import Linear as Linear
from .model_kind import ModelKind
from .presets import PRESETS
from .reads import Reads, of_configuration, task_of
from .reads import Task as Task

if TYPE_CHECKING:
    from ..sample import SampleSpec
    from .layer import LayerGraph

TASKS: Mapping[str, tuple[Task, ...]] = {
    "llama": ("causal_lm",),
    "qwen2": ("causal_lm",),
    "qwen3": ("causal_lm",),
    "mistral": ("causal_lm",),
    "mixtral": ("causal_lm",),
    "gpt2": ("causal_lm",),
    "gemma": ("causal_lm",),
    "gemma2": ("causal_lm",),
    "gemma3_text": ("causal_lm",),
    "phi": ("causal_lm",),
    "phi3": ("causal_lm",),
    "bert": ("masked_lm", "sequence_classification"),
    "t5": ("seq2seq_lm",),
    "vit": ("image_classification",),
    "swin": ("image_classification",),
}

_FOLDER = '"models/mine" (any folder that holds config.json and *.safetensors)'
_FACTORY = '"model.py:make" (any FILE.py:FUNCTION that is there)'
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Preset(ModelKind, frozen=True, kw_only=True, tag="preset"):
    """A known configuration (``polyreme list presets``); its weights are drawn anew.

    Attributes:
        preset: Name of the configuration.
        config: Fields of the configuration that differ, by transformers' names.
    """

    preset: Annotated[str, msgspec.Meta(examples=["llama-7b"])]
    config: Mapping[str, Any] = {}

    imports: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils",)

    def check(self) -> list[Violation]:
        """The preset must exist."""
        if self.preset in PRESETS:
            return []
        legal = _listed(self.preset, PRESETS)
        return [_violation("model.preset", self.preset, "is not a preset", legal)]

    @property
    def reads(self) -> Reads:
        """What the configuration asks for."""
        preset = PRESETS.get(self.preset)
        if preset is None:
            return Reads()
        task = preset.task or TASKS[preset.model_type][0]
        return of_configuration(preset.model_type, task, {**preset.config, **self.config})

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """The preset's layers."""
        from .huggingface import from_fields

        _raise_if(self.check())
        preset = PRESETS[self.preset]
        fields = {**preset.config, **self.config}
        return from_fields(self.preset, preset.model_type, fields, preset.task, sample)


class Folder(ModelKind, frozen=True, kw_only=True, tag="path"):
    """A folder with config.json and safetensors, as transformers saves one; its weights are used.

    Attributes:
        path: The folder.
        task: What the model is trained to do; unless given, what config.json names.
    """

    path: Annotated[str, msgspec.Meta(examples=["models/mine"])]
    task: Task | None = None

    imports: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils",)

    def check(self) -> list[Violation]:
        """The folder must hold a config.json of a known type, and weights."""
        config = Path(self.path) / "config.json"
        if not config.is_file():
            rule = f"has no config.json (looked for {config.absolute()})"
            there = nearby(self.path, lambda each: (each / "config.json").is_file())
            legal = ", ".join((*map(literal, there), _FOLDER))
            return [_violation("model.path", self.path, rule, legal)]
        try:
            fields = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            rule = f"has a config.json that is not JSON ({error})"
            return [_violation("model.path", self.path, rule, _FOLDER)]
        model_type = str(fields.get("model_type"))
        if model_type in TASKS:
            found = _check_type("model.model_type", model_type, self.task)
        else:
            rule = f"holds a model of type {literal(model_type)}, which cannot be cut"
            legal = f"{_FOLDER}, of type {_listed(model_type, TASKS)}"
            found = [_violation("model.path", self.path, rule, legal)]
        if not any(Path(self.path).glob("*.safetensors")):
            rule = "has no safetensors"
            legal = f'{_FOLDER}; or kind = "transformers" without path, to draw weights anew'
            found.append(_violation("model.path", self.path, rule, legal))
        return found

    @property
    def reads(self) -> Reads:
        """What config.json asks for."""
        try:
            content = (Path(self.path) / "config.json").read_bytes()
            fields = msgspec.json.decode(content, type=dict[str, Any])
        except (OSError, ValueError):
            return Reads()
        model_type = str(fields.get("model_type"))
        tasks = TASKS.get(model_type, ())
        if not tasks or self.task not in (None, *tasks):
            return Reads()
        named = fields.get("architectures")
        names = named if isinstance(named, list) else []
        task = self.task or task_of(tasks, [name for name in names if isinstance(name, str)])
        return of_configuration(model_type, task, fields)

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """The folder's layers; their weights are the folder's."""
        from .huggingface import from_folder

        _raise_if(self.check())
        return from_folder(Path(self.path), self.task, sample)


class Transformers(ModelKind, frozen=True, kw_only=True, tag="transformers"):
    """A transformers model by type and configuration fields; its weights are drawn anew.

    Attributes:
        model_type: Family of the model: llama, qwen2, qwen3, mistral, mixtral, gpt2, gemma,
            gemma2, gemma3_text, phi, phi3, bert, t5, vit or swin.
        config: Fields of the configuration, by transformers' names. Where unset, vocab_size,
            num_labels, image_size and num_channels are the data's, all others the library's.
        task: What the model is trained to do; unless given, the first that the family has
            (bert: masked_lm).
    """

    model_type: Annotated[str, msgspec.Meta(examples=["llama"])]
    config: Mapping[str, Any] = {}
    task: Task | None = None

    imports: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils",)

    def check(self) -> list[Violation]:
        """The type must be known and have the task."""
        return _check_type("model.model_type", self.model_type, self.task)

    @property
    def reads(self) -> Reads:
        """What the configuration asks for."""
        tasks = TASKS.get(self.model_type, ())
        task = self.task or next(iter(tasks), None)
        return of_configuration(self.model_type, task, self.config) if task in tasks else Reads()

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """The model's layers."""
        from .huggingface import from_fields

        _raise_if(self.check())
        return from_fields(self.model_type, self.model_type, self.config, self.task, sample)


class ResNet20(ModelKind, frozen=True, kw_only=True, tag="resnet20"):
    """Residual network of 3 stages for small images. Source: He et al. 2016, section 4.2.

    Attributes:
        width: Channels of the first stage; each later stage has twice as many.
        blocks: Residual blocks of each stage; the depth is 6 blocks + 2.
        norm: Batch normalisation as in the paper, or group normalisation (of up to 8 groups).
    """

    width: _Count = 16
    blocks: _Count = 3
    norm: Literal["batch", "group"] = "batch"

    @property
    def reads(self) -> Reads:
        """Images of any size."""
        return Reads(forms=("images",))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """Stem, blocks and head."""
        from .vision import resnet

        return resnet(self, sample)


class CharLSTM(ModelKind, frozen=True, kw_only=True, tag="char_lstm"):
    """Embedding, stacked LSTM layers, linear head over the vocabulary.

    Attributes:
        embed: Width of the embedding.
        hidden: Width of each LSTM layer.
        layers: Number of LSTM layers.
        dropout: Share of activations dropped between LSTM layers.
    """

    embed: _Count = 8
    hidden: _Count = 256
    layers: _Count = 2
    dropout: _Share = 0.0

    @property
    def reads(self) -> Reads:
        """Text of any vocabulary."""
        return Reads(forms=("text",), objectives=("next",))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """Embedding, one layer an LSTM layer, head."""
        from .text import char_lstm

        return char_lstm(self, sample)


class MLP(ModelKind, frozen=True, kw_only=True, tag="mlp"):
    """Linear layers with ReLU between, on features or flattened images.

    Attributes:
        hidden: Width of each hidden layer; none (``[]``) makes it a linear model.
        bias: Whether the layers have a bias.
    """

    hidden: tuple[_Count, ...] = (128,)
    bias: bool = True

    @property
    def reads(self) -> Reads:
        """Vectors, which images are flattened to."""
        return Reads(forms=("features", "images"))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """One layer a linear map."""
        from .vision import mlp

        return mlp(self, sample)


class Python(ModelKind, frozen=True, kw_only=True, tag="python"):
    """A module of the user, made by a function of theirs.

    The function returns an ``nn.Sequential``, or a module whose parts follow one another; the
    keys name the parts. Without names, a module is one layer. A ``LayerGraph`` is taken as it is.

    Attributes:
        factory: The function that makes the module, as ``file.py:function``.
        arguments: What the function is called with, by name.
        before: Parts that come before the blocks, in their order.
        blocks: Name of the ``nn.ModuleList`` (or Sequential) of blocks.
        after: Parts that come after the blocks, in their order.
    """

    factory: Annotated[str, msgspec.Meta(examples=["model.py:make"])]
    arguments: Mapping[str, Any] = {}
    before: tuple[str, ...] = ()
    blocks: str | None = None
    after: tuple[str, ...] = ()

    def check(self) -> list[Violation]:
        """The file must exist, be Python and define the function."""
        file, _, function = self.factory.rpartition(":")
        path = Path(file)
        if not file or not function.isidentifier():
            legal = _factories(file or self.factory, function)
            return [_violation("model.factory", self.factory, "names no function", legal)]
        if not path.is_file():
            rule = f"names a file that is not there (looked for {path.absolute()})"
            return [_violation("model.factory", self.factory, rule, _factories(file, function))]
        try:
            defined = _defined(path)
        except (SyntaxError, ValueError) as error:
            rule = f"names a file that is not Python ({error})"
            return [_violation("model.factory", self.factory, rule, _factories(file, function))]
        if function in defined:
            return []
        legal = ", ".join(literal(f"{file}:{name}") for name in nearest_first(function, defined))
        rule = "names a function that the file does not define"
        return [_violation("model.factory", self.factory, rule, legal or _FACTORY)]

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """The user's layers."""
        from .module import from_factory

        _raise_if(self.check())
        return from_factory(self, sample)


Model = (
    Preset
    | Folder
    | Transformers
    | ResNet20
    | CharLSTM
    | MLP
    | Linear
    | MatrixFactorization
    | PCA
    | Python
)


def _violation(path: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=path, value=value, rule=rule, legal=legal)


def _check_type(path: str, model_type: str, task: Task | None) -> list[Violation]:
    if model_type not in TASKS:
        rule = "is not a transformers model type that can be cut"
        return [_violation(path, model_type, rule, _listed(model_type, TASKS))]
    if task is not None and task not in TASKS[model_type]:
        rule = f"is not a task of {model_type}"
        return [_violation("model.task", task, rule, _listed(task, TASKS[model_type]))]
    return []


def _defined(path: Path) -> list[str]:
    """Names of a file's functions and classes. Raises SyntaxError or ValueError: no Python."""
    tree = ast.parse(path.read_bytes())
    return sorted(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )


def _factories(file: str, function: str) -> str:
    """Functions of Python files that are like this one, as legal values."""
    found = []
    for path in nearby(file, lambda each: each.suffix == ".py"):
        try:
            found += [
                literal(f"{path}:{name}") for name in nearest_first(function, _defined(Path(path)))
            ]
        except (OSError, SyntaxError, ValueError):
            continue
    return ", ".join((*found[:3], _FACTORY))


def _listed(name: str, names: Iterable[str]) -> str:
    return ", ".join(map(literal, nearest_first(name, list(names))))


def _raise_if(violations: list[Violation]) -> None:
    if violations:
        raise ConfigError(violations)
