"""Served syncs: with one worker, in any order of arrival, and as their papers state them."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, PowerSGD, TopK
from polyreme.algo.effects import Numbers
from polyreme.algo.feedback import EF21, GMC, ErrorFeedback, WorkerMomentum
from polyreme.algo.push import Push
from polyreme.algo.rule import LARS, SGD, AdamW
from polyreme.algo.sync import ASGD, SMEGA2, EveryStep, OrLoMo, OrMo, OrMoDA, ShiftedMomentum
from polyreme.algo.sync.momentum import group
from polyreme.algo.topology import Gossip
from polyreme.sim.compute import Heterogeneous, LogNormal
from served import Post, simulated
from workers import play

torch.set_num_threads(1)
GOLDEN = Path(__file__).parent / "golden"
MOMENTUM = [ShiftedMomentum(), SMEGA2(), OrMo(), OrMoDA(), OrLoMo(local_steps=3)]


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(weight_decay=0.01), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _torch(n_steps: int, **options) -> torch.Tensor:
    """The parameters after each step of torch's own SGD."""
    w = torch.nn.Parameter(_start())
    optimizer = torch.optim.SGD([w], lr=0.1, weight_decay=0.01, **options)
    seen = []
    for batch in range(n_steps):
        w.grad = _gradient(0, batch, w.detach())
        optimizer.step()
        seen.append(w.detach().clone())
    return torch.stack(seen)


def _alone(sync, n: int, **more) -> torch.Tensor:
    post, seen = Post(_of(sync, **more), _gradient, _start(), 1), []
    for _ in range(n):
        post.arrive(0)
        seen.append(post.params)
    return torch.stack(seen)


@pytest.mark.parametrize("sync", [OrMo(), OrMoDA(), ShiftedMomentum(), OrLoMo(local_steps=1)])
def test_one_worker_has_heavy_ball(sync) -> None:
    _close(_alone(sync, 9), _torch(9, momentum=0.9))


@pytest.mark.parametrize("steps", [2, 5])
def test_one_worker_of_orlomo_has_heavy_ball_whatever_its_local_steps(steps: int) -> None:
    """Local gradients are taken where the momentum of earlier pushes has gone."""
    ours = _alone(OrLoMo(local_steps=steps), 4)
    _close(ours, _torch(4 * steps, momentum=0.9)[steps - 1 :: steps])


@pytest.mark.parametrize("rule", [SGD(weight_decay=0.01), SGD(momentum=0.9), AdamW(), LARS()])
def test_one_worker_of_asgd_does_as_one_that_meets_itself(rule) -> None:
    ours = _alone(ASGD(), 7, rule=rule)
    theirs = play(_of(EveryStep(), rule=rule), _gradient, _start(), 1, 7).params[1:, 0]
    assert torch.equal(ours, theirs)


def test_one_worker_of_smega2_is_sent_nesterovs_parameters() -> None:
    post, seen = Post(_of(SMEGA2(momentum=0.9)), _gradient, _start(), 1), []
    for _ in range(9):
        post.arrive(0)
        seen.append(post.states[0]["params"])
    _close(torch.stack(seen), _torch(9, momentum=0.9, nesterov=True))


@pytest.mark.parametrize("estimate", ["cycle", "plain"])
def test_smega2_does_as_its_published_code(estimate: str) -> None:
    """Golden: what the authors' code gave on a quadratic, three workers, lr 0.05, momentum 0.9."""
    golden = np.load(GOLDEN / "smega2.npz")
    a, b = (torch.from_numpy(golden[name]) for name in ("A", "b"))
    start = torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)
    algorithm = DataParallel(rule=SGD(), sync=SMEGA2(momentum=0.9, estimate=estimate))
    post = Post(algorithm, lambda _r, _b, w: a @ w - b, start, 3, lr=0.05)
    for at, worker in enumerate(golden["order"]):
        post.arrive(int(worker))
        _close(post.params, torch.from_numpy(golden[f"{estimate}/master"][at]), atol=1e-6)
        sent = torch.from_numpy(golden[f"{estimate}/sent_estimate"][at])
        _close(post.states[int(worker)]["params"], sent, atol=1e-6)
        momentum = torch.from_numpy(golden[f"{estimate}/momentum_buffer"][at])
        _close(post.server["momentum"], momentum, atol=1e-6)


