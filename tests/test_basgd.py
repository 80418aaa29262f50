"""BASGD: its buffers over orders of arrival, what starves and is dealt out anew, who is named."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from polyreme.algo.aggregate import MajorityVote, Mean
from polyreme.algo.aggregate.kind import AggregatorKind, Combined, State
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import ErrorFeedback, WorkerMomentum
from polyreme.algo.rule import SGD, SNGM, AdamW
from polyreme.algo.sync import ASGD, BASGD, EveryStep
from polyreme.algo.topology import Gossip
from polyreme.algo.vector import Layout
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.driver import Simulation
from polyreme.sim.faults import Crash
from served import Post, simulated, team
from workers import play

torch.set_num_threads(1)


class Middle(AggregatorKind, frozen=True, kw_only=True, tag="Middle", tag_field="kind"):
    """The middle of each entry; the row farthest from it is a suspect, unless some are absent.

    Counts calls and absent rows.
    """

    robust: ClassVar[bool] = True

    @property
    def bears(self) -> int:
        return 2

    def init(self, like: torch.Tensor) -> State:
        return {"calls": 0, "absent": 0}

    def combine(self, rows: Sequence[torch.Tensor], state: State, absent: int = 0) -> Combined:
        x = torch.stack(list(rows))
        out = x.sort(0).values[len(rows) // 2]
        far = () if absent else (int((x - out).norm(dim=1).argmax()),)
        return out, {"calls": state["calls"] + 1, "absent": state["absent"] + absent}, far


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _of(sync: Any, **more: Any) -> DataParallel:
    return DataParallel(**{"rule": SGD(weight_decay=0.01), "sync": sync, **more})


def _order(seed: int, n: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(n) for _ in range(length)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rule": SGD(momentum=0.9)},
        {"rule": AdamW()},
        {"feedback": WorkerMomentum()},
        {
            "compress": TopK(ratio=0.3),
            "feedback": ErrorFeedback(),
            "compress_back": TopK(ratio=0.5),
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("servers", [1, 2])
def test_one_buffer_and_the_mean_are_asgd(more: dict[str, Any], servers: int) -> None:
    order = _order(1, 4, 60)
    ours = Post(_of(BASGD(servers=servers), **more), _gradient, _start(), 4).order(order)
    theirs = Post(_of(ASGD(servers=servers), **more), _gradient, _start(), 4).order(order)
    assert torch.equal(ours.params, theirs.params)
    assert not torch.equal(ours.params, _start())
    assert [r.delays for r in ours.records] == [r.delays for r in theirs.records]


def test_a_buffer_for_each_worker_and_the_mean_are_synchronous_training() -> None:
    """Of gradients that go by no parameters: all but the last are answered before the step."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(w.numel(), dtype=w.dtype) * (rank + 1) + batch)

    n, steps = 4, 6
    rule = SGD(momentum=0.9)
    order = list(range(n)) * steps
    ours = Post(_of(BASGD(buffers=n), rule=rule), gradient, _start(), n).order(order)
    theirs = play(_of(EveryStep(), rule=rule), gradient, _start(), n, steps).params[-1, 0]
    torch.testing.assert_close(ours.params, theirs, rtol=0, atol=1e-14)
    assert ours.server["version"] == steps


def _model(
    n: int, buffers: int, order: Sequence[int], aggregate: Any, lr: float
) -> tuple[np.ndarray, list[int]]:
    """Parameters after an order of arrival as the paper's algorithm has them, and delays."""
    i = np.arange(5)
    w = np.linspace(-1, 1, 5)
    held = [(w, 0)] * n
    batches, h, count, version, delays = [0] * n, np.zeros((buffers, 5)), np.zeros(buffers), 0, []
    for s in order:
        at, begun = held[s]
        g = (1 + i % 3) * (at - (s + 1) * np.sin(i + s + batches[s]))
        batches[s] += 1
        b = s % buffers
        count[b] += 1
        h[b] = ((count[b] - 1) * h[b] + g) / count[b]
        delays.append(version - begun)
        if count.all():
            w = w - lr * aggregate(h)
            h, count, version = np.zeros((buffers, 5)), np.zeros(buffers), version + 1
        held[s] = (w, version)
    return w, delays


