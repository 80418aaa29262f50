"""What a plan costs, by hand: times of passes and collectives, bytes by cause."""

from __future__ import annotations

import msgspec
import pytest

from planner_toy import MS, cluster, profile, toy, toy_draft, workload
from polyreme.plan.ir import MEMORY_CAUSES
from polyreme.planner.cost.activations import Layered, in_turn
from polyreme.planner.cost.data import DataCost, StepTime
from polyreme.planner.cost.memory import Memory
from polyreme.planner.draft import Draft, Strategy
from polyreme.planner.room import Fitting

GRAPH = toy()  # embed, block, normed block, head tied to embed: 4 layers, 3 units
replace = msgspec.structs.replace


def _cost(draft: Draft, hosts: tuple[int, ...] = (8,), **figures) -> StepTime:
    memory = Memory(GRAPH, workload(draft.global_batch))
    return DataCost(memory, profile(**figures), cluster(*hosts))(draft)


# Costs, by hand: forward 1 ms and backward 3 ms a layer and sample, a collective 0.5 ms.


def test_compute_counts_layers_samples_and_recomputation():
    assert _cost(toy_draft(microbatches=3)).step_s == pytest.approx(4 * 12 * 4 * MS)
    recomputed = _cost(toy_draft(microbatches=3, recompute=True))
    assert recomputed.step_s == pytest.approx(4 * 12 * 5 * MS)


def test_the_rank_with_most_samples_counts():
    assert _cost(toy_draft(replica=5), collective_ms=0).compute_s == pytest.approx(4 * 3 * 4 * MS)
    uneven = toy_draft(replica=5, microbatches=2)
    assert dict(uneven.microbatch_sizes) == {2: 1, 1: 1}
    assert _cost(uneven, collective_ms=0).compute_s == pytest.approx(4 * 3 * 4 * MS)


@pytest.mark.parametrize(
    ("how", "collectives"),
    [
        ({"replica": 4}, 1),  # one bucket
        ({"shard": 4, "level": "none"}, 1),
        ({"shard": 4, "level": "optimizer"}, 3 + 3 + 1),  # 3 units, and what stays whole
        ({"shard": 4, "level": "grads"}, 3 + 3 * 3 + 1),
        ({"shard": 4, "level": "params"}, 3 * (3 + 2 + 3) + 1),  # the tail is gathered once
        ({"replica": 2, "shard": 2, "level": "optimizer"}, 3 + 3 + 3 + 1),
        ({"replica": 2, "shard": 2, "level": "grads"}, 3 + 3 * 3 + 3 + 1),
    ],
)
def test_collectives_of_each_level(how, collectives):
    """3 microbatches: which of the collectives are repeated is what a level is about."""
    cost = _cost(toy_draft(microbatches=3, **how))
    assert cost.comm_s == pytest.approx(collectives * 0.5 * MS)
    assert cost.exposed_comm_s == pytest.approx(cost.comm_s)


@pytest.mark.parametrize(("recompute", "n_again"), [(False, 2), (True, 3)])
def test_lookups_and_the_last_layer_are_not_gathered_again(recompute, n_again):
    """4 units without the tie; of embed, block, normed block and head the middle two are."""
    graph = toy(tied=False)
    strategy = Strategy(shard=4, level="params", recompute=recompute)
    names = [layer.name for layer in graph.layers]
    draft = replace(toy_draft(microbatches=3), strategies=dict.fromkeys(names, strategy))
    cost = DataCost(Memory(graph, workload()), profile(), cluster(4))(draft)
    assert cost.comm_s == pytest.approx((3 * (4 + n_again + 4) + 1) * 0.5 * MS)


# Trainable bytes from the last parameter to the first: 28 of head, of each block 20, 20, 20 (norm
# and bias), 100 (matrix), 4 (scale), 20 (row), and 140 of embed.


