"""Stages on several processes compute what one process computes, in every order."""

from __future__ import annotations

import dataclasses

import pytest

from beside import Family, beside
from drawn import FAMILIES
from polyreme.algo.rule import AdamW
from polyreme.graph.tensor import padded
from polyreme.plan.order import ORDERS
from polyreme.runtime import loop
from polyreme.runtime.apply.tensor import loss as split_loss
from polyreme.runtime.driver import Driver
from polyreme.runtime.executor import Executor
from polyreme.runtime.feed import Feed
from polyreme.runtime.timing import Traffic
from polyreme.runtime.wires import Wires
from tiny import Case, Model

SYNCHRONOUS = [name for name, order in ORDERS.items() if order.synchronous]
AXES = ("replica", "shard", "tp", "pp")


def _n(case):
    n = 1
    for axis in AXES:
        n *= case.plan.get(axis, 1)
    return n


def _verdict(pool, case, fault=None, n_steps=3):
    verdicts = pool(_n(case)).run(beside, case, fault, n_steps, timeout_s=120)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


def _verified(pool, case, n_steps=3):
    found = _verdict(pool, case, None, n_steps)
    assert found.first is None, found.first
    assert found.steps == n_steps


def family(name, plan, **more):
    options, sample = FAMILIES[name]
    return Family(options=options, sample=sample, plan=plan, **more)


@pytest.mark.slice(6)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_an_order_gives_the_gradients_of_one_process(pool, name, tied):
    plan = {"pp": 2, "order": name, "microbatches": 4}
    case = Case(model=Model(tied=tied), plan=plan, global_batch=8, clip_norm=0.5)
    _verified(pool, case)


@pytest.mark.parametrize("pp", [2, 3])
def test_eight_samples_in_three_microbatches_are_played_as_three_three_two(pool, pp):
    """Buffers between stages stayed at three rows, and the loss failed on two."""
    plan = {"pp": pp, "microbatches": 3}
    case = Case(model=Model(gain=True), plan=plan, global_batch=8)
    _verified(pool, case)


def test_one_norm_clips_all_stages(pool):
    """Each stage clipped by the norm of its own gradients."""
    case = Case(plan={"pp": 2, "microbatches": 2}, global_batch=4, clip_norm=0.1)
    _verified(pool, case)


def _tied(world, case):
    """The tied weight after ten steps, where this process holds it."""
    outcome = loop.train(case.job(), world)
    master = outcome.state.applied.masters.get("embed.weight")
    return None if master is None else master.detach().numpy()


@pytest.mark.parametrize("order", ["1f1b", "zb-h1", "chimera"])
def test_tied_weights_of_two_stages_stay_equal_to_the_bit(pool, order):
    """Copies of the embedding in the first and last stage drifted apart."""
    plan = {"pp": 2, "order": order, "microbatches": 2, "precision": "fp32"}
    case = Case(Model(tied=True), plan, steps=10, global_batch=8, rule=AdamW(lr=0.05))
    first, last = pool(2).run(_tied, case)
    assert (first == last).all()
    double = dataclasses.replace(case, plan={**plan, "precision": "fp64"})
    _verified(pool, double, n_steps=10)


def _recorded(world, case):
    recorded, play = [], Executor.__call__

    def noting(self, *args):
        found = play(self, *args)
        recorded.append(list(self.recorded))
        return found

    Executor.__call__ = noting
    try:
        job = case.job()
        loop.train(job, world)
    finally:
        Executor.__call__ = play
    planned = list(job.plan.order[world.rank])
    if ORDERS[case.plan["order"]].synchronous:  # the one update is the driver's
        planned = [action for action in planned if action.kind != "U"]
    return [each == planned for each in recorded]


@pytest.mark.parametrize("name", ORDERS)
def test_what_was_played_is_the_order_of_the_plan(pool, name):
    plan = {"pp": 2, "order": name, "microbatches": 4}
    found = pool(2).run(_recorded, Case(plan=plan, global_batch=8, steps=2))
    assert found == [[True, True]] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2 window"])
