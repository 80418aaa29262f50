"""From parts that know how to build themselves to a LayerGraph with its counts.

Each kind of layer is built and played once, on the meta device: that gives output shapes,
parameters and flops, so that a graph of a hundred blocks costs as much as one of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from ..sample import SampleSpec, TensorSpec
from .experts import ExpertPlan
from .flops import counted
from .layer import Layer, LayerGraph
from .tensor import TensorPlan

if TYPE_CHECKING:
    from .skeleton import Skeleton


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer to be: `make` gives its module on meta in float32, a new one at each call.

    `outputs` are names (their shapes are found by playing the part). `names` maps paths of the
    module's children to their paths in the whole model; "" stands for the module itself. Parts
    of one `kind` have the same structure. `tensor` says how the layer is split over tensor parts,
    `experts` which of its parameters are experts', `sliced` that it can be given a slice of tokens
    behind others (see `Prefix`).
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    make: Callable[[], nn.Module]
    names: Mapping[str, str]
    splits: Mapping[str, int] = field(default_factory=dict)
    tensor: TensorPlan | None = None
    experts: ExpertPlan | None = None
    sliced: bool = False


Fill = Callable[[nn.Module, Layer, int], None]
"""Gives every parameter and buffer its value, from torch's global generator (or the seed)."""


def assemble(
    name: str,
    parts: Sequence[Part],
    sample: SampleSpec,
    fill: Fill,
    *,
    aliases: Mapping[str, str] | None = None,
    frozen: frozenset[str] = frozenset(),
    played: Sequence[nn.Module] = (),
    library: Skeleton | None = None,
) -> LayerGraph:
    """The graph of these parts; the last one's first output is the logits.

    `aliases` maps whole-model names of tied parameters to the name that owns them; `frozen`
    names those that are not trained. `played` holds a module with real values for each part:
    these are then played, each by itself, in place of what the parts make.
    """
    read = {tensor for part in parts for tensor in part.inputs if tensor.startswith("batch:")}
    inputs = {key: spec for key, spec in sample.fields.items() if f"batch:{key}" in read}
    like = played[0] if played else None
    values = {f"batch:{key}": example(sample, key, like) for key in inputs}
    kinds: dict[tuple[object, ...], _Played] = {}
    owned: set[str] = set()
    layers = []
    for index, part in enumerate(parts):
        arguments = [values[key] for key in part.inputs]
        key = (part.kind, *(argument.shape for argument in arguments))
        if key not in kinds:
            kinds[key] = _play(played[index] if played else part.make().eval(), arguments)
        kind = kinds[key]
        values.update(zip((f"{part.name}.{out}" for out in part.outputs), kind.out, strict=True))
        layer, owned = _layer(part, kind, aliases or {}, owned)
        layers.append(layer)
    return LayerGraph(
        name=name,
        layers=tuple(layers),
        inputs=inputs,
        output=f"{parts[-1].name}.{parts[-1].outputs[0]}",
        builder=PartsBuilder(parts, layers, fill, frozen),
        library=library,
    )


