"""Activations as plans predict them, beside the tensors that a real forward pass saves.

python benchmarks/activations.py

The forward pass is the runtime's (`runtime/stage.py`) on a processor, in training mode, with real
values. Counted are distinct storages that autograd keeps and that are no parameters or buffers;
where layers are recomputed, what is alive while one of them is: inputs of it and of the layers
before it, and what it saves itself, for the layer at which that is most. Predicted are the
`activations` of a plan in its backward pass, from an assumed profile: for one device, and (plain
passes of one microbatch) for the first of 2 and 4 tensor parts with whole and with split tokens,
whose exchanges bring nothing. The loss is in neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyreme.cluster.parse import parse
from polyreme.graph.layer import LayerGraph
from polyreme.graph.options import MLP, ResNet20, Transformers
from polyreme.measure.silent import Silent
from polyreme.plan.ir import Precision, Workload
from polyreme.planner.cost.memory import Memory
from polyreme.planner.draft import Draft, Strategy
from polyreme.profile.assume import assume
from polyreme.profile.record import Profile
from polyreme.profile.trace import compute_dtype
from polyreme.runtime.apply.data import stays_wide
from polyreme.runtime.apply.tensor import Tp, split
from polyreme.runtime.stage import Body, Chunk, Slot, Stage
from polyreme.sample import SampleSpec, TensorSpec

MICROBATCHES = (1, 2, 5, 8)
PARTS, OF_PARTS = (2, 4), 5  # tensor parts, and the microbatch that they are counted with
TOKENS, CLASSES = 48, 40
_WORDS = SampleSpec(
    fields={
        "input_ids": TensorSpec((TOKENS,), "int64"),
        "labels": TensorSpec((TOKENS,), "int64"),
    },
    n_classes=CLASSES,
)
_PAIRS = SampleSpec(
    fields={**_WORDS.fields, "decoder_input_ids": TensorSpec((TOKENS,), "int64")},
    n_classes=CLASSES,
)
_IMAGES = SampleSpec(
    fields={"pixel_values": TensorSpec((3, 32, 32), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=10,
)
_ROWS = SampleSpec(
    fields={"features": TensorSpec((64,), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=10,
)


def _transformer(model_type: str, **config: Any) -> Transformers:
    return Transformers(model_type=model_type, config=config)


FAMILIES: Mapping[str, tuple[Any, SampleSpec]] = {
    "llama": (
        _transformer(
            "llama",
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        _WORDS,
    ),
    "gpt2": (_transformer("gpt2", n_embd=64, n_layer=4, n_head=4, n_positions=TOKENS), _WORDS),
    "bert": (
        _transformer(
            "bert",
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
        ),
        _WORDS,
    ),
    "t5": (
        _transformer("t5", d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4),
        _PAIRS,
    ),
    "vit": (
        _transformer(
            "vit",
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            patch_size=4,
        ),
        _IMAGES,
    ),
    "swin": (
        _transformer(
            "swin", embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=2
        ),
        _IMAGES,
    ),
    "resnet20": (ResNet20(), _IMAGES),
    "mlp": (MLP(hidden=(128, 128, 64)), _ROWS),
}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes that a forward pass keeps; inputs of all layers; the most alive at a recomputation."""

    plain: int
    handed: int
    recomputed: int


class Heap:
    """Distinct storages that are no parameters, kept so that none is used again."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._own = {
            tensor.untyped_storage().data_ptr()
            for part in parts.values()
            for tensor in (*part.parameters(), *part.buffers())
        }
        self._tensors: dict[int, torch.Tensor] = {}

    def note(self, tensor: torch.Tensor, where: set[int]) -> torch.Tensor:
        """Note the tensor's storage; gives the tensor."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self._own:
            self._tensors[key] = tensor
            where.add(key)
        return tensor

    def size(self, keys: set[int]) -> int:
        """Bytes of these storages."""
        return sum(self._tensors[key].untyped_storage().nbytes() for key in keys)


class Watched(Body):
    """A layer that tells that it is called, and with what."""

    def __init__(self, name: str, module: nn.Module, called: Callable[[str, Any], None]) -> None:
        super().__init__(module, recompute=False)
        self._name, self._called = name, called

    def forward(self, *inputs: Any) -> Any:
        """The layer's outputs."""
        self._called(self._name, inputs)
        return super().forward(*inputs)


def _parts(
    graph: LayerGraph, precision: Precision, tp: int = 1, *, sp: bool = False
) -> dict[str, nn.Module]:
    """Every layer (its first part) on the host with values, in the dtypes of the runtime."""
    dtype = compute_dtype(precision)
    found = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, module, 0)
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                slot = Slot(name=name, layer=layer.name, places=((owner, name),))
                if not stays_wide(slot):
                    parameter.data = parameter.data.to(dtype)
        if tp > 1:
            plan = graph.tensor_plan(layer.name)
            assert plan is not None, layer.name
            split(module, plan, Tp(rank=0, degree=tp, group=None, traffic=Silent(), sp=sp))
        found[layer.name] = module
    return found