def _order(seed: int, n: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(n) for _ in range(length)]


def test_ormo_without_momentum_is_asgd() -> None:
    order = _order(1, 4, 40)
    ours = Post(_of(OrMo(momentum=0.0), rule=SGD()), _gradient, _start(), 4).order(order)
    theirs = Post(_of(ASGD(), rule=SGD()), _gradient, _start(), 4).order(order)
    _close(ours.params, theirs.params)


def test_orlomo_of_one_local_step_is_ormo_at_a_rate_by_delay() -> None:
    """eta_t gamma: 1 / K up to a delay of 2 K, 1 / delay beyond."""
    n, order = 3, [*_order(2, 2, 30), 2, *_order(3, 3, 30)]
    lr = 0.1

    class Rated(OrMo, frozen=True, kw_only=True, tag="Rated", tag_field="kind"):
        def rate_at(self, lr: float, delay: int, n: int) -> float:
            return lr / n if delay <= 2 * n else lr / delay

    ours = Post(_of(OrLoMo(local_steps=1), rule=SGD()), _gradient, _start(), n, lr=lr).order(order)
    theirs = Post(_of(Rated(), rule=SGD()), _gradient, _start(), n, lr=lr).order(order)
    assert max(record.delays[0] for record in ours.records) > 2 * n
    _close(ours.params, theirs.params)
    _close(ours.server["momentum"], theirs.server["momentum"])


@pytest.mark.parametrize("seed", range(50))
def test_ormo_is_the_sum_of_all_gradients_by_their_age_whatever_the_order(seed: int) -> None:
    """Twenty orders each: momentum and parameters in closed form."""
    for each in range(20):
        drawn = random.Random(1000 * seed + each)
        n, length, beta, lr = drawn.randint(1, 6), drawn.randint(1, 40), drawn.random(), 0.1
        came: list[tuple[int, torch.Tensor]] = []
        pending: dict[int, torch.Tensor] = {}

        def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
            pending[rank] = _gradient(rank, batch, w)  # noqa: B023
            return pending[rank]  # noqa: B023

        algorithm = DataParallel(rule=SGD(), sync=OrMo(momentum=beta))
        post = Post(algorithm, gradient, _start(4), n, lr=lr)
        for _ in range(length):
            worker = drawn.randrange(n)
            came.append((post.states[worker]["versions"]["0"], pending[worker]))
            post.arrive(worker)
        now = group(length - 1, n)
        ages = [now - group(version, n) for version, _ in came]
        assert min(ages) >= 0
        momentum = sum(beta**age * lr * g for age, (_, g) in zip(ages, came, strict=True))
        gone = sum(
            (1 - beta ** (age + 1)) / (1 - beta) * lr * g
            for age, (_, g) in zip(ages, came, strict=True)
        )
        _close(post.server["momentum"], momentum, atol=1e-10)
        _close(post.params, _start(4) - gone, atol=1e-10)


