"""Tiny models, data and plans for tests of the runtime, and a plain torch loop to hold them to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from polyreme.algo.attack import Attack
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.train import Train
from polyreme.graph.layer import Layer, LayerGraph
from polyreme.plan.grid import Degrees, even_split
from polyreme.plan.ir import LayerPlan, Plan, Stage, accumulation_order
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import plan_order
from polyreme.plan.play import Costs
from polyreme.runlog import Writer
from polyreme.runtime.job import Job
from polyreme.runtime.saver import Metrics, Saver
from polyreme.runtime.state import State
from polyreme.sample import SampleSpec, TensorSpec

VOCABULARY, HIDDEN, TOKENS = 13, 6, 5
MOMENTUM = SGD(lr=0.2, momentum=0.9, weight_decay=0.01)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, HIDDEN))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight)


class Block(nn.Module):
    """A residual layer; may have a 0-dim gain, a frozen part, a branch that is not always used."""

    def __init__(self, *, gain=False, frozen=False, branch=None) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.gain = nn.Parameter(torch.empty(())) if gain else None
        self.branch_when = branch
        if branch is not None:
            self.branch = nn.Linear(HIDDEN, HIDDEN)
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        if self.gain is not None:
            y = y * self.gain
        if self.branch_when == "positive" and x.sum() > 0:
            y = y + self.branch(x)
        return x + y


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return self.norm(x) @ self.weight.T


class Normed(nn.Module):
    """A layer with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Builder:
    def __init__(self, makers: Mapping[str, Callable[[], nn.Module]]) -> None:
        self._makers = makers

    def build(self, layer):
        with torch.device("meta"):
            return self._makers[layer.name]()

    def initialise(self, layer, module, seed):
        digest = hashlib.sha256(f"{seed} {layer.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if "running_mean" in name or "num_batches" in name:
                    tensor.zero_()
                elif "running_var" in name or name.endswith("norm.weight"):
                    tensor.fill_(1)
                else:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)


@dataclass(frozen=True)
class Model:
    """What a tiny model is made of; sent to the processes in place of the graph."""

    tied: bool = False
    gain: bool = False
    frozen: bool = False
    branch: str | None = None
    batch_norm: bool = False
    n_blocks: int = 2

    def makers(self) -> dict[str, Callable[[], nn.Module]]:
        """What makes each layer, by name."""
        first = Normed if self.batch_norm else lambda: Block(gain=self.gain, frozen=self.frozen)
        blocks = {"block.0": first, "block.1": lambda: Block(branch=self.branch)}
        blocks |= {f"block.{number}": Block for number in range(2, self.n_blocks)}
        return {"embed": Embed, **blocks, "head": Head}

    def graph(self) -> LayerGraph:
        makers = self.makers()
        layers, source = [], "batch:input_ids"
        for name, maker in makers.items():
            with torch.device("meta"):
                module = maker()
            own = [*dict(module.named_parameters()), *dict(module.named_buffers())]
            params = {each: f"{name}.{each}" for each in own}
            tied = self.tied and name == "head"
            if tied:
                params["weight"] = "embed.weight"
            output = "logits" if name == "head" else "hidden"
            count = sum(p.numel() for p in module.parameters())
            layers.append(
                Layer(
                    name=name,
                    kind=name.partition(".")[0],
                    inputs=(source,),
                    outputs={output: TensorSpec((TOKENS, HIDDEN))},
                    params=params,
                    param_count=count - (VOCABULARY * HIDDEN if tied else 0),
                    flops=1.0,
                    ties=("embed.weight",) if tied else (),
                )
            )
            source = f"{name}.{output}"
        return LayerGraph(
            name="tiny",
            layers=tuple(layers),
            inputs={"input_ids": TensorSpec((TOKENS,), "int64")},
            output="head.logits",
            builder=Builder(makers),
        )


class Samples:
    """Random tokens; some labels carry no loss."""

    metric = "heldout_loss"
    fingerprint = "tiny"

    def __init__(self, n_train=40, n_heldout=7, metric="heldout_loss", ignored=0.3) -> None:
        self.metric = metric
        self.n_train, self.n_heldout = n_train, n_heldout
        ids = TensorSpec((TOKENS,), "int64")
        self.sample = SampleSpec(fields={"input_ids": ids, "labels": ids}, n_classes=VOCABULARY)
        generator = torch.Generator().manual_seed(5)
        shape = (n_train + n_heldout, TOKENS)
        self._ids = torch.randint(VOCABULARY, shape, generator=generator)
        self._labels = torch.randint(VOCABULARY, shape, generator=generator)
        self._labels[torch.rand(shape, generator=generator) < ignored] = -100

    def _at(self, indices):
        rows = torch.from_numpy(np.asarray(indices))
        return {"input_ids": self._ids[rows], "labels": self._labels[rows]}

    def train(self, indices, epoch=0):
        return self._at(indices)

    def heldout(self, indices):
        return self._at(indices + self.n_train)

    def labels(self):
        raise NotImplementedError

    def baselines(self):
        return {"bigram_loss": 2.5}


