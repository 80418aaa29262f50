"""Steps that go wrong on one rank, weights that differ between ranks, branches not taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.train import Train
from polyreme.errors import RunError
from polyreme.graph.layer import Layer, LayerGraph
from polyreme.runtime import loop
from polyreme.runtime.driver import Driver
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.making import apply
from polyreme.runtime.passes import Microbatch
from polyreme.runtime.state import State, average_buffers
from polyreme.sample import SampleSpec, TensorSpec
from test_runtime import Record, _assert_equal, _train
from tiny import AtOnce, Case, Model, Samples, plan, reference

PAIRS = [
    {"replica": 2},
    *({"shard": 2, "level": level} for level in ("none", "optimizer", "grads", "params")),
]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
@pytest.mark.parametrize("branch", ["positive", "never"])
def test_branch_used_on_some_ranks_or_none(pool, layout, branch):
    # One process per microbatch decides on other samples, so microbatches are single samples.
    case = Case(model=Model(branch=branch), plan=layout | {"microbatches": 3}, rule=AdamW(lr=0.1))
    weights, losses = _sample_by_sample(case)
    found, steps, _, _ = pool(2).run(_train, case)[0]
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-9)
    for name, tensor in weights.items():
        assert torch.allclose(torch.from_numpy(found[name]), tensor, atol=1e-9), name


def _sample_by_sample(case):
    """The plain loop, gradients accumulated over single samples."""
    from polyreme.data.order import Order

    job = case.job()
    modules, params = [], {}
    for layer in job.graph.layers:
        module = job.graph.build(layer.name).to_empty(device="cpu")
        job.graph.initialise(layer.name, module, 0)
        modules.append(module.double())
        params |= {layer.params[own]: p for own, p in module.named_parameters()}
    optimizer = case.rule.optimizer(params.values())
    order = Order(n_samples=case.n_train, global_batch=case.global_batch, seed=0, tail="drop")
    losses = []
    for step in range(case.steps):
        batch = job.source.train(order.batch(step))
        optimizer.zero_grad()
        total, weight = 0.0, (batch["labels"] != -100).sum()
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            x = ids[None]
            for module in modules:
                x = module(x)
            loss = nn.functional.cross_entropy(x[0], labels, reduction="sum") / weight
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return {name: p.detach() for name, p in params.items()}, losses


class Scale(nn.Module):
    """One number that scales the first of two logits: gradients are easy to say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return x * self.weight


class OneLayer:
    def build(self, layer):
        with torch.device("meta"):
            return Scale()

    def initialise(self, layer, module, seed):
        nn.init.ones_(module.weight)


def _scale_graph(builder=None):
    logits = {"logits": TensorSpec((2,))}
    layer = Layer(
        name="scale",
        kind="scale",
        inputs=("batch:features",),
        outputs=logits,
        params={"weight": "scale.weight"},
        param_count=1,
        flops=1.0,
    )
    return LayerGraph(
        name="scale",
        layers=(layer,),
        inputs={"features": TensorSpec((2,), "float32")},
        output="scale.logits",
        builder=builder or OneLayer(),
    )


def _scale_driver(world, layout, rule, **more):
    graph = _scale_graph()
    applied = apply(graph, plan(graph, **layout, global_batch=2), world)
    return Driver(applied, world, rule, **more)


def _microbatch(features, labels):
    return Microbatch(
        fields={"features": torch.tensor(features, dtype=torch.float64)},
        labels=torch.tensor(labels),
        n_samples=len(labels),
        n_rows=len(labels),
    )


def _log_odds(loss):
    """Logit of class 1 against 0 whose cross-entropy for class 0 is `loss`."""
    return float(np.log(np.expm1(loss)))


def _weigh_tokens(world, layout):
    driver = _scale_driver(world, layout, SGD(lr=0.1))
    loss, n = ((1.0, 3), (5.0, 1))[world.rank]
    batch = _microbatch([[0.0, _log_odds(loss)]] * n, [0] * n)
    return driver.step({0: batch}, nominal_weight=6.0).loss


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_loss_is_the_mean_over_tokens_not_over_ranks(pool, layout):
    assert pool(2).run(_weigh_tokens, layout) == pytest.approx([2.0, 2.0])


def _gradient(features):
    """d loss / d weight of one sample at weight 1 with label 0."""
    return features * torch.sigmoid(torch.tensor(features, dtype=torch.float64)).item()


def _accumulate(world, layout, values):
    driver = _scale_driver(world, layout | {"microbatches": 2}, SGD(lr=1.0))
    batches = [_microbatch([[0.0, x]], [0]) for x in values[world.rank]]
    before = _reductions(driver)
    driver.step(dict(enumerate(batches)), nominal_weight=4.0)
    state = State(driver.applied, driver.optimizers, world)
    (weight,) = (t.item() for t in _whole(state).values())
    return weight, _reductions(driver) - before


