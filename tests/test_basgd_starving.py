"""BASGD: which buffers are absent or starve, who is dealt out anew, and who is named for it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from basgd import NEVER_S, Middle, gradient_of, of, start
from polyreme.algo.rule import SGD
from polyreme.algo.sync import BASGD
from polyreme.sim.compute import Constant
from polyreme.sim.faults import Crash
from served import Post, simulated

torch.set_num_threads(1)


def _to(post: Post, now_s: float, order: Sequence[int]) -> int:
    """Let it be that time, and deliver; the version then."""
    post.now_s = now_s
    post.order(order)
    return int(post.server["version"])


def test_a_dead_worker_alone_in_its_buffer_stalls_all_without_a_timeout() -> None:
    post = Post(of(BASGD(buffers=3, timeout_s=NEVER_S)), gradient_of, start(), 5)
    assert _to(post, 0.0, [0, 1, 2]) == 1
    post.leave(2)
    assert _to(post, 1e9, [0, 1, 3, 4] * 20) == 1
    assert post.states[0]["pushes"] > 20  # and is answered


def test_workers_are_dealt_out_anew_when_a_buffer_starves() -> None:
    post = Post(of(BASGD(buffers=3, timeout_s=10.0)), gradient_of, start(), 5)
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
    post = Post(of(BASGD(buffers=2, timeout_s=1.0)), gradient_of, start(), 3)
    assert _to(post, 0.5, [0, 0, 2, 2]) == 0
    assert _to(post, 2.0, [0, 2]) == 1
    assert [r.suspects for r in post.records] == [(), (), (), (), (1,), ()]
    assert _to(post, 2.5, [1, 2]) == 2  # it is back, in the first buffer


def test_no_step_is_made_of_fewer_live_workers_than_buffers_until_more_push() -> None:
    post = Post(of(BASGD(buffers=3, timeout_s=1.0)), gradient_of, start(), 4)
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
        return gradient_of(rank, batch, w) * (math.nan if batch >= silent.get(rank, 10**9) else 1.0)

    return gradient


def test_a_step_waits_for_no_more_of_what_is_not_finite_than_the_aggregate_bears() -> None:
    algorithm = of(BASGD(buffers=5, timeout_s=NEVER_S), aggregate=Middle())
    post = Post(algorithm, _nan({1: 1, 3: 1, 4: 2}), start(), 5)
    assert _to(post, 0.0, range(5)) == 1
    assert _to(post, 0.0, [3, 1, 0, 2]) == 1  # one may yet come
    assert _to(post, 0.0, [4]) == 2
    assert post.server["aggregate"] == {"calls": 2, "absent": 2}
    assert _to(post, 0.0, [0, 2]) == 2
    assert post.records[-2].suspects == (1, 3)
    assert _to(post, 0.0, [4] * 5 + [1, 3, 0, 2]) == 2  # of which it bears two


def test_a_buffer_with_a_push_that_counts_is_not_absent_for_another_that_does_not() -> None:
    algorithm = of(BASGD(buffers=3, timeout_s=NEVER_S), aggregate=Middle())
    post = Post(algorithm, _nan({3: 0}), start(), 6)
    assert _to(post, 0.0, [0, 3, 1, 2]) == 1
    assert post.server["aggregate"]["absent"] == 0
    assert _to(post, 0.0, [3, 1, 2]) == 2
    assert post.server["aggregate"]["absent"] == 1
    assert _to(post, 0.0, [0, 1, 2]) == 3
    assert post.server["aggregate"]["absent"] == 1


def test_buffers_of_the_silent_are_absent_until_they_push_where_the_aggregate_bears_it() -> None:
    algorithm = of(BASGD(buffers=4, timeout_s=1.0), aggregate=Middle())
    post = Post(algorithm, gradient_of, start(), 4)
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
    post = Post(of(BASGD(buffers=2, timeout_s=1.0)), gradient_of, start(), 3)
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
            Post(of(BASGD(buffers=3, timeout_s=timeout_s)), gradient_of, start(), 6)
            for timeout_s in (1e-3, NEVER_S)
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
        post = Post(of(sync), gradient, torch.zeros(7, dtype=torch.float64), 7)
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
    post = Post(of(BASGD(buffers=2, timeout_s=5.0)), gradient_of, start(), 3)
    assert _to(post, 1000.0, [0, 1]) == 1
    assert _to(post, 1.0, [0, 0, 2, 2]) == 1
    assert post.records[-1].suspects == ()
    assert _to(post, 6.1, [0, 2]) == 2


# On the virtual clock ---------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [NEVER_S, 5.0])
def test_a_crash_on_the_virtual_clock_stalls_or_is_dealt_around(timeout_s: float) -> None:
    target, records = torch.sin(torch.arange(12).double()), []
    clock = simulated(
        of(BASGD(buffers=3, timeout_s=timeout_s), rule=SGD()),
        lambda _rank, _batch, w: w - target,
        start(),
        5,
        compute=Constant(seconds=1.0),
        faults=[Crash(worker=2, at_s=3.5)],
        on_record=lambda _me, record, now_s: records.append((record, now_s)),
    )
    clock.play(100)
    version, params = clock.states[5]["version"], clock.states[5]["params"]
    if timeout_s == NEVER_S:
        assert version == 3
        assert (params - target).norm() > 0.5 * (start() - target).norm()
        return
    assert version > 80
    assert (params - target).norm() < 1e-2
    named = [now_s for record, now_s in records if 2 in record.suspects]
    assert len(named) == 1
    assert 8.0 < named[0] < 10.0
