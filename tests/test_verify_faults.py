"""Planted faults of a run are each caught by verify, and named by parameter, step and rank."""

from __future__ import annotations

import pytest
import torch

from beside import beside
from polyreme.algo.rule import SGD, AdamW
from polyreme.errors import RunError
from polyreme.runtime import loop
from polyreme.runtime.apply import data
from polyreme.runtime.driver import Driver
from polyreme.runtime.feed import Feed
from polyreme.runtime.timing import Traffic
from tiny import Case, Head, Model


def _verdict(pool, n, case, fault):
    verdicts = pool(n).run(beside, case, fault)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


def skip_one_all_reduce(world, put, job):
    """Rank 1 keeps its own sums of the second bucket."""
    start, calls = Traffic.start_all_reduce, []

    def skipping(self, flat, group):
        calls.append(flat)
        kept = world.rank == 1 and len(calls) == 2
        return start(self, flat.clone() if kept else flat, group)

    put(Traffic, "start_all_reduce", skipping)


def average_twice(world, put, job):
    update = Driver._update

    def halved(self, agreed, norm, nominal_weight, rate_factor):
        self.applied.buckets.parameters[0].grad.div_(world.n_ranks)
        update(self, agreed, norm, nominal_weight, rate_factor)

    put(Driver, "_update", halved)


def swap_shards(world, put, job):
    """Each rank takes the part of a layer's reduced gradients that is the other's."""
    scatter = data.TimedReduceScatter.__call__

    def swapped(self, output_tensor, input_tensor, *args, **kwargs):
        first, second = input_tensor.chunk(2)
        return scatter(self, output_tensor, torch.cat([second, first]), *args, **kwargs)

    put(data.TimedReduceScatter, "__call__", swapped)


def lose_a_microbatch(world, put, job):
    to_device, calls = Feed.to_device, []

    def losing(self, read, *, with_fillers):
        calls.append(read)
        lost = world.rank == world.n_ranks - 1 and len(calls) == 2
        return to_device(self, read[:-1] if lost else read, with_fillers=with_fillers)

    put(Feed, "to_device", losing)


def repeat_a_sample(world, put, job):
    """As many samples and labels as before, but one sample stands in for another."""
    read = Feed.read

    def repeating(self, step):
        parts = read(self, step)
        if step == 1 and world.rank == 0:
            for field in parts[0].values():
                field[1] = field[0]
        return parts

    put(Feed, "read", repeating)


def load_into_the_wrong_layer(world, put, job):
    apply = loop.apply

    def wrong(*args, **kwargs):
        applied = apply(*args, **kwargs)
        masters = applied.masters
        with torch.no_grad():
            masters["block.1.up.weight"].copy_(masters["block.0.up.weight"])
        return applied

    put(loop, "apply", wrong)


def clip_by_a_local_norm(world, put, job):
    """The norm of this rank's own shard stands in for that of all."""
    judge = Driver._judge

    def local(self, agreed, nominal_weight):
        reason, ranks, _ = judge(self, agreed, nominal_weight)
        own = sum(float(grad.norm()) ** 2 for grad in self._summed_grads()) ** 0.5
        return reason, ranks, own * nominal_weight / agreed.weight

    put(Driver, "_judge", local)


def forget_the_tie(world, put, job):
    """The run's head reads the tied weight and gives it no gradient."""
    apply, forward = loop.apply, Head.forward
    heads = []

    def keeping(*args, **kwargs):
        applied = apply(*args, **kwargs)
        heads.extend(module for module in applied.stage.modules() if isinstance(module, Head))
        return applied

    def forgetful(self, x):
        ours = any(self is head for head in heads)
        return self.norm(x) @ self.weight.detach().T if ours else forward(self, x)

    put(loop, "apply", keeping)
    put(Head, "forward", forgetful)


def a_rate_that_is_off(world, put, job):
    """Rank 1 takes its own steps a hundredth too long."""
    update = Driver._update

    def hasty(self, agreed, norm, nominal_weight, rate_factor):
        update(self, agreed, norm, nominal_weight, rate_factor * (1 + world.rank / 100))

    put(Driver, "_update", hasty)


def not_finite(world, put, job):
    agree, calls = Driver._agree, []

    def poisoned(self, loss_sum, weight, say):
        calls.append(say)
        bad = world.rank == 1 and len(calls) == 2
        return agree(self, loss_sum * float("nan") if bad else loss_sum, weight, say)

    put(Driver, "_agree", poisoned)


def test_a_skipped_all_reduce_of_one_bucket_on_one_rank(pool):
    found = _verdict(pool, 2, Case(plan={"replica": 2}), skip_one_all_reduce)
    assert found.steps == 1
    assert found.first.name.startswith("block.")
    assert "step 1" in found.first.words
    assert "rank 1" in found.first.words
    assert found.max_grad_error > 1e-3