def _reductions(driver):
    events = driver.applied.traffic.record.account().events
    return sum(event.op in ("all_reduce sum", "reduce_scatter") for event in events)


def _whole(state):
    masters = state.applied.masters
    return {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in masters.items()}


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_accumulation_reduces_all_microbatches_and_leaves_ranks_equal(pool, layout):
    values = ((1.0, 3.0), (2.0, 5.0))
    (first, n_reductions), (second, _) = pool(2).run(_accumulate, layout, values)
    mean = sum(_gradient(x) for row in values for x in row) / 4
    assert first == second
    assert first == pytest.approx(1 - mean, rel=1e-12)
    at_end = 1  # of what all ranks must agree on
    expected = 1 if layout.get("level") not in ("grads", "params") else 2
    assert n_reductions == expected + at_end


class Poisoned(Samples):
    """Features are 1 but for those of some samples."""

    metric = "heldout_loss"
    fingerprint = "poisoned"
    n_heldout = 0

    def __init__(self, poisoned, poison=torch.nan):
        self.n_train = 40
        fields = {"features": TensorSpec((2,)), "labels": TensorSpec((), "int64")}
        self.sample = SampleSpec(fields=fields, n_classes=2)
        self._poisoned, self._poison = poisoned, poison

    def train(self, indices, epoch=0):
        features = torch.ones(len(indices), 2)
        features[np.isin(indices, self._poisoned), 0] = self._poison
        return {"features": features, "labels": torch.zeros(len(indices), dtype=torch.int64)}


def _train_poisoned(world, layout, poisoned, max_skipped):
    case = Case(steps=5, global_batch=4, plan=layout)
    graph = _scale_graph()
    job = replace(
        case.job(),
        graph=graph,
        plan=plan(graph, **layout, global_batch=4),
        source=Poisoned(poisoned),
        train=Train(steps=5, global_batch=4, max_skipped=max_skipped, tail="drop"),
    )
    record = Record()
    try:
        outcome = loop.train(job, world, log=record)
    except RunError as error:
        return str(error)
    weights = [t.item() for t in _whole(outcome.state).values()]
    return weights, outcome.skipped, [(e.skipped, e.reason, e.rank, e.loss) for e in record.events]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_nan_on_one_rank_skips_the_step_on_all(pool, layout):
    from polyreme.data.order import Order

    order = Order(n_samples=40, global_batch=4, seed=0, tail="drop")
    poisoned = [int(order.local(1, 1, 2)[0])]  # step 1, rank 1
    first, second = pool(2).run(_train_poisoned, layout, poisoned, 3)
    assert first[:2] == second[:2]
    assert np.isfinite(first[0]).all()
    assert first[1] == 1
    assert first[2][1] == (True, "loss is not finite", 1, None)
    assert [event[0] for event in first[2]] == [False, True, False, False, False]
    assert not second[2]


def test_too_many_skipped_steps_end_the_run_on_all_ranks(pool):
    first, second = pool(2).run(_train_poisoned, {"replica": 2}, list(range(40)), 2)
    assert "step 3" in first
    assert "max_skipped" in first
    assert first == second


@pytest.mark.parametrize("tail", ["drop", "short", "wrap"])
def test_uneven_data_ends_in_the_same_step_on_all_ranks(pool, tail):
    case = Case(plan={"replica": 2}, tail=tail, n_train=12, global_batch=5, steps=5)
    _assert_equal(pool, case)
    by_epoch = replace(case, settings={"steps": None, "epochs": 1})
    steps = [len(pool(2).run(_train, by_epoch)[0][1])]
    assert steps == [{"drop": 2, "short": 3, "wrap": 3}[tail]]


def test_frozen_parameters_keep_their_bits(pool):
    case = Case(model=Model(frozen=True), plan={"shard": 2, "level": "params", "precision": "bf16"})
    found, *_ = pool(2).run(_train, case)[0]
    start, _, _ = reference(replace(case, steps=0, plan={}))
    for name in ("block.0.up.weight", "block.0.up.bias"):
        assert torch.equal(torch.from_numpy(found[name]), start[name].float())
    assert not torch.equal(torch.from_numpy(found["head.weight"]), start["head.weight"].float())


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_bf16_computes_narrow_and_updates_float32_masters(pool, layout):
    case = Case(
        model=Model(tied=True, gain=True),
        plan=layout | {"precision": "bf16", "microbatches": 2},
        rule=SGD(lr=1e-4),
        steps=4,
    )
    found, steps, _, skipped = pool(2).run(_train, case)[0]
    exact, losses, _ = reference(replace(case, plan={}))
    assert skipped == 0
    assert [step.loss for step in steps] == pytest.approx(losses, rel=0.05)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    start, _, _ = reference(replace(case, steps=0, plan={}))
    moved = torch.from_numpy(found["embed.weight"]) - start["embed.weight"].float()
    wanted = (exact["embed.weight"] - start["embed.weight"]).float()
    # Steps of 1e-5 vanish in bfloat16 weights; float32 masters keep them.
    assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), 0) > 0.98


