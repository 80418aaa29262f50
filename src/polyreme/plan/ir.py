"""The plan: how one training step is laid over devices (A = (A_pipe(A_op per stage), L_pipe))."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from ..cluster.types import Cluster
from ..graph.layer import LayerGraph

Level = Literal["none", "optimizer", "grads", "params"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "fp64"]
ActionKind = Literal["F", "B", "I", "W", "U"]
AXES = (  # name, what it splits, whether plans over it can be run
    ("replica", "the batch, between complete copies of the model", True),
    ("shard", "the batch inside a replica and, by level, optimizer, gradients, parameters", True),
    ("tp", "the tensors of a layer", True),
    ("cp", "the tokens of a sample, in attention too", False),
    ("ep", "the experts of a layer", False),
    ("pp", "the layers, into stages", True),
)
BUCKET_BYTES = 25 * 2**20
MEMORY_CAUSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "context",
    "slack",
)
OFFLOADED: Mapping[Offload, frozenset[str]] = {  # what of a layer lies in its host's memory
    "none": frozenset(),
    "optimizer": frozenset({"optimizer"}),
    "parameters": frozenset({"parameters", "gradients", "optimizer"}),
}


class Leaf(msgspec.Struct, frozen=True):
    """One device, by its index in the cluster."""

    device: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Children share a layer along a mesh axis (``replica``, ``shard``, ``tp``, ...) by `weights`.

    Children may differ from one another (uneven, non-Cartesian layouts).
    """

    axis: str
    weights: tuple[int, ...]
    children: tuple[ShardTree, ...]