def test_a_gradient_averaged_twice(pool):
    found = _verdict(pool, 2, Case(plan={"replica": 2}), average_twice)
    assert (found.steps, found.first.name) == (1, "embed.weight")
    assert found.max_grad_error == pytest.approx(0.5)
    assert "others" not in found.first.words
    assert found.max_loss_error < 1e-12


@pytest.mark.parametrize("level", ["optimizer", "grads", "params"])
def test_a_reduce_scatter_whose_shards_are_swapped(pool, level):
    case = Case(plan={"shard": 2, "level": level})
    found = _verdict(pool, 2, case, swap_shards)
    assert (found.steps, found.first.name) == (1, "embed.weight")


@pytest.mark.parametrize("layout", [{"replica": 2}, {"shard": 2, "level": "optimizer"}], ids=str)
def test_a_microbatch_lost(pool, layout):
    case = Case(plan={**layout, "microbatches": 3})
    found = _verdict(pool, 2, case, lose_a_microbatch)
    assert found.steps == 2
    assert "labels carry loss" in found.first.words
    assert "the loss is" in found.first.words


def test_a_sample_read_twice_and_another_lost(pool):
    found = _verdict(pool, 2, Case(plan={"replica": 2}), repeat_a_sample)
    assert found.steps == 2
    assert found.first.name == "embed.weight"
    assert "the loss is" in found.first.words


@pytest.mark.parametrize("layout", [{"replica": 2}, {"shard": 2, "level": "params"}], ids=str)
def test_a_weight_loaded_into_the_wrong_layer(pool, layout):
    found = _verdict(pool, 2, Case(plan=layout), load_into_the_wrong_layer)
    assert (found.steps, found.first.name) == (0, "block.1.up.weight")
    assert "before the first step" in found.first.words


@pytest.mark.parametrize("layout", [{"replica": 2}, {"shard": 2, "level": "grads"}], ids=str)
def test_a_tied_weight_that_gets_no_gradient_from_its_second_place(pool, layout):
    found = _verdict(pool, 2, Case(model=Model(tied=True), plan=layout), forget_the_tie)
    assert (found.steps, found.first.name) == (1, "embed.weight")
    assert "others" not in found.first.words
    assert found.max_loss_error < 1e-12


@pytest.mark.parametrize("n_steps", [1, 3])
def test_clipping_by_a_local_norm_is_seen_in_float32(pool, n_steps):
    case = Case(plan={"shard": 2, "level": "params", "precision": "fp32"}, clip_norm=0.1)
    verdicts = pool(2).run(beside, case, clip_by_a_local_norm, n_steps)
    assert verdicts[0].steps == 1
    assert "in step 1 the update of" in verdicts[0].first.words
    assert verdicts[0].max_grad_error < 1e-5


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)], ids=str)
def test_a_rate_that_is_off_on_one_rank_is_seen_in_float32(pool, rule):
    case = Case(plan={"replica": 2, "precision": "fp32"}, rule=rule)
    found = _verdict(pool, 2, case, a_rate_that_is_off)
    assert found.steps == 1
    assert "on rank 1" in found.first.words
    assert found.max_parameter_error == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    "layout",
    [{"replica": 2}, {"shard": 2, "level": "grads"}, {"shard": 2, "level": "params"}],
    ids=str,
)
def test_adam_s_steps_on_rounding_alone_are_no_fault_in_float32(pool, layout):
    case = Case(
        Model(tied=True), {**layout, "precision": "fp32"}, rule=AdamW(lr=0.01), clip_norm=0.1
    )
    found = _verdict(pool, 2, case, None)
    assert found.first is None, found.first
    assert found.max_parameter_error < 1e-4


def test_clipping_by_a_local_norm_is_seen_in_the_second_step(pool):
    case = Case(plan={"shard": 2, "level": "params"}, clip_norm=0.1)
    found = _verdict(pool, 2, case, clip_by_a_local_norm)
    assert found.steps == 2


def test_clipping_by_a_local_norm_is_seen_after_the_only_step(pool):
    case = Case(plan={"shard": 2, "level": "params"}, clip_norm=0.1)
    verdicts = pool(2).run(beside, case, clip_by_a_local_norm, 1)
    assert verdicts[0].steps == 1
    assert "value of" in verdicts[0].first.words
    assert "after step 1" in verdicts[0].first.words


def test_a_step_that_is_not_finite_cannot_be_verified(pool):
    outcomes = pool(2).outcomes(beside, Case(plan={"replica": 2}), not_finite)
    for failure in outcomes:
        assert isinstance(failure.error, RunError)
        assert "cannot be verified: step 2" in str(failure.error)
        assert "on rank 1" in str(failure.error)


def test_without_a_fault_nothing_is_found(pool):
    found = _verdict(pool, 2, Case(plan={"replica": 2}, clip_norm=0.1), None)
    assert found.first is None
    assert found.steps == 3