class PartsBuilder:
    """Builds layers from their parts; the same values from the same seed, layer by layer."""

    def __init__(
        self,
        parts: Sequence[Part],
        layers: Sequence[Layer],
        fill: Fill,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._owner = {
            name: layer
            for layer in layers
            for name in layer.params.values()
            if name not in layer.ties
        }
        self._fill = fill
        self._frozen = frozen

    def build(self, layer: Layer) -> nn.Module:
        """The layer's module on the meta device, in float32."""
        module = self._parts[layer.name].make()
        for local, tensor in module.named_parameters(remove_duplicate=False):
            if layer.params[local] in self._frozen:
                tensor.requires_grad_(False)
        return module

    def initialise(self, layer: Layer, module: nn.Module, seed: int) -> None:
        """Fill the module; tied parameters get the values that their owner gets."""
        with torch.no_grad():
            self._share(layer, module)
            with seeded(f"{seed}/{layer.name}", module):
                self._fill(module, layer, seed)
            for owner_name in {self._owner[tie].name for tie in layer.ties}:
                self._copy_ties(layer, module, owner_name, seed)

    def sliced(self, layer: Layer) -> bool:
        """Whether the layer can be given a slice of tokens behind others."""
        return self._parts[layer.name].sliced

    def tensor_plan(self, layer: Layer) -> TensorPlan | None:
        """How the layer is split over tensor parts; None if it cannot be."""
        return self._parts[layer.name].tensor

    def expert_plan(self, layer: Layer) -> ExpertPlan | None:
        """The layer's experts; None if it has none."""
        return self._parts[layer.name].experts

    def _copy_ties(self, layer: Layer, module: nn.Module, owner_name: str, seed: int) -> None:
        owner = next(found for found in self._owner.values() if found.name == owner_name)
        source = self.build(owner)
        ours = dict(module.named_parameters(remove_duplicate=False))
        some = next(iter(ours.values()))
        source.to(some.dtype).to_empty(device=some.device)
        self.initialise(owner, source, seed)
        theirs = dict(source.named_parameters(remove_duplicate=False))
        by_global = {owner.params[local]: tensor for local, tensor in theirs.items()}
        for local, tensor in ours.items():
            if layer.params[local] in layer.ties and layer.params[local] in by_global:
                tensor.copy_(by_global[layer.params[local]])

    def _share(self, layer: Layer, module: nn.Module) -> None:
        """Let parameters of one whole-model name be one object again (moving parts them)."""
        first: dict[str, nn.Parameter] = {}
        for local, tensor in list(module.named_parameters(remove_duplicate=False)):
            kept = first.setdefault(layer.params[local], tensor)
            if kept is not tensor:
                path, _, leaf = local.rpartition(".")
                setattr(module.get_submodule(path), leaf, kept)


@contextmanager
def seeded(text: str, module: nn.Module) -> Iterator[None]:
    """Torch's generators on the module's device seeded by a text; as they were, afterwards."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    others = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    if not others:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    assert len({device.type for device in others}) == 1, "a layer lies on one kind of device"
    backend = torch.get_device_module(others[0].type)
    with torch.random.fork_rng(devices=others, device_type=others[0].type):
        torch.default_generator.manual_seed(seed)
        for device in others:
            with backend.device(device):
                backend.manual_seed(seed)
        yield


@dataclass(frozen=True)
class _Played:
    out: tuple[torch.Tensor, ...]
    flops: float
    sizes: Mapping[str, int]  # parameters and persistent buffers by local name
    buffers: frozenset[str]
    batch_statistics: bool


def _play(module: nn.Module, arguments: Sequence[torch.Tensor]) -> _Played:
    out, flops = counted(module, arguments)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    sizes = {name: tensor.numel() for name, tensor in module.state_dict().items()}
    normed = any(isinstance(part, BatchNorm) for part in module.modules())
    return _Played(out, flops, sizes, frozenset(buffers), normed)


def _layer(
    part: Part, kind: _Played, aliases: Mapping[str, str], owned: set[str]
) -> tuple[Layer, set[str]]:
    params = {}
    for local in kind.sizes:
        whole = _whole(local, part.names)
        params[local] = aliases.get(whole, whole)
    sizes = {params[local]: size for local, size in kind.sizes.items() if local not in kind.buffers}
    ties = tuple(name for name in sizes if name in owned)
    layer = Layer(
        name=part.name,
        kind=part.kind,
        inputs=part.inputs,
        outputs={
            out: TensorSpec(tuple(value.shape[1:]), _dtype(value))
            for out, value in zip(part.outputs, kind.out, strict=True)
        },
        params=params,
        param_count=sum(size for name, size in sizes.items() if name not in ties),
        flops=kind.flops,
        splits=part.splits,
        ties=ties,
        batch_statistics=kind.batch_statistics,
    )
    return layer, owned | set(sizes)


def _whole(local: str, names: Mapping[str, str]) -> str:
    for prefix in sorted(names, key=len, reverse=True):
        if local == prefix:
            return names[prefix]
        if not prefix or local.startswith(f"{prefix}."):
            rest = local[len(prefix) + 1 :] if prefix else local
            return f"{names[prefix]}.{rest}" if names[prefix] else rest
    raise AssertionError(f"{local} has no name in the whole model")


def example(sample: SampleSpec, field: str, like: nn.Module | None) -> torch.Tensor:
    """One sample's field: on meta, or with values where the parameters of `like` are."""
    spec = sample.fields[field]
    dtype = torch.float32 if spec.dtype == "compute" else getattr(torch, spec.dtype)
    if like is None:
        return torch.empty((1, *spec.shape), dtype=dtype, device="meta")
    tensor = next(like.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        whole = torch.randint(sample.n_classes, (1, *spec.shape), generator=generator)
        return whole.to(tensor.device, dtype)
    return torch.randn((1, *spec.shape), generator=generator).to(tensor.device, tensor.dtype)


def _dtype(value: torch.Tensor) -> str:
    return "compute" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