@pytest.mark.slice("qwen2 window")
def test_slices_of_tokens_attend_to_those_before_them(pool, name):
    _verified(pool, family(name, {"pp": 2, "order": "terapipe", "microbatches": 2}, global_batch=5))


@pytest.mark.parametrize("name", ["t5", "t5 gated, untied"])
@pytest.mark.slice(1)
def test_the_encoders_output_passes_through_stages_that_do_not_read_it(pool, name):
    case = family(name, {"pp": 4, "microbatches": 2}, global_batch=4)
    _verified(pool, case, n_steps=2)


def test_two_key_value_heads_over_four_parts(pool):
    """A reshape failed in the middle of the first step."""
    _verified(pool, family("qwen3", {"tp": 4}, global_batch=4), n_steps=2)


# Planted faults: each is caught.


def swap_two_sends(world, put, job):
    """The first two microbatches change places on their way to the second stage."""
    send, held = Wires.send, []

    def swapped(self, message, tensors):
        if message.kind != "F" or message.microbatch > 1:
            return send(self, message, tensors)
        if message.microbatch == 0:
            held.append((message, tensors))
            return None
        (first, others) = held.pop()
        send(self, first, tensors)
        return send(self, message, others)

    put(Wires, "send", swapped)


def lose_a_microbatch(world, put, job):
    to_device, calls = Feed.to_device, []

    def losing(self, read, *, with_fillers):
        calls.append(read)
        return to_device(self, read[: -1 if len(calls) == 2 else None], with_fillers=with_fillers)

    put(Feed, "to_device", losing)


def clip_by_the_norm_of_a_stage(world, put, job):
    judge = Driver._judge

    def local(self, agreed, nominal_weight):
        reason, ranks, _ = judge(self, agreed, nominal_weight)
        own = sum(float(grad.norm()) ** 2 for grad in self._counted_grads()) ** 0.5
        return reason, ranks, own * nominal_weight / agreed.weight

    put(Driver, "_judge", local)


def skip_a_reduction_of_tensor_parts(world, put, job):
    """What one part gives of a region stands in for the sum of both."""
    reduce, calls = Traffic.all_reduce, []

    def skipping(self, x, *args, **kwargs):
        calls.append(x)
        skipped = world.rank == 1 and len(calls) == 3
        return reduce(self, x.clone() if skipped else x, *args, **kwargs)

    put(Traffic, "all_reduce", skipping)


def leave_padding_in_the_loss(world, put, job):
    score = split_loss.cross_entropy

    def padding_counts(logits, labels, n_classes, tp):
        return score(logits, labels, padded(n_classes, tp.degree), tp)

    put(split_loss, "cross_entropy", padding_counts)


def forget_the_other_holder(world, put, job):
    """The last stage updates its copy of a tied weight by its own gradient alone."""
    from polyreme.runtime.joint import Joint

    put(Joint, "__call__", lambda _: None)


PIPE = Case(plan={"pp": 2, "order": "gpipe", "microbatches": 3}, global_batch=6, clip_norm=0.1)


@pytest.mark.parametrize(
    ("fault", "case", "step"),
    [
        (swap_two_sends, PIPE, 1),
        (lose_a_microbatch, PIPE, 2),
        (clip_by_the_norm_of_a_stage, PIPE, None),
        (forget_the_other_holder, dataclasses.replace(PIPE, model=Model(tied=True)), 1),
        (skip_a_reduction_of_tensor_parts, family("llama", {"tp": 2}, global_batch=4), 1),
        (leave_padding_in_the_loss, family("llama", {"tp": 2}, global_batch=4), 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_caught(pool, fault, case, step):
    found = _verdict(pool, case, fault)
    assert found.first is not None
    assert step is None or found.steps == step