ShardTree = Leaf | Split


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one layer runs. Degrees are read off `split`: one truth.

    `level` says what the shard axis splits: ``none`` (the batch alone; gradients are
    all-reduced), ``optimizer`` (and optimizer state; one reduce-scatter a step), ``grads`` (and
    gradients; a reduce-scatter each microbatch), ``params`` (and parameters, gathered again in
    each backward pass). `offload` has the causes of memory that lie in hosts' memory between uses,
    one of `OFFLOADED`.
    """

    split: ShardTree
    sp: bool = False
    level: Level = "none"
    recompute: bool = False
    offload: frozenset[str] = frozenset()


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers and the devices that hold them; two placements when bidirectional."""

    layers: tuple[str, ...]
    placements: tuple[tuple[int, ...], ...]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a device does for a stage: F, B, I (input half), W (weight half), U(pdate)."""

    stage: int
    kind: ActionKind
    microbatch: int = 0
    copy: int = 0
    token_slice: int = 0
    weight_version: int = 0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a stage's passes over one microbatch, and of a tensor from stage to stage.

    A backward pass B takes `inputs` + `weights`. `slices` is the share of a pass that each token
    slice takes; without it a pass is one slice's.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    send: float = 0.0
    slices: tuple[float, ...] = ()

    @classmethod
    def equal(
        cls, n_stages: int, *, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0
    ) -> Costs:
        """Of stages that are alike."""
        return cls(
            forward=(forward,) * n_stages,
            inputs=(inputs,) * n_stages,
            weights=(weights,) * n_stages,
        )

    def of(self, action: Action) -> float:
        """Seconds of one action; an update takes none."""
        stage, kind = action.stage, action.kind
        seconds = self.forward[stage] if kind == "F" else 0.0
        if kind in "BI":
            seconds += self.inputs[stage]
        if kind in "BW":
            seconds += self.weights[stage]
        return seconds * self.slices[action.token_slice] if self.slices else seconds


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are alike and run alike, and what one of them takes on the fullest device.

    Seconds are of a step, of the data rank that has most samples: `forward_s`, `backward_s`, and
    `recompute_s` of its passes; `parts_s` of what tensor parts, contexts and those who share out
    experts exchange in these; `data_s` of
    what it exchanges over data axes, as if only its own passes hid it; `update_s`; `moved_s` of
    values brought to it, and of their gradients, where the layer before is laid out otherwise;
    `hosted_s` of its parameters and gradients that come from the host's memory and go back. On the
    device it stores `stored_bytes` (parameters, gradients, optimizer), and keeps `saved_bytes` of
    each microbatch between its passes. `how` is its strategy in words.
    """

    layers: tuple[str, ...]
    how: str
    forward_s: float
    backward_s: float
    recompute_s: float
    parts_s: float
    data_s: float
    update_s: float
    stored_bytes: int
    saved_bytes: int
    moved_s: float = 0.0
    hosted_s: float = 0.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """So many devices of one type, one after another, and the bytes that each of them has."""

    n_devices: int
    device_type: str
    n_bytes: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step and peak bytes by cause for each device of the plan.

    `stages` are the costs that its order is played with (of one stage, the mean over microbatches);
    after the passes comes the update, `update_s`, and what is exchanged unhidden. `capacity` is
    what the plan's devices have, in the order of `memory`; `n_unused` more stay without work. Files
    of before have none of these.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    memory: tuple[Mapping[str, int], ...]
    update_s: float = 0.0
    n_unused: int = 0
    stages: Costs | None = None
    capacity: tuple[Capacity, ...] = ()
    layers: tuple[LayerCost, ...] = ()

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The causes of the fullest device."""
        return max(self.memory, key=lambda causes: sum(causes.values()), default={})

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """Of each device, in the order of `memory`; none where they are unknown."""
        return tuple(each for each in self.capacity for _ in range(each.n_devices))

    @property
    def peak_capacity_bytes(self) -> int | None:
        """What the fullest device has; None where that is unknown."""
        need = [sum(causes.values()) for causes in self.memory]
        have = self.capacities
        return have[need.index(max(need))].n_bytes if need and len(have) == len(need) else None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that lost: its plan in one line and the reason."""

    plan: str
    reason: str


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's seconds and bytes (of the device that is tightest), and whether it fits."""

    step_s: float
    peak_bytes: int
    plan: str
    fits: bool = True


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver did; `proved` when no plan of the space can be better than the bound.

    One that ran `out_of_time` compared only what it had by then. Of the `candidates`, `played` had
    their order played (others were judged by its closed form).
    `front` are those that no other candidate equals in time and memory and betters in one of them,
    the fastest first.
    """

    solver: str
    objective_s: float
    bound_s: float
    proved: bool
    search_s: float
    candidates: int
    rejected: tuple[Rejected, ...] = ()
    unused_devices: tuple[int, ...] = ()
    played: int = 0
    out_of_time: bool = False
    front: tuple[Point, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole step. `order` holds each device's actions, in device order.

    `microbatches` is how many each data rank plays one after another (accumulation when there is
    one stage); `order_name` is what a pipeline's order is called, if it has a name; `token_slices`
    how many tokens each slice of a microbatch has, where actions name slices (unset: as even as
    can be); `bucket_bytes` the size at which gradient buckets close. What is exchanged beside
    computation: `overlap`, buckets are reduced while backward runs; `prefetch`, parameters of a
    layer are gathered while the one before it computes; `decouple`, buckets are scattered while
    backward runs, and gathered while the next step's forward does; `priority`, what that needs
    first is gathered first.
    """

    stages: tuple[Stage, ...]
    layer_plans: Mapping[str, LayerPlan]
    order: tuple[tuple[Action, ...], ...]
    order_name: str = ""
    microbatches: int
    global_batch: int
    seq_len: int
    precision: Precision
    token_slices: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = True
    prefetch: bool = True
    decouple: bool = False
    priority: bool = True
    estimate: Estimate | None = None
    search: Search | None = None
    inputs_hash: str = ""
    assumed: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a step must do whatever the plan: samples, tokens per sample, precision.

    `optimizer_states` is the number of tensors of the master parameters' size and dtype that the
    rule keeps per parameter (AdamW 2, momentum SGD 1), `optimizer_scalars` the number of 4-byte
    scalars that it keeps per parameter tensor (AdamW's step count: 1). `by_entry` says that the
    update of an entry needs no gradient but its own.
    """

    global_batch: int
    seq_len: int
    precision: Precision
    optimizer_states: int
    optimizer_scalars: int = 0
    by_entry: bool = False


def devices(split: ShardTree) -> tuple[int, ...]:
    """Devices of a split from left to right.

    >>> devices(Split(axis="shard", weights=(1, 1), children=(Leaf(5), Leaf(3))))
    (5, 3)
    """
    if isinstance(split, Leaf):
        return (split.device,)
    return tuple(device for child in split.children for device in devices(child))


def degree(split: ShardTree, axis: str) -> int:
    """Into how many parts the axis cuts the layer: the largest product on a path to a leaf.

    >>> degree(Split(axis="tp", weights=(1, 1), children=(Leaf(5), Leaf(3))), "tp")
    2
    """
    if isinstance(split, Leaf):
        return 1
    below = max(degree(child, axis) for child in split.children)
    return below * len(split.children) if split.axis == axis else below


def axes(split: ShardTree) -> tuple[str, ...]:
    """Axes of a split, outermost first, each once."""
    if isinstance(split, Leaf):
        return ()
    below = [axis for child in split.children for axis in axes(child)]
    return tuple(dict.fromkeys((split.axis, *below)))


def accumulation_order(microbatches: int) -> tuple[Action, ...]:
    """One device's actions with one stage: each microbatch forward and backward, then update."""
    passes = [
        Action(stage=0, kind=kind, microbatch=microbatch)
        for microbatch in range(microbatches)
        for kind in ("F", "B")
    ]
    return (*passes, Action(stage=0, kind="U"))


def hash_inputs(graph: LayerGraph, cluster: Cluster, workload: Workload) -> str:
    """What a plan was made for, one hash an input: ``graph:.. cluster:.. workload:..``.

    Of the cluster only what a plan depends on counts: hosts, their device types and memory.
    """
    hardware = [
        (host.n_devices, host.device_type, cluster.device_types[host.device_type].memory_bytes)
        for host in cluster.hosts
    ]
    parts = {"graph": graph.fingerprint, "cluster": _hash(hardware), "workload": _hash(workload)}
    return " ".join(f"{name}:{value}" for name, value in parts.items())


def stale_inputs(made_for: str, found: str) -> tuple[str, ...]:
    """Names of the inputs whose hashes differ between two results of `hash_inputs`."""
    was = dict(part.partition(":")[::2] for part in made_for.split())
    now = dict(part.partition(":")[::2] for part in found.split())
    return tuple(name for name in now if was.get(name) != now[name])


def _hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
