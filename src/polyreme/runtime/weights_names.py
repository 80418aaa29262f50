"""What weights a model has, and how the keys of safetensors files stand for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..errors import Violation
from ..graph.layer import LayerGraph
from .checkpoint import EXTRA

_MOST_NAMED = 5
Shape = tuple[int, ...]


def wanted(graph: LayerGraph) -> dict[str, Shape]:
    """Shape of each weight by its name in a checkpoint, in graph order; tied ones once."""
    shapes: dict[str, Shape] = {}
    for layer in graph.layers:
        module = graph.build(layer.name)
        for room, tensors in (
            ("param", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        ):
            for own, tensor in tensors:
                if own in layer.params:
                    shapes.setdefault(f"{room}/{layer.params[own]}", tuple(tensor.shape))
    return shapes


def named(keys: Collection[str], graph: LayerGraph) -> dict[str, str | None]:
    """The checkpoint's name of each key; None where the model has no such weight.

    Tied weights have their owner's name, so several keys may have one. Keys that the model's
    library ignores are ``extra/KEY``.
    """
    by_whole = {name.partition("/")[2]: name for name in wanted(graph)}
    library = graph.library
    if library is None:
        return {key: by_whole.get(key) for key in keys}
    from ..graph.weights import stored_names

    with torch.device("meta"):
        model: Any = library.model_class(library.config)
    whole_of = {key: whole for whole, key in stored_names(keys, model).items()}
    ignored = [
        re.compile(pattern)
        for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    found: dict[str, str | None] = {}
    for key in keys:
        whole = whole_of.get(key, key)
        name = by_whole.get(library.aliases.get(whole, whole))
        if name is None and any(pattern.search(key) for pattern in ignored):
            name = EXTRA + key
        found[key] = name
    return found


def misfits(
    found: Iterable[tuple[str, str | None, Shape]],
    shapes: Mapping[str, Shape],
    *,
    path: str,
    value: str,
) -> list[Violation]:
    """What is missing, unknown or misshapen of tensors given as (key, name, shape)."""
    missing = dict(shapes)
    unknown, misshapen = [], []
    for key, name, shape in found:
        if name is None:
            unknown.append(f"{key} {list(shape)}")
        elif not name.startswith(EXTRA):
            missing.pop(name, None)
            if shape != shapes[name]:
                misshapen.append(f"{key} is {list(shape)} there and {list(shapes[name])} here")
    lacking = [f"{name.partition('/')[2]} {list(shape)}" for name, shape in missing.items()]
    return [
        Violation(path=path, value=value, rule=f"{rule} {some(which)}", legal=legal)
        for rule, which, legal in (
            ("lacks", lacking, "weights of the spec's model, all of them"),
            ("holds what the model has not:", unknown, "the spec's model and nothing else"),
            ("holds other shapes:", misshapen, "weights of the very model that the spec names"),
        )
        if which
    ]


def some(which: list[str]) -> str:
    """The first few in words, and how many there are."""
    rest = len(which) - _MOST_NAMED
    more = f" and {rest} more ({len(which)} in all)" if rest > 0 else ""
    return "; ".join(which[:_MOST_NAMED]) + more
