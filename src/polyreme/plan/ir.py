"""The plan: how one training step is laid over devices (A = (A_pipe(A_op per stage), L_pipe))."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Level = Literal["none", "optimizer", "grads", "params"]
Precision = Literal["fp32", "bf16", "fp64"]
ActionKind = Literal["F", "B", "I", "W", "U"]
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
    each backward pass).
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


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step and peak bytes by cause for each device of the plan."""

    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    memory: tuple[Mapping[str, int], ...]

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The causes of the fullest device."""
        return max(self.memory, key=lambda causes: sum(causes.values()))


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that lost: its plan in one line and the reason."""

    plan: str
    reason: str


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver did; `proved` when no plan of the space can be better than the bound."""

    solver: str
    objective_s: float
    bound_s: float
    proved: bool
    search_s: float
    candidates: int
    rejected: tuple[Rejected, ...] = ()
    unused_devices: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole step. `order` holds each device's actions, in device order.

    `microbatches` is how many each data rank plays one after another (accumulation when there is
    one stage); `bucket_bytes` the size at which gradient buckets close; `overlap` whether they
    are reduced while backward runs.
    """

    stages: tuple[Stage, ...]
    layer_plans: Mapping[str, LayerPlan]
    order: tuple[tuple[Action, ...], ...]
    microbatches: int
    global_batch: int
    seq_len: int
    precision: Precision
    bucket_bytes: int = 25 * 2**20
    overlap: bool = True
    estimate: Estimate | None = None
    search: Search | None = None
    inputs_hash: str = ""
    assumed: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a step must do whatever the plan: samples, tokens per sample, precision.

    `optimizer_states` is the number of float32 tensors that the rule keeps per parameter
    (AdamW 2, momentum SGD 1).
    """

    global_batch: int
    seq_len: int
    precision: Precision
    optimizer_states: int