def test_ormo_weighs_groups_of_four_by_their_age() -> None:
    versions = ((0, 0, 0, 0), (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))
    groups = [{group(version, 4) for version in each} for each in versions]
    assert groups == [{0}, {1}, {2}, {3}]
    beta, marks = 0.5, torch.eye(13, dtype=torch.float64)
    algorithm = DataParallel(rule=SGD(), sync=OrMo(momentum=beta))
    post = Post(algorithm, lambda _r, _b, w: torch.zeros_like(w), torch.zeros(13).double(), 4)
    sync, me, state = algorithm.sync, post.team[4], post.server
    for version in range(13):  # each gradient as soon as its parameters were sent
        rows = (Numbers(weight=1.0),)
        push = Push(
            worker=0, number=version, version=version, lr=1.0, vectors=(marks[version],), rows=rows
        )
        changed = sync.applied(algorithm, state, push, 1.0, me)
        state = {**state, **changed, "version": version + 1}
    weights = [beta ** (3 - group(version, 4)) for version in range(13)]
    _close(state["momentum"], torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("sync", [ASGD(), *MOMENTUM])
def test_pieces_on_several_servers_come_to_the_same(sync) -> None:
    order = _order(5, 3, 30)
    split = msgspec.structs.replace(sync, servers=5)
    one = Post(_of(sync), _gradient, _start(), 3).order(order)
    five = Post(_of(split), _gradient, _start(), 3).order(order)
    assert torch.equal(one.params, five.params)


@pytest.mark.parametrize("sync", [ASGD(), *MOMENTUM])
def test_the_clock_plays_what_arrival_order_plays(sync) -> None:
    """The order that it records, played again push by push, gives the same bits."""
    came: list[int] = []
    algorithm = _of(sync)
    clock = simulated(
        algorithm,
        _gradient,
        _start(),
        4,
        compute=LogNormal(spread=1.0),
        on_record=lambda _me, record, _now_s: came.append(record.seen.workers[0]),
    )
    clock.play(12 * sync.per_push)
    pushes = came[:: sync.per_push]
    assert len(set(pushes)) == 4
    assert len(pushes) == 48
    again = Post(algorithm, _gradient, _start(), 4).order(pushes)
    assert torch.equal(again.params, sync.whole(clock.states[4:], clock.states[:4]))


def test_a_step_is_as_many_pushes_as_workers_and_fast_workers_make_more_of_them() -> None:
    records = []
    clock = simulated(
        _of(ASGD()),
        _gradient,
        _start(),
        4,
        compute=Heterogeneous(seconds=1.0, slow_fraction=0.25, slow_factor=5.0),
        on_record=lambda _me, record, _now_s: records.append(record),
    )
    clock.play(16)
    assert len(records) == 64
    assert [record.step for record in records] == [1 + at // 4 for at in range(64)]
    by_worker = [sum(r.seen.workers == (w,) for r in records) for w in range(4)]
    assert sorted(by_worker)[0] * 3 < sorted(by_worker)[1]
    assert all(record.delays[0] >= 0 for record in records)
    slow = by_worker.index(min(by_worker))
    delays = [r.delays[0] for r in records if r.seen.workers == (slow,)]
    assert max(delays) >= 12  # three others make five pushes each while it makes one


def test_what_is_drained_goes_on_as_if_nothing_had_been() -> None:
    """Between rounds nothing is in a frame: states are all that goes on."""
    algorithm = _of(OrMo(servers=2))
    clock = simulated(algorithm, _gradient, _start(), 4, compute=LogNormal(spread=1.0))
    clock.play(5)
    clock.drain()
    applied = [state["version"] for state in clock.states[4:]]
    pushed = sum(state["pushes"] for state in clock.states[:4])
    assert applied == [pushed, pushed]
    assert pushed >= 20
    assert not any(any(state["awaits"].values()) for state in clock.states[:4])
    other = simulated(algorithm, _gradient, _start(), 4, states=clock.states)
    other.play(9)
    assert sum(state["step"] for state in other.states[:4]) >= 36
    assert other.states[4]["version"] >= 36


@pytest.mark.parametrize(
    "more", [{"compress": TopK(ratio=0.25), "feedback": ErrorFeedback()}, {"compress": QSGD()}]
)
@pytest.mark.parametrize("servers", [1, 3])
def test_pushes_may_be_compressed(more, servers: int) -> None:
    order = _order(7, 3, 200)
    dense = Post(_of(ASGD(servers=servers)), _gradient, _start(), 3, lr=0.02)
    packed = Post(_of(ASGD(servers=servers), **more), _gradient, _start(), 3, lr=0.02)
    first = float((dense.order(order).params - packed.params).norm())
    last = float((dense.params - packed.order(order).params).norm())
    assert last < first
    assert sum(packed.nbytes[:3]) < sum(dense.nbytes[:3])


def test_a_push_that_is_not_finite_is_answered_and_not_applied() -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        found = _gradient(rank, batch, w)
        return found * math.nan if (rank, batch) == (1, 0) else found

    post = Post(_of(OrMo()), gradient, _start(), 2).order([0, 1])
    before = post.params
    assert post.records[-1].seen.bad == (1,)
    assert post.server["version"] == 1
    assert post.states[1]["versions"]["0"] == 1
    post.order([1, 0])
    assert post.server["version"] == 3
    assert post.params.isfinite().all()
    assert not torch.equal(before, post.params)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"rule": AdamW()}, "data_parallel.rule.kind"),
        ({"rule": SGD(momentum=0.9)}, "data_parallel.rule.kind"),
    ],
)
def test_momentum_is_in_one_place(more, path: str) -> None:
    (found,) = _of(OrMo(), **more).check()
    assert found.path == path