def test_buckets_close_at_their_size():
    """One that is not full takes the next parameter whole, however large."""
    memory = Memory(GRAPH, workload())
    whole_bytes = memory.storage(toy_draft(), 0).gradients
    traffic = DataCost(memory, profile(), cluster(8)).traffic
    for bucket_bytes, sizes in (
        (whole_bytes, [whole_bytes]),
        (whole_bytes // 2, [28 + 184 + 60, 124 + 140]),
        (100, [28 + 160, 24 + 160, 24 + 140]),
        (1, [28, *[20, 20, 20, 100, 4, 20] * 2, 140]),
    ):
        draft = replace(toy_draft(replica=2), bucket_bytes=bucket_bytes)
        found = traffic.buckets(draft, tuple(draft.strategies))
        assert [each.n_bytes for each in found] == sizes
        assert _cost(draft).comm_s == pytest.approx(len(sizes) * 0.5 * MS)


def test_overlap_hides_all_but_the_last_bucket_and_no_more_than_the_backward_pass():
    draft = replace(toy_draft(replica=2), bucket_bytes=100)  # three buckets
    assert _cost(draft, overlap=0.5).exposed_comm_s == pytest.approx(3 * 0.25 * MS)
    assert _cost(draft, overlap=1.0).exposed_comm_s == pytest.approx(0.5 * MS)
    alone = _cost(replace(draft, overlap=False), overlap=1.0)
    assert alone.exposed_comm_s == pytest.approx(1.5 * MS)
    backward_s = 4 * 6 * 3 * MS
    slow = _cost(draft, overlap=1.0, collective_ms=1000)
    assert slow.exposed_comm_s == pytest.approx(3 - backward_s)


def test_groups_that_spread_over_hosts_take_the_cost_between_hosts():
    """The toy's collectives cost as many times more as there are hosts."""
    inside = toy_draft(replica=2, shard=4, level="optimizer", global_batch=16)
    alike = _cost(inside, hosts=(8,)).comm_s
    split = _cost(inside, hosts=(4, 4)).comm_s
    assert alike == pytest.approx((3 + 3 + 3 + 1) * 0.5 * MS)
    assert split == pytest.approx((3 + 3 + 2 * 3 + 2 * 1) * 0.5 * MS)
    straddling = _cost(inside, hosts=(3, 5)).comm_s
    assert straddling == pytest.approx(2 * alike)


# Memory


def test_causes_are_the_contract_s_and_shrink_with_the_level():
    deep = toy(6)
    fitting = Fitting(Memory(deep, workload()), profile(context_bytes=7), cluster(4))
    names = [layer.name for layer in deep.layers]
    rooms = [
        fitting(replace(toy_draft(), strategies=dict.fromkeys(names, Strategy(**how)))).need_bytes
        for how in (
            {"replica": 4},
            {"shard": 4, "level": "optimizer"},
            {"shard": 4, "level": "params"},
        )
    ]
    assert all(tuple(room) == MEMORY_CAUSES for room in rooms)
    assert rooms[0]["parameters"] > rooms[1]["parameters"] == rooms[2]["parameters"]
    assert rooms[1]["buffers"] > rooms[2]["buffers"]
    assert {room["context"] for room in rooms} == {7}


def test_activations_follow_microbatch_and_recomputation():
    memory = Memory(GRAPH, workload())

    def activations(**how) -> int:
        return memory.causes(toy_draft(**how), profile(saved_bytes=1000), 0)["activations"]

    assert activations(microbatches=2) == 4 * 1000 * 6
    assert activations(microbatches=5) == 4 * 1000 * 3
    assert activations(microbatches=2, recompute=True) == (4 * 100 + 1000) * 6


def test_gradients_take_the_place_of_what_was_saved():
    """Both were counted whole; in the only backward pass of a step one comes as the other goes."""
    memory, draft = Memory(GRAPH, workload()), replace(toy_draft(), bucket_bytes=1)
    own = [memory.layer_storage(name, draft.strategy, 0).gradients for name in draft.strategies]
    for saved, least in ((1, 0), (10**6, 12 * 10**6 * len(own) - sum(own))):
        causes = memory.causes(draft, profile(saved_bytes=saved), 0)
        assert causes["gradients"] == sum(own)
        assert causes["activations"] == least
    apart = replace(draft, microbatches=2)
    assert memory.causes(apart, profile(saved_bytes=10**6), 0)["activations"] == 6 * 10**6 * len(
        own
    )


def test_buckets_come_whole_with_their_first_gradient():
    """A bucket of all gradients is there while all that was saved is.

    Those of the last layer come while it runs, and with them those of the first, which are tied.
    """
    rows = {layer.name: Layered(saved=100, gradient=100, beside=7) for layer in GRAPH.layers}
    kept = 100 * len(rows)
    assert in_turn(GRAPH, rows, 0) == (0, 200 + 7)
    assert in_turn(GRAPH, rows, 150) == (0, 350 + 7)
    assert in_turn(GRAPH, rows, 10**6) == (0, kept + 7)


def test_the_peak_is_the_loss_or_the_backward_pass():
    """Logits of 21 elements a sample; what is recomputed comes when the loss is over."""
    memory = Memory(GRAPH, workload())

    def causes(saved_bytes: int) -> tuple[int, int]:
        draft = toy_draft(2, recompute=True)
        found = memory.causes(draft, profile(saved_bytes=saved_bytes), 0)
        return found["activations"], found["logits"]

    in_loss, in_backward = 21 * (4 + 3 * 4) * 6, 21 * 2 * 4 * 6
    assert causes(100) == (4 * 10 * 6, in_loss)
    assert causes(1000) == ((4 * 100 + 1000) * 6, in_backward)


def test_the_tightest_device_is_of_the_smallest_type():
    small = cluster(2, 2)
    kinds = {
        "round": small.device_types["round"],
        "tight": replace(small.device_types["round"], name="tight", memory_bytes=1000),
    }
    hosts = (small.hosts[0], replace(small.hosts[1], device_type="tight"))
    mixed = replace(small, device_types=kinds, hosts=hosts)
    fitting = Fitting(Memory(GRAPH, workload()), profile(), mixed)
    assert fitting(toy_draft(replica=2)).device == 0
    assert (fitting(toy_draft(replica=4)).device, fitting(toy_draft(replica=4)).have_bytes) == (
        2,
        1000,
    )
    rows = fitting.by_device(toy_draft(shard=4, level="optimizer"))
    assert fitting(toy_draft(shard=4, level="optimizer")).need_bytes == rows[2]
