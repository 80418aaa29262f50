"""A user's own module, or a transformers model or configuration, as a LayerGraph."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from ..errors import ConfigError, Violation
from ..sample import SampleSpec
from .flops import counted
from .layer import Layer, LayerGraph
from .parts import Part, assemble, example, seeded

if TYPE_CHECKING:
    from .options import Python

Make = Callable[[int], nn.Module]


def from_module(
    module: Any,
    sample: SampleSpec,
    *,
    before: Sequence[str] = (),
    blocks: str | None = None,
    after: Sequence[str] = (),
) -> LayerGraph:
    """A module as layers that follow one another; its values are the initial ones.

    An `nn.Sequential` becomes one layer a child. Otherwise the parts named in `before`, the
    members of `blocks` (the name of an `nn.ModuleList`) and those in `after` do; without names
    the module is one layer. A transformers model keeps its weights, a transformers configuration
    gets fresh ones. Raises ConfigError if the parts in order do not give what the module gives.
    """
    if "transformers" in sys.modules:
        from transformers import PretrainedConfig, PreTrainedModel

        if isinstance(module, PretrainedConfig | PreTrainedModel):
            from .huggingface import from_config, from_model

            name = type(module).__name__
            if isinstance(module, PretrainedConfig):
                return from_config(name, module, None, sample)
            return from_model(name, module, sample)
    return _chain(lambda _seed: module, sample, _Names(tuple(before), blocks, tuple(after)))


def from_factory(options: Python, sample: SampleSpec) -> LayerGraph:
    """What the user's function returns; drawn anew from the seed in every process."""
    make = functools.lru_cache(maxsize=1)(functools.partial(call_factory, options))
    made = make(0)
    if isinstance(made, LayerGraph):
        return made
    if not isinstance(made, nn.Module):
        rule = f"returned a {type(made).__name__}"
        raise _refused("model.factory", options.factory, rule, "an nn.Module or a LayerGraph")
    if not any(param.requires_grad for param in made.parameters()):
        n = sum(1 for _ in made.parameters())
        rule = f"returned a module that trains nothing (of {n} parameters)"
        legal = "one with a parameter whose requires_grad is true"
        raise _refused("model.factory", options.factory, rule, legal)
    names = _Names(options.before, options.blocks, options.after)
    return _chain(make, sample, names)


@dataclass(frozen=True)
class _Names:
    before: tuple[str, ...]
    blocks: str | None
    after: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """One layer of the user's module. `unused` are whole-model names that no layer reads."""

    name: str
    path: str
    module: nn.Module
    unused: tuple[str, ...] = ()


class WithUnused(nn.Module):
    """The first layer beside tensors of the model that no layer reads: kept, saved, not trained."""

    def __init__(self, part: nn.Module, unused: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        for index, tensor in enumerate(unused.values()):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"unused{index}", tensor)
            else:
                self.register_buffer(f"unused{index}", tensor)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The part's output."""
        return self.part(*inputs)


def call_factory(options: Python, seed: int) -> Any:
    """What the user's function returns, its random numbers drawn from the seed."""
    file, _, function = options.factory.rpartition(":")
    name = f"polyreme_model_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and pickles look their module up there
    try:
        with seeded(f"{seed}/factory", nn.Module()):
            spec.loader.exec_module(loaded)
            return getattr(loaded, function)(**options.arguments)
    except Exception as error:
        rule = f"raised {type(error).__name__}: {error}"
        raise _refused("model.factory", options.factory, rule, "a working function") from error


def _chain(make: Make, sample: SampleSpec, names: _Names) -> LayerGraph:
    module = make(0)
    if any(tensor.is_meta for _, tensor in _tensors(module)):
        rule = "lies on the meta device and has no values"
        raise _refused("model", type(module).__name__, rule, "a module on a real device")
    pieces = _pieces(module, names)
    fields = [f"batch:{key}" for key in sample.fields if key != "labels"]
    parts: list[Part] = []
    for index, piece in enumerate(pieces):
        where = {"part": piece.path} if piece.unused else {"": piece.path}
        where |= {f"unused{number}": name for number, name in enumerate(piece.unused)}
        parts.append(
            Part(
                name=piece.name,
                kind=piece.name,
                inputs=(f"{parts[-1].name}.out",) if parts else tuple(fields),
                outputs=("out",),
                make=functools.partial(_on_meta, make, names, index),
                names=where,
            )
        )

    def fill(target: nn.Module, layer: Layer, seed: int) -> None:
        source = _real(_pieces(make(seed), names)[_index(parts, layer.name)], make(seed))
        theirs = dict(_tensors(source))
        for local, tensor in _tensors(target):
            tensor.copy_(theirs[local])

    aliases = _aliases(module)
    with _evaluating(module):
        _check(module, pieces, sample)
        graph = assemble(
            type(module).__name__,
            parts,
            sample,
            fill,
            aliases=aliases,
            played=[_real(piece, module) for piece in pieces],
        )
    return graph.with_kinds(_kinds(graph, pieces))


