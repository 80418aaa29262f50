"""BASGD: its buffers over orders of arrival, hostile pushes, what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from basgd import Middle, arrivals, gradient_of, of, start
from polyreme.algo.aggregate import MajorityVote, Mean
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import ErrorFeedback, WorkerMomentum
from polyreme.algo.rule import SGD, SNGM, AdamW
from polyreme.algo.sync import ASGD, BASGD, EveryStep
from polyreme.algo.topology import Gossip
from polyreme.algo.vector import Layout
from polyreme.sim.compute import LogNormal
from polyreme.sim.driver import Simulation
from served import Post, team
from workers import play

torch.set_num_threads(1)


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
    order = arrivals(1, 4, 60)
    ours = Post(of(BASGD(servers=servers), **more), gradient_of, start(), 4).order(order)
    theirs = Post(of(ASGD(servers=servers), **more), gradient_of, start(), 4).order(order)
    assert torch.equal(ours.params, theirs.params)
    assert not torch.equal(ours.params, start())
    assert [r.delays for r in ours.records] == [r.delays for r in theirs.records]


def test_a_buffer_for_each_worker_and_the_mean_are_synchronous_training() -> None:
    """Of gradients that go by no parameters: all but the last are answered before the step."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(w.numel(), dtype=w.dtype) * (rank + 1) + batch)

    n, steps = 4, 6
    rule = SGD(momentum=0.9)
    order = list(range(n)) * steps
    ours = Post(of(BASGD(buffers=n), rule=rule), gradient, start(), n).order(order)
    theirs = play(of(EveryStep(), rule=rule), gradient, start(), n, steps).params[-1, 0]
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


@pytest.mark.slice(1)
@pytest.mark.slice(1)
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
        order = arrivals(seed, n, 25)
        algorithm = DataParallel(rule=SGD(), sync=BASGD(buffers=buffers), aggregate=aggregate)
        post = Post(algorithm, gradient_of, start(5), n, lr=0.05).order(order)
        w, delays = _model(n, buffers, order, plain, 0.05)
        np.testing.assert_allclose(post.params.numpy(), w, rtol=0, atol=1e-12)
        assert [r.delays[0] for r in post.records] == delays
        stepped += post.server["version"]
    assert stepped > 1000


def test_pushes_in_one_order_come_to_the_same_on_one_server_and_two() -> None:
    order, found = arrivals(3, 5, 80), []
    for servers in (1, 2):
        sync = BASGD(buffers=3, servers=servers)
        post = Post(of(sync, aggregate=MajorityVote()), gradient_of, start(), 5).order(order)
        found.append(post.params)
    assert torch.equal(*found)


def test_the_aggregate_keeps_its_state_at_the_server_and_suspects_are_workers() -> None:
    """Of five workers in three buffers the fourth, in the first, pushes what is far from all."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.full_like(w, 1e6 if rank == 3 else 1.0 + 0.01 * rank)

    algorithm = of(BASGD(buffers=3), aggregate=Middle())
    post = Post(algorithm, gradient, start(), 5).order([0, 1, 3, 4, 2, 0, 1, 2, 0])
    assert post.server["aggregate"] == {"calls": 2, "absent": 0}
    assert [record.suspects for record in post.records[:6]] == [(), (), (), (), (), (0, 3)]
    assert len(post.records[-1].suspects) == 1


# Hostile workers on the virtual clock -----------------------------------------------------------


def _attacked(sync: Any, aggregate: Any, attack: Any, **more: Any) -> tuple[torch.Tensor, Any]:
    """What is left of the way to a minimum with two hostile workers of nine, and records."""
    target, n, records = torch.sin(torch.arange(12).double()), 9, []
    algorithm = of(sync, rule=SGD(), aggregate=aggregate, **more)
    players = team(algorithm, Layout.of({"w": (12,)}), n, lr=0.1)
    states = [algorithm.sync.init(algorithm, start(), me) for me in players]

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


@pytest.mark.slice(3)
@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("more", [{}, {"feedback": WorkerMomentum(momentum=0.5)}], ids=str)
def test_hostile_pushes_spoil_asgd_and_not_basgd(attack: Any, more: dict[str, Any]) -> None:
    way = (start() - torch.sin(torch.arange(12).double())).norm()
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
    (found,) = of(BASGD(buffers=4)).refused(3)
    assert (found.path, found.value, found.legal) == ("data_parallel.sync.buffers", 4, "1 to 3")
    assert not of(BASGD(buffers=3)).refused(3)


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
    assert f"data_parallel.{path}" in [each.path for each in of(sync, **member).check()]


def test_an_aggregate_of_whole_vectors_goes_with_one_server_and_compressed_pushes() -> None:
    assert not of(BASGD(buffers=3), aggregate=Middle(), compress=QSGD()).check()
    assert not of(BASGD(buffers=3, servers=2), aggregate=MajorityVote()).check()