def _forward(
    graph: LayerGraph,
    bodies: Mapping[str, Body],
    microbatch: int,
    precision: Precision,
    keep: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """One pass of the runtime's stage over a drawn batch; `keep` sees what autograd saves."""
    chunk = Chunk(layers=tuple(bodies), takes=(), gives=(graph.output,))
    stage = Stage(graph, bodies, compute_dtype(precision), {0: chunk})
    batch = {
        name: torch.randint(0, 2, (microbatch, *spec.shape))
        if "int" in spec.dtype
        else torch.randn(microbatch, *spec.shape)
        for name, spec in graph.inputs.items()
    }
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(batch)


def count(
    graph: LayerGraph, microbatch: int, precision: Precision, tp: int = 1, *, sp: bool = False
) -> Counted:
    """One forward pass (of the first tensor part): who saves what, and who is handed what."""
    parts = _parts(graph, precision, tp, sp=sp)
    heap = Heap(parts)
    saved: dict[str, set[int]] = {name: set() for name in parts}
    handed: dict[str, set[int]] = {name: set() for name in parts}
    current = [""]

    def called(name: str, inputs: Any) -> None:
        current[0] = name
        for value in inputs:
            heap.note(value, handed[name])

    bodies = {name: Watched(name, module, called) for name, module in parts.items()}
    _forward(
        graph, bodies, microbatch, precision, lambda tensor: heap.note(tensor, saved[current[0]])
    )
    before: set[int] = set()
    most = 0
    for name in parts:
        before |= handed[name]
        most = max(most, heap.size(before | saved[name]))
    return Counted(
        plain=heap.size(set().union(*saved.values())), handed=heap.size(before), recomputed=most
    )


def kept_by_checkpoints(graph: LayerGraph, microbatch: int, precision: Precision) -> int:
    """Bytes that a forward pass keeps whose layers are all to be recomputed."""
    parts = _parts(graph, precision)
    heap = Heap(parts)
    kept: set[int] = set()
    bodies = {name: Body(module, recompute=True) for name, module in parts.items()}
    _forward(graph, bodies, microbatch, precision, lambda tensor: heap.note(tensor, kept))
    return heap.size(kept)


def assumed(graph: LayerGraph, precision: Precision, n_devices: int = 1) -> Profile:
    """The profile of processors that plans are made with."""
    return assume(graph, parse(f"preset:{n_devices}xCPU", "cluster"), precision)


def planned(
    graph: LayerGraph, profile: Profile, precision: Precision, strategy: Strategy, microbatch: int
) -> int:
    """A plan's bytes of activations, of a microbatch on the first device, in its backward pass."""
    workload = Workload(global_batch=1, seq_len=1, precision=precision, optimizer_states=2)
    draft = Draft(
        strategies={layer.name: strategy for layer in graph.layers},
        microbatches=1,
        global_batch=microbatch,
        bucket_bytes=0,
        overlap=True,
    )
    return max(Memory(graph, workload, strategy.tp).activations(draft, profile))


def rows(family: str, precision: Precision) -> Iterator[tuple[int, bool, int, int]]:
    """Microbatch, whether layers are recomputed, bytes counted and predicted."""
    options, sample = FAMILIES[family]
    graph = options.graph(sample)
    profile = assumed(graph, precision)
    for microbatch in MICROBATCHES:
        torch.manual_seed(0)
        counted = count(graph, microbatch, precision)
        for recompute in (False, True):
            strategy = Strategy(recompute=recompute)
            predicted = planned(graph, profile, precision, strategy, microbatch)
            yield (
                microbatch,
                recompute,
                counted.recomputed if recompute else counted.plain,
                predicted,
            )


def rows_of_parts(family: str, precision: Precision) -> Iterator[tuple[int, bool, int, int]]:
    """Tensor parts, whether tokens are split, bytes counted and predicted of the first part."""
    options, sample = FAMILIES[family]
    graph = options.graph(sample)
    profile = assumed(graph, precision, max(PARTS))
    for tp in sorted({*PARTS} & {*graph.tensor_degrees(max(PARTS))}):
        for sp in (False, True):
            torch.manual_seed(0)
            counted = count(graph, OF_PARTS, precision, tp, sp=sp).plain
            strategy = Strategy(tp=tp, sp=sp)
            yield tp, sp, counted, planned(graph, profile, precision, strategy, OF_PARTS)


def main() -> None:
    """See above."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("family precision parts tokens_split counted predicted difference")
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            for tp, sp, counted, predicted in rows_of_parts(family, precision):
                print(
                    f"{family} {precision} {tp} {'yes' if sp else 'no'} {counted} {predicted} "
                    f"{predicted / counted - 1:+.2%}",
                    flush=True,
                )
    print("family precision microbatch recompute counted predicted difference")
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            for microbatch, recompute, counted, predicted in rows(family, precision):
                print(
                    f"{family} {precision} {microbatch} {'yes' if recompute else 'no'} "
                    f"{counted} {predicted} {predicted / counted - 1:+.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
