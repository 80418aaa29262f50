"""Training over processes gives what one process gives, for every level and oddity of a model."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo.rule import AdamW
from polyreme.runtime import loop
from polyreme.runtime.gathering import full_parameters
from tiny import Case, Model, reference

LAYOUTS = [
    {},
    {"replica": 2},
    {"replica": 3},
    {"shard": 2, "level": "none"},
    *({"shard": n, "level": level} for n in (2, 3) for level in ("optimizer", "grads", "params")),
]
HYBRID = [
    {"replica": 2, "shard": 2, "level": level} for level in ("none", "optimizer", "grads", "params")
]


class Record:
    """Keeps events in place of a log file."""

    attempt = 0
    t = 0.0

    def __init__(self):
        self.events = []

    def write(self, event):
        self.events.append(event)


def _train(world, case):
    record = Record()
    outcome = loop.train(case.job(), world, log=record)
    weights = {name: tensor.numpy() for name, tensor in full_parameters(outcome.state)}
    steps = [event for event in record.events if hasattr(event, "loss")]
    return weights, steps, outcome.metrics, outcome.skipped


def _ranks(layout):
    return layout.get("replica", 1) * layout.get("shard", 1)


def _assert_equal(pool, case, rtol=1e-9):
    weights, losses, norms = reference(case)
    results = pool(_ranks(case.plan)).run(_train, case)
    found, steps, _, skipped = results[0]
    assert skipped == 0
    assert [step.loss for step in steps] == pytest.approx(losses, rel=rtol)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=rtol)
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        ours = torch.from_numpy(found[name])
        assert torch.allclose(ours, tensor.to(ours.dtype), rtol=rtol, atol=rtol), name
    return found


@pytest.mark.parametrize("layout", [*LAYOUTS, *HYBRID], ids=str)
def test_every_layout_equals_one_process(pool, layout):
    model = Model(tied=True, gain=True, frozen=True)
    plan = layout | {"microbatches": 2, "recompute": True}
    _assert_equal(pool, Case(model=model, plan=plan, clip_norm=0.5, rule=AdamW(lr=0.1)))


@pytest.mark.parametrize("layout", LAYOUTS[1:3] + LAYOUTS[4:7], ids=str)
@pytest.mark.parametrize("global_batch", [1, 7])
def test_uneven_and_empty_shares_of_a_batch(pool, layout, global_batch):
    plan = layout | {"microbatches": 3}
    _assert_equal(pool, Case(plan=plan, global_batch=global_batch))