def plan(
    graph: LayerGraph,
    *,
    replica=1,
    shard=1,
    level="none",
    microbatches=1,
    global_batch=6,
    precision="fp64",
    recompute=False,
    bucket_bytes=600,
    overlap=True,
    prefetch=True,
    decouple=False,
    priority=True,
    tp=1,
    sp=False,
    pp=1,
    order="1f1b",
    cuts=None,
) -> Plan:
    """`cuts` are the numbers of layers of the stages (unset: as equal as may be).

    `level` and `recompute` may be given by the layer's name.
    """
    degrees = Degrees(replica=replica, shard=shard, tp=tp)
    n = degrees.n_devices
    names = tuple(layer.name for layer in graph.layers)
    if pp == 1:
        stages = (Stage(layers=names, placements=(tuple(range(n)),)),)
        orders = (accumulation_order(microbatches),)
    else:
        kind = ORDERS[order]
        placed = kind.placements(pp)
        sizes = cuts or [len(part) for part in np.array_split(range(len(names)), len(placed))]
        ends = np.cumsum(sizes)
        assert ends[-1] == len(names)
        stages = tuple(
            Stage(
                layers=names[end - size : end],
                placements=tuple(tuple(range(r * n, r * n + n)) for r in ranks),
            )
            for size, end, ranks in zip(sizes, ends, placed, strict=True)
        )
        orders = plan_order(kind, pp, microbatches, Costs.equal(len(placed)))

    def of(name, value):
        return value.get(name, value[""]) if isinstance(value, Mapping) else value

    layer_plans = {
        name: LayerPlan(
            split=even_split(stage.placements[0], degrees),
            level=of(name, level),
            recompute=of(name, recompute),
            sp=sp,
        )
        for stage in stages
        for name in stage.layers
    }
    return Plan(
        stages=stages,
        layer_plans=layer_plans,
        order=tuple(actions for actions in orders for _ in range(n)),
        microbatches=microbatches,
        global_batch=global_batch,
        seq_len=TOKENS,
        precision=precision,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
        prefetch=prefetch,
        decouple=decouple,
        priority=priority,
    )


@dataclass(frozen=True)
class Case:
    """A run of a few steps."""

    model: Model = Model()
    plan: dict = field(default_factory=dict)
    steps: int = 3
    global_batch: int = 6
    clip_norm: float | None = None
    rule: SGD | AdamW = MOMENTUM
    tail: str = "drop"
    n_train: int = 40
    metric: str = "heldout_loss"
    settings: dict = field(default_factory=dict)
    algorithm: DataParallel | None = None
    general: bool = False
    attack: tuple[Attack, ...] = ()

    def job(self) -> Job:
        graph = self.model.graph()
        settings = {"steps": self.steps, **self.settings}
        return Job(
            graph=graph,
            plan=plan(graph, global_batch=self.global_batch, **self.plan),
            source=Samples(self.n_train, metric=self.metric),
            train=Train(
                global_batch=self.global_batch,
                clip_norm=self.clip_norm,
                tail=self.tail,
                **settings,
            ),
            algorithm=self.algorithm or DataParallel(rule=self.rule),
            folder=None,
            general=self.general,
            attack=self.attack,
        )


def reference(case: Case) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, losses and gradient norms of a plain torch loop in one process."""
    from polyreme.data.order import Order

    dtype = torch.bfloat16 if case.plan.get("precision") == "bf16" else torch.float64
    job = case.job()
    modules, weights = {}, {}
    for layer in job.graph.layers:
        module = job.graph.build(layer.name).to_empty(device="cpu")
        job.graph.initialise(layer.name, module, job.train.seed)
        module.to(dtype)
        for own, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = layer.params[own]
            if name in weights:
                setattr(module, own, weights[name])
            weights.setdefault(name, tensor)
        modules[layer.name] = module
    params = [p for p in weights.values() if isinstance(p, nn.Parameter) and p.requires_grad]
    optimizer = case.rule.optimizer(params)
    order = Order(n_samples=case.n_train, global_batch=case.global_batch, seed=0, tail=case.tail)
    losses, norms = [], []
    for step in range(case.steps):
        batch = job.source.train(order.batch(step))
        x = batch["input_ids"]
        for module in modules.values():
            x = module(x)
        loss = nn.functional.cross_entropy(x.flatten(0, 1).double(), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, case.clip_norm or math.inf)
        optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    return {name: tensor.detach() for name, tensor in weights.items()}, losses, norms


class AtOnce:
    """Calls a function at each save, and waits for it."""

    stage = 0

    def __init__(self, save: Callable[[State], None]) -> None:
        self._save = save
        self._saved: int | None = None

    def begin(self, state: State, metrics: Metrics) -> None:
        self._save(state)
        self._saved = state.progress.step

    def heard(self, stages: Sequence[int]) -> None:
        """Nothing is under way."""

    def finish(self) -> int | None:
        return self._saved


def save(
    state: State, run_folder: Path, *, graph: LayerGraph, keep: int, log: Writer | None = None
) -> None:
    """Write one checkpoint and wait for it; all ranks call it together."""
    saver = Saver(run_folder, graph, state.world, keep=keep, log=log)
    saver.begin(state, {})
    saver.finish()