def _index(parts: Sequence[Part], name: str) -> int:
    return next(index for index, part in enumerate(parts) if part.name == name)


def _pieces(module: nn.Module, names: _Names) -> list[_Piece]:
    found: list[tuple[str, nn.Module]] = []
    wanted = (*names.before, *([names.blocks] if names.blocks else []), *names.after)
    if not wanted and isinstance(module, nn.Sequential):
        found = list(zip(module._modules, module, strict=True))
    elif not wanted:
        return [_Piece("model", "", module)]
    for path in wanted:
        try:
            part = module.get_submodule(path)
        except AttributeError:
            legal = ", ".join(name for name, _ in module.named_children()) or "a module with parts"
            raise _refused("model.blocks", path, "is no part of the module", legal) from None
        if path != names.blocks:
            found.append((path, part))
        elif isinstance(part, nn.ModuleList | nn.Sequential):
            found += [(f"{path}.{index}", block) for index, block in enumerate(part)]
        else:
            rule = f"is a {type(part).__name__}"
            raise _refused("model.blocks", path, rule, "an nn.ModuleList or nn.Sequential")
    if not found:
        raise _refused("model", type(module).__name__, "has no parts", "at least one layer")
    inside = tuple(f"{path}." for path, _ in found)
    unused = tuple(name for name, _ in _tensors(module) if not name.startswith(inside))
    (path, first), *rest = found
    return [_Piece(path, path, first, unused), *(_Piece(p, p, part) for p, part in rest)]


def _real(piece: _Piece, module: nn.Module) -> nn.Module:
    """The piece's module with the model's own tensors."""
    if not piece.unused:
        return piece.module
    tensors = dict(_tensors(module))
    return WithUnused(piece.module, {name: tensors[name] for name in piece.unused})


def _on_meta(make: Make, names: _Names, index: int) -> nn.Module:
    """A copy on meta, in float32; shared parameters stay shared, frozen ones frozen."""
    module = make(0)
    real = _real(_pieces(module, names)[index], module)
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(real.parameters(), real.buffers()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(real, memo)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _aliases(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in _tensors(module):
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def _kinds(graph: LayerGraph, pieces: Sequence[_Piece]) -> dict[str, str]:
    """Layers of one class, form and cost share a kind, named after the class."""
    seen: dict[tuple[object, ...], str] = {}
    n_of: dict[str, int] = {}
    kinds = {}
    for layer, piece in zip(graph.layers, pieces, strict=True):
        shapes = tuple(
            (name, tuple(tensor.shape), tensor.requires_grad)
            for name, tensor in _tensors(piece.module)
        )
        word = type(piece.module).__name__
        outputs = msgspec.json.encode(layer.outputs)
        key = (word, repr(piece.module), shapes, piece.unused, layer.flops, outputs, layer.ties)
        if key not in seen:
            n_of[word] = n_of.get(word, 0) + 1
            seen[key] = word if n_of[word] == 1 else f"{word}.{n_of[word]}"
        kinds[layer.name] = seen[key]
    return kinds


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, and as it was afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def _check(module: nn.Module, pieces: Sequence[_Piece], sample: SampleSpec) -> None:
    """The parts one after another must run, and give what the module gives."""
    inputs = [example(sample, key, module) for key in sample.fields if key != "labels"]
    value = inputs
    for piece in pieces:
        value = [_output(piece.name, piece.module, value)]
    labels = tuple(sample.fields["labels"].shape)
    if tuple(value[0].shape[1:-1]) != labels:
        rule = f"gives {list(value[0].shape[1:])} a sample, and labels are {list(labels)}"
        legal = f"logits of form {[*labels, sample.n_classes]}"
        raise _refused("model", type(module).__name__, rule, legal)
    if not pieces[0].path:
        return
    whole = _output("forward", module, inputs)
    same = whole.shape == value[0].shape
    if not same or not torch.allclose(whole, value[0], rtol=1e-4, atol=1e-5, equal_nan=True):
        order = ", ".join(piece.name for piece in pieces)
        rule = f"does not give what its parts give one after another ({order})"
        legal = "parts in the order in which forward() calls them, and nothing between them"
        raise _refused("model", type(module).__name__, rule, legal)


def _output(name: str, module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    try:
        out, _ = counted(module, inputs)
    except Exception as error:
        forms = ", ".join(str(list(value.shape)) for value in inputs)
        rule = f"raised {type(error).__name__} on inputs {forms}: {error}"
        raise _refused("model", name, rule, "a module that takes the data") from error
    if len(out) != 1 or not isinstance(out[0], torch.Tensor):
        rule = f"returns {', '.join(type(value).__name__ for value in out) or 'nothing'}"
        raise _refused("model", name, rule, "one tensor")
    return out[0]


def _refused(path: str, value: Any, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])
