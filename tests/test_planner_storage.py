"""Predicted storage against what processes hold, to the byte."""

from __future__ import annotations

import pytest

from planner_toy import TOKENS, WORDS, toy
from polyreme.algo.rule import SGD, AdamW, Rule
from polyreme.plan.ir import Level, Plan, Precision, Workload
from polyreme.planner.cost.memory import storage
from polyreme.planner.draft import Draft, Strategy
from polyreme.planner.space import write_plan

RULES = {"adamw": AdamW(), "momentum": SGD(momentum=0.9)}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp64")


def _workload(precision: Precision, rule: Rule) -> Workload:
    return Workload(
        global_batch=24,
        seq_len=TOKENS,
        precision=precision,
        optimizer_states=rule.n_states,
        optimizer_scalars=rule.n_scalars,
    )


def _plan(replica: int, shard: int, level: Level, precision: Precision, rule: Rule) -> Plan:
    strategy = Strategy(replica=replica, shard=shard, level=level)
    draft = Draft(
        strategies={layer.name: strategy for layer in toy().layers},
        microbatches=2,
        global_batch=24,
        bucket_bytes=100,
        overlap=True,
    )
    return write_plan(draft, _workload(precision, rule))


def measure(world, cases) -> list[tuple[int, int, int]]:
    """(parameters, gradients, optimizer) storage of this process after a step's backward passes."""
    import torch
    from torch.distributed.tensor import DTensor

    from polyreme.runtime.driver import Driver
    from polyreme.runtime.making import apply
    from polyreme.runtime.passes import Microbatch

    def stored(tensors) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
        storages = [tensor.untyped_storage() for tensor in local]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    torch.set_num_threads(1)
    found = []
    for plan, rule in cases:
        applied = apply(toy(), plan, world)
        driver = Driver(applied, world, rule)
        tokens = torch.arange(2 * TOKENS).view(2, TOKENS) % WORDS
        fields = {"input_ids": tokens}
        microbatch = Microbatch(fields=fields, labels=tokens, n_samples=2, n_rows=2)
        driver.executor(dict.fromkeys(range(plan.microbatches), microbatch), 1.0)
        parameters = [*applied.masters.values(), *(slot.tensor for slot in applied.parameters)]
        gradients = [*applied.buckets.grads, *(p.master.grad for p in applied.trainable)]
        for optimizer in driver.optimizers:
            optimizer.step()
        states = [
            value
            for optimizer in driver.optimizers
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        found.append((stored(parameters), stored(gradients), stored(states)))
    return found


@pytest.mark.parametrize(
    ("replica", "shard", "levels"),
    [
        (1, 1, ("none",)),
        (1, 2, ("none", "optimizer", "grads", "params")),
        (1, 3, ("params",)),
        (2, 2, ("optimizer", "grads")),
    ],
)
@pytest.mark.slice("1-3-levels2")
def test_storage_is_predicted_to_the_byte(pool, replica, shard, levels):
    cases = [
        (level, precision, name) for level in levels for precision in PRECISIONS for name in RULES
    ]
    plans = [
        (_plan(replica, shard, level, precision, RULES[name]), RULES[name])
        for level, precision, name in cases
    ]
    graph = toy()
    for rank, measured in enumerate(pool(replica * shard).run(measure, plans)):
        for case, (plan, rule), found in zip(cases, plans, measured, strict=True):
            held = storage(graph, plan.layer_plans, _workload(plan.precision, rule), rank)
            predicted = (held.parameters, held.gradients, held.optimizer)
            assert found == predicted, (rank, *case)
