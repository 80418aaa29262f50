"""A plan in a loop of one's own: ``pr.apply(plan, model, rule=...)``, a batch at a time."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from .. import spec as specs
from ..algo.legal import checked
from ..algo.rule import Rule
from ..algo.rule.kind import RuleKind
from ..cluster import accelerator as accelerators
from ..cluster.detect import detect
from ..data.order import microbatches, share
from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from ..graph.loss import IGNORE_LABEL
from ..plan import store
from ..plan.check import check
from ..plan.ir import Plan, Workload, hash_inputs, stale_inputs
from ..runtime import making, mesh
from ..runtime.driver import Driver, StepResult
from ..runtime.gathering import full_parameters
from ..runtime.mesh import World
from ..runtime.passes import Microbatch, seed_of, set_seed
from ..runtime.place import read_place
from ..runtime.state import State
from ..spec.strict import read
from ..units import count
from .ranks import n_devices

_FILLERS = 2  # samples; batch norm wants more than one value a channel


def apply(
    plan: Plan | str | Path,
    model: LayerGraph | specs.Spec | Mapping[str, Any] | str | Path,
    *,
    rule: Rule | Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    seed: int | None = None,
) -> Trainer:
    """Lay a model out over this job's processes as a plan says; all of them call it together.

    Processes are those of torchrun or Slurm, or of a `torch.distributed` that is initialised
    already; without either there is one. `model` is what `pr.graph` gives, or a spec, from which
    `rule`, `clip_norm` and `seed` are taken where they are not given. A rule is one of
    ``polyreme.algo.rule``, or its table: ``{"kind": "AdamW", "lr": 3e-4}``.

    Raises:
        ConfigError: the plan is for something else, or for another number of processes; there is
            no rule, or none of that kind.
        RunError: the other processes cannot be reached.
    """
    found = plan if isinstance(plan, Plan) else store.load(Path(plan))
    if not isinstance(model, LayerGraph):
        from . import read as read_spec
        from .problem import graph_of

        spec = read_spec(model, trusted=("data",))
        rule = spec.data_parallel.rule if rule is None else rule
        clip_norm = spec.train.clip_norm if clip_norm is None else clip_norm
        seed = spec.train.seed if seed is None else seed
        model = graph_of(spec)
    return Trainer(found, model, _rule(rule), clip_norm=clip_norm, seed=seed or 0)


class Trainer:
    """A model under way: a context manager, whose end leaves the processes' group if it made it."""

    def __init__(
        self, plan: Plan, graph: LayerGraph, rule: Rule, *, clip_norm: float | None, seed: int
    ) -> None:
        self.plan, self.graph = plan, graph
        self.done = 0
        accelerator = accelerators.detect()
        place = read_place()
        n_local, n_ranks = place.n_local, place.n_ranks
        if dist.is_initialized():
            n_ranks = dist.get_world_size()
            n_local = min(n_local, n_ranks) if n_local > 1 else n_ranks
        cluster = detect(accelerator, n_local, n_hosts=max(1, n_ranks // n_local))
        workload = Workload(
            global_batch=plan.global_batch,
            seq_len=plan.seq_len,
            precision=plan.precision,
            optimizer_states=len(rule.vectors),
            optimizer_scalars=rule.n_scalars,
        )
        inputs = hash_inputs(graph, cluster, workload)
        if plan.inputs_hash and "graph" in stale_inputs(plan.inputs_hash, inputs):
            legal = "a plan for this model, and these lengths of samples"
            raise ConfigError([_wrong("plan", None, "was made for another model", legal)])
        # What it was priced for does not matter here: the machines may be others, or the rule.
        bare = msgspec.structs.replace(plan, inputs_hash=inputs, estimate=None, search=None)
        violations = [*_unfilled(plan, n_ranks)] or check(bare, graph, cluster, workload)
        if violations:
            raise ConfigError(violations)
        self._joined = not dist.is_initialized()
        self.world = mesh.open(accelerator) if self._joined else _inside(accelerator)
        self._seed = seed
        self._applied = making.apply(graph, plan, self.world, seed=seed)
        self._driver = Driver(self._applied, self.world, rule, clip_norm=clip_norm)
        self._state = State(self._applied, self._driver.optimizers, self.world)

    def step(self, batch: Mapping[str, torch.Tensor], *, rate_factor: float = 1.0) -> StepResult:
        """One update from a batch: its fields, and labels, by name; the first dimension is samples.

        All processes give the same whole batch, and each takes its part. It may have another number
        of samples than the plan's. `rate_factor` multiplies the rule's learning rate. The result's
        `loss` is the mean over all labels that carry loss; where it, or a gradient, is not
        finite, nothing changes, `loss` is None and `reason` says why.

        Raises:
            ConfigError: a field is missing, or has another number of samples.
        """
        n = self._n_samples(batch)
        applied, places = self._applied, self._applied.places
        cell, grid = places.cell, places.grid
        own = share(share(np.arange(n), cell.replica, grid.replica), cell.shard, grid.shard)
        parts = microbatches(own, self.plan.microbatches)
        rank = places.data_rank + cell.pipe * grid.degrees.data
        set_seed(self.world.device, seed_of(self._seed, self.done, rank))
        labels = batch[self.graph.labels]
        result = self._driver.step(
            {
                number: self._microbatch(batch, part)
                for number, part in enumerate(parts)
                if len(part) or applied.fills
            },
            nominal_weight=float(labels.numel()),
            rate_factor=rate_factor,
        )
        self.done += 1
        return result

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of the whole model on the first process, nothing on others.

        All call it together. Names are those of the module, or of the graph's layers.
        """
        self._applied.buckets.settle()
        return dict(full_parameters(self._state))

    def close(self) -> None:
        """Leave the group, if `apply` joined it; the model is gone then.

        Groups over host memory have threads, which end with the last that holds the group: one
        that lives when the process ends can abort it.
        """
        if not self._joined or self.world.group is None:
            return
        mesh.close(self.world)
        self.world = dataclasses.replace(self.world, group=None)
        del self._applied, self._driver, self._state
        gc.collect()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # after an error it could wait for collectives that never end
            self.close()

    def _n_samples(self, batch: Mapping[str, torch.Tensor]) -> int:
        wanted = [*self.graph.inputs, self.graph.labels]
        legal = ", ".join(wanted)
        missing = [name for name in wanted if name not in batch]
        found = [_wrong(f"batch.{name}", None, "is missing", legal) for name in missing]
        sizes = {name: len(batch[name]) for name in wanted if name in batch}
        n = sizes.get(self.graph.labels, 0)
        found += [
            _wrong(f"batch.{name}", size, f"has {size} samples, and there are {n} labels", str(n))
            for name, size in sizes.items()
            if size != n
        ]
        for name, field in self.graph.inputs.items():
            shape = list(batch[name].shape[1:]) if name in batch else list(field.shape)
            if shape != list(field.shape):
                rule = "is the shape of its samples, and the plan's model takes another"
                found.append(_wrong(f"batch.{name}", shape, rule, str(list(field.shape))))
        if not found and n < 1:
            found = [_wrong(f"batch.{self.graph.labels}", n, "has no samples", "1 or more")]
        if found:
            raise ConfigError(found)
        return n

    def _microbatch(self, batch: Mapping[str, torch.Tensor], part: np.ndarray) -> Microbatch:
        """Rows of a batch on the device; without any, a filler whose labels carry no loss."""
        n = len(part)
        rows = torch.as_tensor(part)
        if not n:
            rows = torch.zeros(_FILLERS, dtype=torch.int64)
        if not self._applied.stage.reads:
            empty = torch.empty(len(rows), 0, dtype=torch.int64)
            return Microbatch(fields={}, labels=empty, n_samples=n, n_rows=len(rows))
        names = [*self.graph.inputs, self.graph.labels]
        fields = {name: batch[name][rows.to(batch[name].device)] for name in dict.fromkeys(names)}
        if not n:
            fields[self.graph.labels] = torch.full_like(fields[self.graph.labels], IGNORE_LABEL)
        moved = {name: field.to(self.world.device) for name, field in fields.items()}
        labels = moved[self.graph.labels]
        return Microbatch(fields=moved, labels=labels, n_samples=n, n_rows=len(rows))


class _Given(msgspec.Struct):
    rule: Rule


def _rule(rule: Rule | Mapping[str, Any] | None) -> Rule:
    if isinstance(rule, RuleKind):
        checked(rule, "rule")
        return rule
    legal = '{"kind": "AdamW", "lr": 3e-4}, or any other of `polyreme list algorithms`'
    if not isinstance(rule, Mapping):
        raise ConfigError([_wrong("rule", type(rule).__name__, "is no rule", legal)])
    given, violations = read({"rule": rule}, _Given)
    if violations:
        raise ConfigError(violations)
    found: Rule = given.rule
    return found


def _unfilled(plan: Plan, n_ranks: int) -> list[Violation]:
    if n_devices(plan) == n_ranks:
        return []
    processes = count(n_ranks, "process", "processes")
    rule = f"is for {count(n_devices(plan), 'device')}, not for {processes}"
    return [_wrong("plan", None, rule, f"a plan for {n_ranks}, or as many processes as devices")]


def _inside(accelerator: accelerators.Accelerator) -> World:
    """This process in a group that the user made."""
    place = read_place()
    device = accelerator.device(place.local_rank)
    accelerator.set(place.local_rank)
    return World(
        rank=dist.get_rank(),
        n_ranks=dist.get_world_size(),
        local_rank=place.local_rank,
        n_local=place.n_local,
        device=device,
        accelerator=accelerator,
        group=dist.group.WORLD if dist.get_world_size() > 1 else None,
    )


def _wrong(path: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=path, value=value, rule=rule, legal=legal)
