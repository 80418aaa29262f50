"""What is exchanged beside computation changes when, not what, is computed."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from beside import beside
from polyreme.algo.rule import LAMB, SNGM, AdamW
from polyreme.runtime import loop
from polyreme.runtime.bucket import Scattered
from polyreme.runtime.driver import Driver
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.record import N_SLOTS, Record
from polyreme.runtime.stage import Body
from polyreme.runtime.timing import TimedAllGather, Traffic
from test_runtime import Record as Steps
from tiny import MOMENTUM, AtOnce, Block, Case, Model


class FrozenFirst(Model):
    """The first stage trains nothing."""

    def makers(self):
        found = super().makers()

        def frozen(maker):
            return lambda: maker().requires_grad_(False)

        return found | {name: frozen(found[name]) for name in ("embed", "block.0")}


class WideGain(Model):
    """One parameter has another dtype than the others."""

    def makers(self):
        def first():
            block = Block(gain=True)
            block.gain = torch.nn.Parameter(block.gain.double())
            return block

        return super().makers() | {"block.0": first}


OFF = {"overlap": False, "prefetch": False, "decouple": False, "priority": False}


def _n(case):
    n = 1
    for axis in ("replica", "shard", "tp", "pp"):
        n *= case.plan.get(axis, 1)
    return n


def _train(world, case):
    """Weights at the end, norms of gradients, and weights and states after each step."""
    record, states = Steps(), []

    def keep(state):
        states.append({name: tensor.clone() for name, tensor in state.tensors().items()})

    save = AtOnce(keep) if case.settings.get("checkpoint_every") else None
    outcome = loop.train(case.job(), world, log=record, save=save)
    weights = {name: tensor.numpy() for name, tensor in full_parameters(outcome.state)}
    steps = [(each.loss, each.grad_norm) for each in record.events if hasattr(each, "loss")]
    kept = [{name: tensor.numpy() for name, tensor in state.items()} for state in states]
    return weights, steps, outcome.metrics, kept


def _apart(pool, case, **switches):
    """The case as it is and with other switches, in the same processes."""
    other = dataclasses.replace(case, plan=case.plan | switches)
    group = pool(_n(case))
    return group.run(_train, case)[0], group.run(_train, other)[0]


def _same(found, expected, rtol=0.0):
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            _same(found[name], value, rtol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _same(one, other, rtol)
    elif rtol:
        assert found == pytest.approx(expected, rel=rtol, abs=rtol)
    else:
        assert (found == expected).all() if hasattr(expected, "all") else found == expected


ODD = Model(tied=True, gain=True, frozen=True)
DECOUPLED = [
    {"replica": 2, "microbatches": 2},
    {"replica": 2, "precision": "bf16"},
    {"shard": 2, "microbatches": 3, "recompute": True},
    {"replica": 2, "pp": 2, "microbatches": 4, "order": "zb-h1"},
    {"replica": 2, "shard": 2, "level": {"": "params", "block.0": "none"}},
    {"replica": 2, "bucket_bytes": 1},
    {"replica": 2, "bucket_bytes": 10**9, "overlap": False, "priority": False},
]


@pytest.mark.parametrize("rule", [AdamW(lr=0.1), MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("plan", DECOUPLED, ids=str)
@pytest.mark.slice(4)
def test_gathers_behind_the_next_forward_change_no_bit(pool, plan, rule):
    """A bucket that was used before its gather, or whose update came twice or not at all."""
    case = Case(model=ODD, plan=plan, rule=rule, clip_norm=0.5, global_batch=8, steps=4)
    found, expected = _apart(pool, case, decouple=True)
    # The norm is summed in another order, and what is clipped by it differs in the last bits.
    _same(found, expected, rtol=1e-2 if plan.get("precision") == "bf16" else 1e-12)
    if _n(case) == 2:  # more ranks are summed in another order too
        unclipped = dataclasses.replace(case, clip_norm=None)
        (weights, *_), (others, *_) = _apart(pool, unclipped, decouple=True)
        _same(weights, others)


def test_three_ranks_gather_what_one_process_computes(pool):
    """A flat buffer that does not divide by the ranks."""
    case = Case(model=ODD, plan={"replica": 3, "bucket_bytes": 700}, rule=AdamW(lr=0.1), steps=4)
    _same(*_apart(pool, case, decouple=True), rtol=1e-10)


@pytest.mark.parametrize("n_train", [3, 40])
def test_a_rank_without_samples_uses_what_it_gathered(pool, n_train):
    """It runs no forward pass, which would wait for the gather."""
    case = Case(plan={"replica": 2, "microbatches": 2}, global_batch=1, steps=4, n_train=n_train)
    _same(*_apart(pool, case, decouple=True), rtol=1e-12)


@pytest.mark.parametrize("plan", [{"replica": 2}, {"replica": 2, "pp": 2, "microbatches": 2}])
def test_checkpoints_and_evaluations_see_the_update(pool, plan):
    """Weights on disk, or those that were scored, were of the step before."""
    settings = {"checkpoint_every": 1, "eval_every": 1}
    case = Case(model=ODD, plan=plan, steps=3, settings=settings, rule=AdamW(lr=0.1))
    found, expected = _apart(pool, case, decouple=True)
    assert len(found[3]) == 3
    _same(found, expected, rtol=1e-12)


def test_a_branch_that_nothing_took_is_not_updated(pool):
    model = Model(branch="never")
    case = Case(model=model, plan={"replica": 2}, rule=AdamW(lr=0.1, weight_decay=0.5))
    # Norms are summed in another order, which on some processors is another last bit.
    _same(*_apart(pool, case, decouple=True), rtol=1e-12)


def test_a_rule_over_all_tensors_has_them_at_once(pool):
    """SNGM's norm is of all gradients: no bucket can be updated by itself."""
    case = Case(plan={"replica": 2}, rule=SNGM(lr=0.1))
    _same(*_apart(pool, case, decouple=True), rtol=1e-12)