def _batch_norm(world, layout):
    case = Case(model=Model(batch_norm=True), plan=layout, global_batch=6)
    outcome = loop.train(case.job(), world)
    own = {slot.name: slot.tensor.clone() for slot in outcome.state.applied.buffers}
    for slot in outcome.state.applied.buffers:
        slot.tensor.add_(world.rank)
    average_buffers(outcome.state.applied, world)
    mixed = {slot.name: slot.tensor.clone() for slot in outcome.state.applied.buffers}
    return {n: t.tolist() for n, t in own.items()}, {n: t.tolist() for n, t in mixed.items()}


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("layout", [PAIRS[0], PAIRS[-1]], ids=str)
def test_batch_norm_statistics_are_averaged_and_counts_take_the_maximum(pool, layout, precision):
    (own, mixed), (other, _) = pool(2).run(_batch_norm, layout | {"precision": precision})
    name = "block.0.norm.running_mean"
    assert own == other  # the evaluation at the end averaged them
    assert mixed[name] == pytest.approx([value + 0.5 for value in own[name]])
    counter = "block.0.norm.num_batches_tracked"
    assert (own[counter], mixed[counter]) == (3, 4)


def _evaluate_accuracy(world, case):
    return loop.train(case.job(), world).metrics


def test_evaluation_counts_are_exact_whatever_the_ranks(pool):
    found = []
    for layout in ({}, {"replica": 2}, {"replica": 3}, {"shard": 3, "level": "params"}):
        case = Case(plan=layout, metric="test_accuracy", rule=SGD(lr=1e-12))
        n = layout.get("replica", 1) * layout.get("shard", 1)
        found += pool(n).run(_evaluate_accuracy, case)
    assert {metrics["test_accuracy"] for metrics in found} == {found[0]["test_accuracy"]}
    assert found[0]["bigram_loss"] == 2.5
    assert [m["heldout_loss"] for m in found] == pytest.approx([found[0]["heldout_loss"]] * 9)


def _stop_on_one(world, case):
    asked = []

    def stop():
        asked.append(1)
        return world.rank == 1 and len(asked) == 2

    saved = []
    outcome = loop.train(
        case.job(), world, stop=stop, save=AtOnce(lambda s: saved.append(s.progress.step))
    )
    return outcome.status, outcome.steps, saved


def test_one_rank_that_stops_ends_the_run_on_all(pool):
    case = Case(plan={"replica": 2}, steps=9)
    assert pool(2).run(_stop_on_one, case) == [("interrupted", 2, [2])] * 2


def _resume(world, case, layout):
    """Save after two steps under one layout, go on under another."""
    kept = {}

    def keep(state):
        if state.progress.step == 2:
            kept["tensors"] = {n: _copy(t) for n, t in state.tensors().items()}
            kept["progress"] = state.progress

    def put(state):
        for name, tensor in state.tensors().items():
            whole = kept["tensors"][name]
            if hasattr(tensor, "placements"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            tensor.copy_(whole)
        return kept["progress"]

    settings = {"checkpoint_every": 2}
    loop.train(replace(case, settings=settings).job(), world, save=AtOnce(keep))
    outcome = loop.train(replace(case, plan=layout).job(), world, load=put)
    return {n: t.numpy() for n, t in full_parameters(outcome.state)}, outcome.samples


def _copy(tensor):
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor.clone()


@pytest.mark.parametrize(
    ("before", "after"), [(PAIRS[0], PAIRS[4]), (PAIRS[4], PAIRS[1]), (PAIRS[2], PAIRS[3])], ids=str
)
def test_state_restores_into_another_layout(pool, before, after):
    case = Case(
        model=Model(tied=True, gain=True), plan=before, steps=4, rule=AdamW(lr=0.1), clip_norm=1.0
    )
    weights, samples = pool(2).run(_resume, case, after)[0]
    expected, _, _ = reference(case)
    assert samples == 24
    for name, tensor in expected.items():
        assert torch.allclose(torch.from_numpy(weights[name]), tensor, atol=1e-9), name