def test_what_needs_all_workers_at_once_is_refused() -> None:
    for more, path in (
        ({"topology": Gossip()}, "topology.kind"),
        ({"aggregate": MajorityVote()}, "aggregate.kind"),
        ({"feedback": EF21()}, "feedback.kind"),
        ({"feedback": GMC()}, "feedback.kind"),
    ):
        assert f"data_parallel.{path}" in [each.path for each in _of(ASGD(), **more).check()]
    assert not _of(ASGD(), feedback=WorkerMomentum()).check()
    assert not _of(ASGD(), compress=PowerSGD().apart).check()
    (found,) = _of(ASGD(servers=2), rule=LARS()).check()
    assert found.path == "data_parallel.sync.servers"


def test_weight_decay_that_a_feedback_saw_is_not_taken_again() -> None:
    more = {"rule": SGD(weight_decay=0.1), "feedback": WorkerMomentum(momentum=0.5)}
    theirs = play(_of(EveryStep(), **more), _gradient, _start(), 1, 7).params[1:, 0]
    assert torch.equal(_alone(ASGD(), 7, **more), theirs)


def test_a_rule_may_have_its_own_rate_for_each_delay() -> None:
    """As Zhang et al. 2016: the rate over the delay, or as it is if there is none."""

    class Aware(SGD, frozen=True, kw_only=True, tag="Aware", tag_field="kind"):
        def at_delay(self, lr: float, delay: int, n: int) -> float:
            assert n == 3
            return lr / max(1, delay)

    given: dict[int, torch.Tensor] = {}

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        given[rank] = _gradient(rank, batch, w)
        return given[rank]

    post, w = Post(_of(ASGD(), rule=Aware()), gradient, _start(), 3), _start()
    for worker in _order(4, 3, 40):
        found = given[worker]
        post.arrive(worker)
        w = w - 0.1 / max(1, post.records[-1].delays[0]) * found
        _close(post.params, w)
    assert max(record.delays[0] for record in post.records) > 3


def test_a_push_that_is_not_applied_is_told_of_without_weight() -> None:
    """Its other batches too: their loss is of no step."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return _gradient(rank, batch, w) * (math.nan if batch == 1 else 1.0)

    post = Post(_of(OrLoMo(local_steps=3)), gradient, _start(), 1).order([0, 0])
    assert [record.seen.weight for record in post.records] == [0, 0, 0, 1, 1, 1]
    assert [record.seen.bad for record in post.records] == [(), (0,), (0,), (), (), ()]


def test_what_has_no_labels_takes_nothing_from_the_memory_of_a_feedback() -> None:
    """As such a push is not applied, what would be sent with it would be lost."""
    more = {"compress": TopK(ratio=0.25), "feedback": ErrorFeedback()}
    post = Post(
        _of(ASGD(), **more), _gradient, _start(), 1, weight=lambda _r, batch: float(batch != 1)
    )
    memory = post.states[0]["exchange"]["0"]["feedback"]["error"]
    post.arrive(0)  # what it then pushes has no labels
    assert torch.equal(post.states[0]["exchange"]["0"]["feedback"]["error"], memory)
    assert memory.any()
    before = post.params
    post.arrive(0)
    assert torch.equal(post.params, before)


@pytest.mark.parametrize("sync", [ASGD(), *MOMENTUM])
def test_a_push_that_began_at_what_its_server_lost_counts_as_of_now(sync) -> None:
    """None is put in a group that has yet to come, where it would count beta^-j."""
    post = Post(_of(sync), _gradient, _start(), 3, lr=0.001).order([0, 1, 2])
    kept, told = dict(post.server), 3 * sync.per_push
    post.order([0, 1, 2] * 100)
    post.states[3] = kept  # the snapshot that it goes back to
    before = len(post.records)
    post.order([0, 1, 2])
    assert [record.delays for record in post.records[before:]] == [(0,)] * told
    assert (post.params - kept["params"]).abs().max() < 0.1
