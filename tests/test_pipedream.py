"""An order that updates after each microbatch: held to the same updates one after another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyreme.algo.rule import SGD
from polyreme.data.order import Order
from polyreme.runtime import loop
from polyreme.runtime.gathering import full_parameters
from tiny import Case, Model

RULE = SGD(lr=0.05, momentum=0.9, weight_decay=0.01)
N_MICROBATCHES, BATCH, STEPS = 4, 8, 2


def _case(pp, replica=1):
    plan = {"pp": pp, "order": "pipedream", "microbatches": N_MICROBATCHES, "replica": replica}
    return Case(Model(gain=True), plan, steps=STEPS, global_batch=BATCH, rule=RULE)


def _trained(world, case):
    outcome = loop.train(case.job(), world)
    return {n: t.numpy() for n, t in full_parameters(outcome.state)}, outcome.final_loss


def _one_after_another(case, pp, replica):
    """Each microbatch on the weights that its stages had read, then its updates, in one process."""
    job = case.job()
    graph, plan = job.graph, job.plan
    modules = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, module, 0)
        modules[layer.name] = module.double()
    named = {
        f"{name}.{own}": p
        for name, module in modules.items()
        for own, p in module.named_parameters()
    }
    optimizer = RULE.optimizer(list(named.values()))
    order = Order(n_samples=case.n_train, global_batch=BATCH, seed=0, tail="drop")
    stage_of = {name: at for at, stage in enumerate(plan.stages) for name in stage.layers}
    losses = []
    for step in range(STEPS):
        versions = [{n: p.detach().clone() for n, p in named.items()}]
        fields = job.source.train(order.batch(step))
        labels = fields["labels"]
        # The m-th microbatch of the step is that of each replica.
        rows = torch.arange(BATCH).reshape(replica, N_MICROBATCHES, -1).transpose(0, 1).flatten(1)
        parts = [(fields["input_ids"][own], labels[own]) for own in rows]
        total = weight = 0.0
        for m, (x, y) in enumerate(parts):
            for name, parameter in named.items():
                layer = next(each for each in modules if name.startswith(f"{each}."))
                read = max(m + 1 - (pp - stage_of[layer]), 0)
                parameter.data.copy_(versions[read][name])
            for module in modules.values():
                x = module(x)
            loss = nn.functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum")
            optimizer.zero_grad()
            (loss / (labels.numel() / N_MICROBATCHES)).backward()
            total, weight = total + loss.item(), weight + int((y != -100).sum())
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(versions[-1][name])
            optimizer.step()
            versions.append({n: p.detach().clone() for n, p in named.items()})
        losses.append(total / weight)
    return {name: tensor.detach() for name, tensor in named.items()}, losses[-1]


@pytest.mark.parametrize(("pp", "replica"), [(2, 1), (4, 1), (2, 2)])
def test_each_stage_reads_the_version_that_the_order_says(pool, pp, replica):
    case = _case(pp, replica)
    weights, loss = _one_after_another(case, pp, replica)
    found, final = pool(pp * replica).run(_trained, case)[0]
    assert final == pytest.approx(loss, rel=1e-12)
    for name, tensor in weights.items():
        assert torch.allclose(torch.from_numpy(found[name]), tensor, rtol=1e-12, atol=1e-13), name