@pytest.mark.parametrize(
    ("aggregate", "plain"),
    [
        (Mean(), lambda h: h.mean(0)),
        (Middle(), lambda h: np.sort(h, 0)[len(h) // 2]),
        (MajorityVote(), lambda h: np.sign(np.sign(h).sum(0))),
    ],
    ids=["mean", "middle", "vote"],
)
def test_buffers_over_orders_of_arrival_are_as_the_paper_has_them(aggregate, plain) -> None:
    drawn = random.Random(5)
    stepped = 0
    for seed in range(340):
        n = drawn.randrange(1, 7)
        buffers = drawn.randrange(1, n + 1)
        order = _order(seed, n, 25)
        algorithm = DataParallel(rule=SGD(), sync=BASGD(buffers=buffers), aggregate=aggregate)
        post = Post(algorithm, _gradient, _start(5), n, lr=0.05).order(order)
        w, delays = _model(n, buffers, order, plain, 0.05)
        np.testing.assert_allclose(post.params.numpy(), w, rtol=0, atol=1e-12)
        assert [r.delays[0] for r in post.records] == delays
        stepped += post.server["version"]
    assert stepped > 1000


def test_pushes_in_one_order_come_to_the_same_on_one_server_and_two() -> None:
    order, found = _order(3, 5, 80), []
    for servers in (1, 2):
        sync = BASGD(buffers=3, servers=servers)
        post = Post(_of(sync, aggregate=MajorityVote()), _gradient, _start(), 5).order(order)
        found.append(post.params)
    assert torch.equal(*found)


def test_the_aggregate_keeps_its_state_at_the_server_and_suspects_are_workers() -> None:
    """Of five workers in three buffers the fourth, in the first, pushes what is far from all."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.full_like(w, 1e6 if rank == 3 else 1.0 + 0.01 * rank)

    algorithm = _of(BASGD(buffers=3), aggregate=Middle())
    post = Post(algorithm, gradient, _start(), 5).order([0, 1, 3, 4, 2, 0, 1, 2, 0])
    assert post.server["aggregate"] == {"calls": 2, "absent": 0}
    assert [record.suspects for record in post.records[:6]] == [(), (), (), (), (), (0, 3)]
    assert len(post.records[-1].suspects) == 1


# Starving ---------------------------------------------------------------------------------------


def _to(post: Post, now_s: float, order: Sequence[int]) -> int:
    """Let it be that time, and deliver; the version then."""
    post.now_s = now_s
    post.order(order)
    return int(post.server["version"])


def test_a_dead_worker_alone_in_its_buffer_stalls_all_without_a_timeout() -> None:
    post = Post(_of(BASGD(buffers=3, timeout_s=None)), _gradient, _start(), 5)
    assert _to(post, 0.0, [0, 1, 2]) == 1
    post.leave(2)
    assert _to(post, 1e9, [0, 1, 3, 4] * 20) == 1
    assert post.states[0]["pushes"] > 20  # and is answered


def test_workers_are_dealt_out_anew_when_a_buffer_starves() -> None:
    post = Post(_of(BASGD(buffers=3, timeout_s=10.0)), _gradient, _start(), 5)
    assert _to(post, 5.0, [0, 1, 2]) == 1
    assert _to(post, 15.0, [0, 0, 1, 1, 3, 3]) == 1  # no longer than it may
    assert _to(post, 15.1, [4]) == 1  # which pushed once
    assert post.records[-1].suspects == ()
    assert _to(post, 15.2, [1]) == 1
    assert post.records[-1].suspects == (2,)
    assert post.server["buffer"] == {"0": 0, "1": 1, "3": 2, "2": 0, "4": 1}
    assert post.server["counts"] == {"0": 0, "1": 1, "2": 0}  # emptied but for what came then
    assert _to(post, 15.3, [0, 3]) == 2
    assert _to(post, 99.0, [0, 1, 3]) == 3
    assert post.server["buffer"]["3"] == 2  # for as long as it does not starve


def test_a_silent_worker_that_is_there_is_dealt_around_like_a_dead_one() -> None:
    post = Post(_of(BASGD(buffers=2, timeout_s=1.0)), _gradient, _start(), 3)
    assert _to(post, 0.5, [0, 0, 2, 2]) == 0
    assert _to(post, 2.0, [0, 2]) == 1
    assert [r.suspects for r in post.records] == [(), (), (), (), (1,), ()]
    assert _to(post, 2.5, [1, 2]) == 2  # it is back, in the first buffer


def test_no_step_is_made_of_fewer_live_workers_than_buffers_until_more_push() -> None:
    post = Post(_of(BASGD(buffers=3, timeout_s=1.0)), _gradient, _start(), 4)
    post.leave(2)
    post.leave(1)
    assert _to(post, 5.0, [0, 3] * 10) == 0
    assert [record.suspects for record in post.records] == [()] * 2 + [(1, 2)] * 18
    post.come(1)
    assert _to(post, 6.0, [1, 1, 1, 0, 3]) == 1  # first that it is there, then what it computed
    assert post.records[-1].suspects == ()


def _nan(silent: dict[int, int]) -> Any:
    """Gradients that are not finite from a batch on, of some workers."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return _gradient(rank, batch, w) * (math.nan if batch >= silent.get(rank, 10**9) else 1.0)

    return gradient


def test_a_step_waits_for_no_more_of_what_is_not_finite_than_the_aggregate_bears() -> None:
    algorithm = _of(BASGD(buffers=5, timeout_s=None), aggregate=Middle())
    post = Post(algorithm, _nan({1: 1, 3: 1, 4: 2}), _start(), 5)
    assert _to(post, 0.0, range(5)) == 1
    assert _to(post, 0.0, [3, 1, 0, 2]) == 1  # one may yet come
    assert _to(post, 0.0, [4]) == 2
    assert post.server["aggregate"] == {"calls": 2, "absent": 2}
    assert _to(post, 0.0, [0, 2]) == 2
    assert post.records[-2].suspects == (1, 3)
    assert _to(post, 0.0, [4] * 5 + [1, 3, 0, 2]) == 2  # of which it bears two


def test_a_buffer_with_a_push_that_counts_is_not_absent_for_another_that_does_not() -> None:
    algorithm = _of(BASGD(buffers=3, timeout_s=None), aggregate=Middle())
    post = Post(algorithm, _nan({3: 0}), _start(), 6)
    assert _to(post, 0.0, [0, 3, 1, 2]) == 1
    assert post.server["aggregate"]["absent"] == 0
    assert _to(post, 0.0, [3, 1, 2]) == 2
    assert post.server["aggregate"]["absent"] == 1
    assert _to(post, 0.0, [0, 1, 2]) == 3
    assert post.server["aggregate"]["absent"] == 1


def test_buffers_of_the_silent_are_absent_until_they_push_where_the_aggregate_bears_it() -> None:
    algorithm = _of(BASGD(buffers=4, timeout_s=1.0), aggregate=Middle())
    post = Post(algorithm, _gradient, _start(), 4)
    assert _to(post, 0.5, [0, 1, 3] * 3) == 0
    assert _to(post, 1.1, [0]) == 0
    assert post.records[-1].suspects == (2,)
    assert post.server["buffer"] == {"0": 0, "1": 1, "3": 2, "2": 3}
    assert _to(post, 1.2, [1, 3] + [0, 1, 3] * 4) == 5  # and no more seconds are waited for
    assert post.records[-3].suspects == (2,)  # of the step before, told with the next push
    assert post.server["aggregate"]["absent"] == 5
    assert _to(post, 1.3, [2, 0, 1, 3]) == 6
    assert post.server["aggregate"]["absent"] == 5
    assert _to(post, 1.4, [0, 1, 3]) == 6  # it is waited for again


def test_a_gone_worker_s_pushes_do_not_make_it_live() -> None:
    post = Post(_of(BASGD(buffers=2, timeout_s=1.0)), _gradient, _start(), 3)
    post.order([0, 0, 0])
    post.leave(0)
    assert _to(post, 5.0, [2] * 10) == 0


def test_a_timeout_shorter_than_a_gradient_does_no_harm() -> None:
    """Before some pushed twice others had no time to push once."""
    for seed in range(20):
        drawn, order = random.Random(seed), []
        for _ in range(30):
            order += drawn.sample(range(6), 6)
        ours, theirs = (
            Post(_of(BASGD(buffers=3, timeout_s=timeout_s)), _gradient, _start(), 6)
            for timeout_s in (1e-3, None)
        )
        for at, worker in enumerate(order):
            ours.now_s = float(at)
            ours.arrive(worker)
        theirs.order(order)
        assert ours.server["version"] >= 0.7 * theirs.server["version"] > 20


def test_no_worker_is_in_two_buffers_of_a_step() -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(rank), 7).to(w.dtype)

    n_dealt = 0
    for seed in range(30):
        drawn = random.Random(seed)
        sync = BASGD(buffers=3, timeout_s=2.0)
        post = Post(_of(sync), gradient, torch.zeros(7, dtype=torch.float64), 7)
        often = [drawn.choice([0, 0, 1, 5]) for _ in range(7)]
        for worker in drawn.choices(range(7), [often[w] + 0.02 for w in range(7)], k=120):
            post.now_s += drawn.expovariate(2.0)
            before = post.server["buffer"]
            post.arrive(worker)
            n_dealt += post.server["buffer"] != before
            sums, counts = post.server["sums"], post.server["counts"]
            x = torch.stack([sums[b] * bool(counts[b]) for b in sums])
            assert int((x != 0).sum(0).max()) <= 1
    assert n_dealt > 10


def test_a_clock_that_begins_anew_deals_nobody_out_at_once() -> None:
    post = Post(_of(BASGD(buffers=2, timeout_s=5.0)), _gradient, _start(), 3)
    assert _to(post, 1000.0, [0, 1]) == 1
    assert _to(post, 1.0, [0, 0, 2, 2]) == 1
    assert post.records[-1].suspects == ()
    assert _to(post, 6.1, [0, 2]) == 2


# On the virtual clock ---------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_crash_on_the_virtual_clock_stalls_or_is_dealt_around(timeout_s: float | None) -> None:
    target, records = torch.sin(torch.arange(12).double()), []
    clock = simulated(
        _of(BASGD(buffers=3, timeout_s=timeout_s), rule=SGD()),
        lambda _rank, _batch, w: w - target,
        _start(),
        5,
        compute=Constant(seconds=1.0),
        faults=[Crash(worker=2, at_s=3.5)],
        on_record=lambda _me, record, now_s: records.append((record, now_s)),
    )
    clock.play(100)
    version, params = clock.states[5]["version"], clock.states[5]["params"]
    if timeout_s is None:
        assert version == 3
        assert (params - target).norm() > 0.5 * (_start() - target).norm()
        return
    assert version > 80
    assert (params - target).norm() < 1e-2
    named = [now_s for record, now_s in records if 2 in record.suspects]
    assert len(named) == 1
    assert 8.0 < named[0] < 10.0


def _attacked(sync: Any, aggregate: Any, attack: Any, **more: Any) -> tuple[torch.Tensor, Any]:
    """What is left of the way to a minimum with two hostile workers of nine, and records."""
    target, n, records = torch.sin(torch.arange(12).double()), 9, []
    algorithm = _of(sync, rule=SGD(), aggregate=aggregate, **more)
    players = team(algorithm, Layout.of({"w": (12,)}), n, lr=0.1)
    states = [algorithm.sync.init(algorithm, _start(), me) for me in players]

    def found(rank: int, params: torch.Tensor, batch: int) -> Computed:
        g = params - target + 0.05 * torch.sin(torch.arange(12).double() * (rank + 1) + batch)
        g = attack(g) if rank in (1, 4) else g
        return Computed(gradient=g, loss=0.0, weight=1.0, n_samples=1, known_finite=True)

    clock = Simulation(
        algorithm,
        players,
        states,
        found,
        compute=LogNormal(spread=1.0),
        on_record=lambda _me, record, _s: records.append(record),
    )
    clock.play(150)
    return (algorithm.sync.whole(clock.states[n:]) - target).norm(), records


NAN = {"nan": lambda g: g * math.nan, "infinity": lambda g: g + math.inf}
HOSTILE = {
    **NAN,
    "one entry": lambda g: torch.where(torch.arange(12) == 3, math.nan, g),
    "sign flip": lambda g: -10 * g,
    "huge": lambda g: torch.full_like(g, 1e18),
}


@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("more", [{}, {"feedback": WorkerMomentum(momentum=0.5)}], ids=str)
def test_hostile_pushes_spoil_asgd_and_not_basgd(attack: Any, more: dict[str, Any]) -> None:
    way = (_start() - torch.sin(torch.arange(12).double())).norm()
    left, records = _attacked(BASGD(buffers=5), Middle(), attack, **more)
    assert left < 0.1 * way
    assert not _attacked(ASGD(), Mean(), attack, **more)[0] < way
    suspects = [worker for record in records for worker in record.suspects]
    assert {1, 4} <= set(suspects)


@pytest.mark.parametrize("attack", NAN.values(), ids=NAN)
def test_a_push_that_is_not_finite_reaches_no_buffer_whatever_its_worker_says(attack: Any) -> None:
    """Also under a mean; its worker is a suspect at each, and its loss does not count."""
    left, records = _attacked(BASGD(buffers=3), Mean(), attack)
    assert left < 0.1
    for record in records:
        hostile = record.seen.workers[0] in (1, 4)
        assert record.suspects == (record.seen.workers if hostile else ())
        assert bool(record.seen.weight) != hostile
    assert sum(bool(record.suspects) for record in records) > 100


# Refused ----------------------------------------------------------------------------------------


def test_more_buffers_than_workers_are_refused() -> None:
    (found,) = _of(BASGD(buffers=4)).refused(3)
    assert (found.path, found.value, found.legal) == ("data_parallel.sync.buffers", 4, "1 to 3")
    assert not _of(BASGD(buffers=3)).refused(3)


@pytest.mark.parametrize(
    ("sync", "member", "path"),
    [
        (BASGD(servers=2), {"aggregate": Middle()}, "sync.servers"),
        (BASGD(servers=2), {"rule": SNGM()}, "sync.servers"),
        (BASGD(), {"topology": Gossip()}, "topology.kind"),
        (ASGD(), {"aggregate": Middle()}, "aggregate.kind"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(sync, member, path: str) -> None:
    assert f"data_parallel.{path}" in [each.path for each in _of(sync, **member).check()]


def test_an_aggregate_of_whole_vectors_goes_with_one_server_and_compressed_pushes() -> None:
    assert not _of(BASGD(buffers=3), aggregate=Middle(), compress=QSGD()).check()
    assert not _of(BASGD(buffers=3, servers=2), aggregate=MajorityVote()).check()