@pytest.mark.parametrize("plan", [{"replica": 2}, {"replica": 2, "pp": 2}], ids=str)
def test_verify_proves_decoupled_sums(pool, plan):
    case = Case(model=ODD, plan=plan | {"decouple": True}, clip_norm=0.5, global_batch=8)
    for verdict in pool(_n(case)).run(beside, case):
        assert verdict.first is None, verdict.first
        assert verdict.steps == 3


def _lose_a_part(world, put, job):
    start = Scattered.start

    def lost(self, group, traffic):
        if world.rank == 1:
            self.flat[: self.flat.numel() // 2] = 0
        start(self, group, traffic)

    put(Scattered, "start", lost)


def test_verify_finds_a_part_that_was_not_summed(pool):
    case = Case(plan={"replica": 2, "decouple": True})
    verdicts = pool(2).run(beside, case, _lose_a_part)
    assert all(verdict.first is not None for verdict in verdicts)


def _gathers(world, case):
    """Layers of the buckets in the order in which their gathers began, step by step."""
    found = []
    gather, step = Scattered.gather, Driver.step

    def noted(self, group, traffic, then=None):
        found[-1].append(tuple(member.name for member in self.members))
        gather(self, group, traffic, then)

    def begin(self, *args, **more):
        found.append([])
        return step(self, *args, **more)

    Scattered.gather, Driver.step = noted, begin
    try:
        loop.train(case.job(), world)
    finally:
        Scattered.gather, Driver.step = gather, step
    return found


@pytest.mark.parametrize("priority", [True, False])
def test_what_the_next_forward_needs_first_is_gathered_first(pool, priority):
    plan = {"replica": 2, "decouple": True, "priority": priority, "bucket_bytes": 1}
    steps = pool(2).run(_gathers, Case(plan=plan, steps=2))[0]
    assert len(steps) == 2
    order = ["embed", "block.0", "block.1", "head"]
    for names in steps:
        layers = [next(x for x in order if each[0].startswith(f"{x}.")) for each in names]
        assert list(dict.fromkeys(layers)) == (order if priority else order[::-1])


def _timeline(world, case):
    """Begins of gathers, and of forward passes of layers, of one step after the first."""
    found = []
    gather, forward = TimedAllGather.__call__, Body.forward

    def gathers(self, *args, **more):
        found.append("gather")
        return gather(self, *args, **more)

    def computes(self, *inputs):
        found.append("layer")
        return forward(self, *inputs)

    TimedAllGather.__call__, Body.forward = gathers, computes
    try:
        loop.train(case.job(), world)
    finally:
        TimedAllGather.__call__, Body.forward = gather, forward
    return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_layer_s_parameters_are_gathered_before_the_layer_before_it_computes(pool, prefetch):
    plan = {"shard": 2, "level": "params", "prefetch": prefetch}
    found = pool(2).run(_timeline, Case(plan=plan, steps=1))[0]
    forward = found[: found.index("layer") + 7]
    ahead = ["gather", "gather", "layer", "gather", "layer", "gather", "layer", "layer"]
    assert forward[:8] == (ahead if prefetch else ["gather", "layer"] * 4)


@pytest.mark.parametrize("level", ["optimizer", "grads", "params"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.slice(2)
def test_prefetched_parameters_change_no_bit(pool, level, pp):
    plan = {"shard": 2, "level": level, "microbatches": 2, "pp": pp, "recompute": True}
    case = Case(model=ODD, plan=plan, rule=AdamW(lr=0.1), settings={"eval_every": 1})
    _same(*_apart(pool, case, **OFF))


class _Work:
    """Is through at a time of the clock."""

    def __init__(self, clock, over_s):
        self.clock, self.over_s = clock, over_s

    def is_completed(self):
        return self.clock[0] >= self.over_s

    def wait(self):
        self.clock[0] = max(self.clock[0], self.over_s)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("polyreme.runtime.timing.time.perf_counter", lambda: now[0])
    return now


def _start(traffic, work):
    return traffic.start("all_reduce sum", torch.zeros(4), 2, lambda: work)


def test_time_hidden_is_what_ran_while_the_host_worked(clock):
    """Waiting, for this or for another exchange, counted as hidden."""
    traffic = Traffic()
    first = _start(traffic, _Work(clock, 2.0))
    clock[0] = 1.0
    second = _start(traffic, _Work(clock, 7.0))
    clock[0] = 3.0
    first.wait()
    with traffic.blocked():
        clock[0] = 4.5
    second.wait()
    # Under way from 0 to 7, blocked from 3 to 7.
    assert traffic.hidden_s() == pytest.approx(3.0)
    assert traffic.blocked_s == pytest.approx(4.0)
    traffic.begin()
    assert traffic.hidden_s() == 0.0


def test_time_hidden_begins_with_the_step(clock):
    """A step counted what had been hidden in the evaluation before it."""
    traffic = Traffic()
    _start(traffic, _Work(clock, 2.0)).wait()
    across = _start(traffic, _Work(clock, 9.0))
    clock[0] = 5.0
    traffic.begin()
    clock[0] = 8.0
    across.wait()
    assert traffic.hidden_s() == pytest.approx(3.0)


def test_an_end_is_not_noted_where_a_younger_collective_stands():
    record = Record()
    old = record.begin("all_gather", None, 2)
    for _ in range(N_SLOTS):
        young = record.begin("all_reduce sum", None, 2)
    record.end(old)
    assert all(event.end_s is None or not event.end_s for event in record.account().events)
    assert young == old + N_SLOTS


def _losses(world, case):
    record = Steps()
    loop.train(case.job(), world, log=record)
    return [each.loss for each in record.events if hasattr(each, "loss")]


@pytest.mark.parametrize("rule", [MOMENTUM, SNGM(lr=0.1), LAMB(lr=0.1)], ids=type)
def test_a_stage_may_have_nothing_to_train(pool, rule):
    """The factor of no gradient at all was an error, and the other stage waited."""
    plan = {"pp": 2, "microbatches": 2}
    case = Case(model=FrozenFirst(), plan=plan, clip_norm=0.5, global_batch=8, rule=rule)
    alone = dataclasses.replace(case, plan={"microbatches": 2})
    (expected,) = pool(1).run(_losses, alone)
    assert len(expected) == case.steps
    assert pool(2).run(_losses, case)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [{"replica": 2, "decouple": True}, {"shard": 2, "level": "params"}], ids=str
)
@pytest.mark.parametrize("rule", [MOMENTUM, LAMB(lr=0.1)], ids=type)
def test_parameters_may_differ_in_dtype(pool, layout, rule):
    """Gradients of one bucket have one dtype."""
    plan = {"precision": "fp32", "microbatches": 2}
    case = Case(model=WideGain(), plan=plan, clip_norm=0.5, global_batch=8, rule=rule)
    (expected,) = pool(1).run(_losses, case)
    case = dataclasses.replace(case, plan=plan | layout)
    assert pool(2).run(_losses, case)[0] == pytest.approx(expected, rel=1e-5)


EXITS = """
import sys
sys.path[:0] = sys.argv[1:2]
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.runtime import loop, mesh
from polyreme.runtime.feed import Feed
from tiny import Case, Model
world = mesh.open(HostAccelerator(), timeout_s=30)
to_device, calls = Feed.to_device, []
def fails(self, *args, **more):
    calls.append(0)
    if len(calls) == 3 and world.rank == 0:
        raise ValueError("a sample cannot be read")
    return to_device(self, *args, **more)
Feed.to_device = fails
plan = {"replica": 2, "decouple": True}
loop.train(Case(model=Model(n_blocks=6), plan=plan, steps=5).job(), world)
"""


@pytest.mark.long
def test_a_process_that_fails_with_gathers_under_way_says_why():
    """The backend's thread called Python at the interpreter's end, which aborted it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", EXITS, str(Path(__file__).parent)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | own | {"RANK": r, "LOCAL_RANK": r, "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in "01"
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "a sample cannot be read" in said[0]
