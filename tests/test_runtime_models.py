"""Real models over processes: a tied Llama against transformers, ResNet against one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from polyreme.algo.rule import AdamW
from polyreme.graph.options import ResNet20, Transformers
from polyreme.plan.ir import Workload
from polyreme.planner.cost.memory import storage
from polyreme.runtime.driver import Driver
from polyreme.runtime.making import apply
from polyreme.runtime.passes import Microbatch
from polyreme.sample import SampleSpec, TensorSpec
from test_runtime import _train
from tiny import Case, Samples, plan

TOKENS = TensorSpec((5,), "int64")
TEXT = SampleSpec(fields={"input_ids": TOKENS, "labels": TOKENS}, n_classes=13)
LLAMA = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
IMAGE = SampleSpec(
    fields={"pixel_values": TensorSpec((3, 8, 8), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=4,
)


@dataclass(frozen=True)
class Llama:
    def graph(self):
        return Transformers(model_type="llama", config=LLAMA).graph(TEXT)


@dataclass(frozen=True)
class ResNet:
    def graph(self):
        return ResNet20(width=4, blocks=1).graph(IMAGE)


class Images(Samples):
    def __init__(self) -> None:
        self.sample, self.metric = IMAGE, "test_accuracy"
        self.n_train, self.n_heldout = 24, 5
        generator = torch.Generator().manual_seed(1)
        self._pixels = torch.randn(29, 3, 8, 8, generator=generator)
        self._labels = torch.randint(4, (29,), generator=generator)

    def _at(self, indices):
        rows = torch.from_numpy(indices)
        return {"pixel_values": self._pixels[rows], "labels": self._labels[rows]}


@dataclass(frozen=True)
class ImageCase(Case):
    def job(self):
        return replace(super().job(), source=Images())


def _initial(graph):
    weights = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, module, 0)
        for own, tensor in module.state_dict().items():
            weights.setdefault(layer.params[own], tensor)
    return weights


@pytest.mark.slice(1)
@pytest.mark.parametrize(
    "layout", [{"replica": 2}, {"shard": 2, "level": "grads"}, {"shard": 2, "level": "params"}]
)
def test_llama_trains_as_transformers_does(pool, layout):
    from transformers import AutoModelForCausalLM, LlamaConfig

    case = Case(model=Llama(), plan=layout | {"recompute": True}, rule=AdamW(lr=0.01))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    missing = model.load_state_dict(_initial(Llama().graph()), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}  # tied
    model.double()
    from polyreme.data.order import Order

    order = Order(n_samples=40, global_batch=6, seed=0, tail="drop")
    optimizer = case.rule.optimizer(model.parameters())
    for step in range(case.steps):
        batch = Samples(40).train(order.batch(step))
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        optimizer.step()
    found, *_ = pool(2).run(_train, case)[0]
    expected = dict(model.named_parameters())
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        # transformers computes its norms in float32 even in a float64 model.
        assert torch.allclose(torch.from_numpy(found[name]), tensor, atol=1e-4), name


@pytest.mark.parametrize("layout", [{"replica": 2}, {"shard": 2, "level": "params"}], ids=str)
def test_resnet_of_two_ranks_is_that_of_two_microbatches(pool, layout):
    case = ImageCase(model=ResNet(), plan=layout)
    found, steps, metrics, _ = pool(2).run(_train, case)[0]
    alone, alone_steps, _, _ = pool(1).run(_train, replace(case, plan={"microbatches": 2}))[0]
    assert set(metrics) == {"heldout_loss", "test_accuracy", "bigram_loss"}
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in alone_steps], rel=1e-9)
    for name in (name for name in alone if not name.endswith(("mean", "var", "tracked"))):
        assert torch.allclose(torch.from_numpy(found[name]), torch.from_numpy(alone[name])), name


class Measured(Driver):
    """Measures what is stored just before gradients are given up."""

    def _forget(self):
        masters = self.applied.masters.values()
        working = [p for p in self.applied.stage.parameters() if p.dtype == torch.bfloat16]
        optimizers = [o.state.values() for o in self.optimizers]
        states = [v for values in optimizers for state in values for v in state.values()]
        grads = [p.grad for p in self.applied.buckets.parameters if p.used]
        grads += [p.master.grad for unit in self.applied.units for p in unit.parameters]
        self.measured = tuple(map(_storage_bytes, ([*masters, *working], grads, states)))
        super()._forget()


def _storage_bytes(tensors):
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def _measure(world, model, layout):
    graph = model.graph()
    made = plan(graph, **layout)
    driver = Measured(apply(graph, made, world), world, AdamW())
    if isinstance(model, ResNet):
        batch = Images().train(torch.arange(2).numpy())
    else:
        batch = Samples(4, ignored=0).train(torch.arange(2).numpy())
    labels = batch["labels"]
    result = driver.step(
        {0: Microbatch(fields=batch, labels=labels, n_samples=2, n_rows=2)},
        nominal_weight=labels.numel(),
    )
    assert not result.skipped
    workload = Workload(
        global_batch=6,
        seq_len=5,
        precision=made.precision,
        optimizer_states=2,
        optimizer_scalars=1,
    )
    predicted = storage(graph, made.layer_plans, workload, world.rank)
    return driver.measured, (predicted.parameters, predicted.gradients, predicted.optimizer)


def _measure_precisions(world, model, layout):
    return {
        precision: _measure(world, model, layout | {"precision": precision})
        for precision in ("fp32", "bf16", "fp64")
    }


@pytest.mark.parametrize("model", [Llama(), ResNet()], ids=str)
@pytest.mark.parametrize("level", ["none", "optimizer", "grads", "params"])
@pytest.mark.slice(1)
def test_storage_is_predicted_to_the_byte(pool, model, level):
    for found in pool(3).run(_measure_precisions, model, {"shard": 3, "level": level}):
        for precision, (measured, predicted) in found.items():
            assert measured == predicted, precision
