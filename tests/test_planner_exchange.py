"""The size of buckets, and halves or whole sums, by what a profile says they take."""

from __future__ import annotations

import msgspec
import pytest

from planner_toy import MS, cluster, profile, toy, toy_draft, workload
from polyreme.plan.ir import BUCKET_BYTES
from polyreme.planner.cost import exchange
from polyreme.planner.cost.data import DataCost, StepTime
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.pipeline import StepCost
from polyreme.profile.fit import ring_s
from polyreme.profile.record import CollectiveTimes

replace = msgspec.structs.replace
GRAPH = toy()
SIZES = (64, 128, 256, 512)


def _cost(*, latency_s, overlap, by_entry=True, bytes_s=1e5):
    """Two devices over a link so slow that the toy's gradients take about as long as its passes."""
    sizes = (1, 2**20)
    times = {
        op: (
            CollectiveTimes(
                n_devices=2,
                n_hosts=1,
                size_bytes=sizes,
                seconds=tuple(ring_s(op, 2, size, latency_s, bytes_s) for size in sizes),
            ),
        )
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    }
    figures = replace(profile(overlap=overlap), collectives=times)
    memory = Memory(GRAPH, replace(workload(2), by_entry=by_entry))
    return StepCost(DataCost(memory, figures, cluster(2)))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(exchange, "BUCKET_SIZES", SIZES)


def _tuned(cost, **given):
    draft = replace(toy_draft(replica=2, global_batch=2), bucket_bytes=0, **given)
    return cost.ordered(draft), cost(draft).step_s


def test_dear_starts_make_few_buckets_and_free_ones_many():
    sizes = []
    for latency_s in (0.0, 0.2 * MS, 20 * MS):
        draft, step_s = _tuned(_cost(latency_s=latency_s, overlap=1.0))
        sizes.append(draft.bucket_bytes)
        cost = _cost(latency_s=latency_s, overlap=1.0)
        others = [cost(replace(draft, bucket_bytes=size)).step_s for size in SIZES]
        assert step_s <= min(others) / (1 - exchange.GAIN)
    assert sizes[0] == SIZES[0]
    assert sizes[-1] == BUCKET_BYTES
    assert sizes == sorted(sizes)


def test_a_gain_within_the_noise_changes_nothing():
    """Plans of one spec differed from run to run with the latencies that were measured."""
    draft, _ = _tuned(_cost(latency_s=0.0, overlap=0.0))
    assert (draft.bucket_bytes, draft.decouple) == (BUCKET_BYTES, False)


@pytest.mark.parametrize(("gain", "taken"), [(0.2, True), (0.05, False), (-0.1, False)])
def test_halves_are_taken_where_they_gain_more_than_they_may_cost(gain, taken):
    def cost(draft):
        return StepTime(compute_s=1 - gain * draft.decouple, comm_s=0, exposed_comm_s=0)

    draft = replace(toy_draft(replica=2), bucket_bytes=0, decouple=None)
    found = exchange.tuned(draft, cost, parts=True)
    assert (found.decouple, found.bucket_bytes) == (taken, BUCKET_BYTES)
    # A rule that needs all gradients at once would gather them before the update, behind nothing.
    assert exchange.tuned(draft, cost, parts=False).decouple is False


def test_gathers_of_halves_hide_behind_the_forward_pass():
    """They did so too where a rule has them at once, and where the first layers' come last."""
    draft = replace(toy_draft(replica=2, global_batch=2), bucket_bytes=64, decouple=True)
    hidden = _cost(latency_s=0.0, overlap=1.0)(draft)
    late = _cost(latency_s=0.0, overlap=1.0)(replace(draft, priority=False))
    at_once = _cost(latency_s=0.0, overlap=1.0, by_entry=False)(draft)
    assert hidden.exposed_comm_s < late.exposed_comm_s
    assert hidden.exposed_comm_s < at_once.exposed_comm_s
    assert hidden.comm_s == late.comm_s == at_once.comm_s


def test_what_the_user_fixed_stays():
    cost = _cost(latency_s=20 * MS, overlap=1.0)
    draft = replace(toy_draft(replica=2, global_batch=2), bucket_bytes=7, decouple=True)
    assert cost.ordered(draft) == draft


def test_without_prefetch_gathers_of_shards_hide_behind_nothing():
    cost = _cost(latency_s=0.0, overlap=1.0)
    draft = toy_draft(shard=2, level="params", global_batch=2)
    late = replace(draft, prefetch=False)
    assert cost(late).exposed_comm_s > cost(draft).exposed_comm_s
    assert cost(late).comm_s == cost(draft).comm_s
