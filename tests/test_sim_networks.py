"""Servers on networks, and messages that are lost or late: times reckoned by hand."""

from __future__ import annotations

import statistics

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Now, Send
from polyreme.algo.sync import ASGD
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.network import Hosts, SlowLinks, Uniform
from polyreme.sim.options import Simulate
from scripted import message, run, said, take
from served import simulated

torch.set_num_threads(1)
PUSH = (3 + 4 + 12) * 8  # number, version and rate; four numbers of the batch; the gradient
ANSWER = (1 + 12) * 8


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    return w - rank


def _pushes(n: int, network, until: int = 1, servers: int = 1, **more) -> list[tuple[int, float]]:
    """Worker and time of each push that the first server read; a gradient takes a second."""
    came: list[tuple[int, float]] = []
    start = torch.zeros(12 * servers, dtype=torch.float64)
    clock = simulated(
        DataParallel(sync=ASGD(servers=servers)),
        _gradient,
        start,
        n,
        network=network,
        compute=Constant(seconds=1.0),
        on_record=lambda _me, record, now_s: came.append((record.seen.workers[0], now_s)),
        **more,
    )
    clock.play(until)
    return came


def test_all_that_push_at_once_come_in_by_the_server_s_one_link_one_after_another():
    network = Uniform(latency_s=0.5, bytes_per_s=PUSH)
    assert _pushes(4, network) == [(0, 2.5), (1, 3.5), (2, 4.5), (3, 5.5)]


def test_answers_leave_by_the_server_s_one_link_one_after_another():
    """Pushes come at once, by links in that take no time; answers take 2 s each."""

    class Narrow(Uniform, frozen=True, kw_only=True, tag="narrow", tag_field="kind"):
        def way(self, source: int, to: int, n: int):
            way = super().way(source, to, n)
            rate = ANSWER / 2 if source == n else 1e12
            return way._replace(out_bytes_per_s=rate, in_bytes_per_s=1e12)

    # Workers have answers at 3.5, 5.5 and 7.5 after pushes at 1.25; then compute and push again.
    came = _pushes(3, Narrow(latency_s=0.25), until=2)
    assert [(rank, pytest.approx(s)) for rank, s in came] == [
        *((rank, 1.25) for rank in range(3)),
        *((rank, 1.25 + 2 * (rank + 1) + 0.25 + 1 + 0.25) for rank in range(3)),
    ]


def test_a_server_s_links_are_none_of_a_host_of_workers():
    network = Hosts(per_host=2, latency_s=0.5, bytes_per_s=PUSH)
    # Of each host the second push leaves a second after the first; the server takes all in a row.
    came = _pushes(4, network)
    assert [s for _, s in came] == [2.5, 3.5, 4.5, 5.5]
    assert {rank for rank, _ in came[:2]} == {0, 2}
    workers = {network.way(a, b, 4)[:2] for a in range(4) for b in range(4) if a != b}
    servers = {network.way(a, b, 4)[:2] for a, b in ((4, 5), (5, 4))}
    assert not {out for out, _ in workers} & {out for out, _ in servers}
    assert not {into for _, into in workers} & {into for _, into in servers}


def test_servers_on_a_host_of_workers_are_near_to_these():
    network = Hosts(
        per_host=2,
        latency_s=0.5,
        bytes_per_s=PUSH,
        inside_latency_s=0.25,
        inside_bytes_per_s=2 * PUSH,
        server_host=1,
    )
    # Workers 2 and 3 go in by the server's link inside, 0 and 1 by the host's; apart.
    came = _pushes(4, network)
    assert came == [(2, 1.75), (3, 2.25), (0, 2.5), (1, 3.5)]


def test_several_servers_take_their_pieces_at_once():
    one = _pushes(3, Uniform(latency_s=0.5, bytes_per_s=PUSH))
    three = _pushes(3, Uniform(latency_s=0.5, bytes_per_s=PUSH), servers=3)
    # A worker sends its three pieces one after another; the first server has a piece of each.
    assert three == one


def test_no_server_is_slow_by_its_number():
    network = SlowLinks(latency_s=0.5, bytes_per_s=PUSH, slow=(1,), slow_factor=3.0)
    assert _pushes(2, network) == [(0, 2.5), (1, 4.5)]


def test_a_host_for_servers_that_is_not_there_is_refused():
    assert not Simulate(workers=9, network=Hosts(per_host=4, server_host=2)).check()
    (found,) = Simulate(workers=8, network=Hosts(per_host=4, server_host=2)).check()
    assert (found.path, found.value) == ("simulate.network.server_host", 2)


def _one(network, seed: int) -> tuple[float, int]:
    def script(me, step):
        if me.rank == 0:
            yield Send(to=1, message=message(100))
            return None
        yield take(0, 100)
        return (yield Now())

    found = run(script, 2, network=network, seed=seed)
    return said(found)[1][0], found.sent_bytes[0]


def test_what_is_lost_is_sent_again_and_counted_again():
    """Each time a second on the link, then the 2 s until it is tried again."""
    network = Uniform(latency_s=0.5, bytes_per_s=100.0, loss=0.5, retry_s=2.0)
    tries = []
    for seed in range(400):
        came_s, sent_bytes = _one(network, seed)
        tries.append(sent_bytes // 100)
        assert came_s == 1.5 + 3.0 * (tries[-1] - 1)
    assert tries.count(1) == pytest.approx(200, abs=40)
    assert tries.count(2) == pytest.approx(100, abs=35)
    assert max(tries) > 4
    assert _one(network, 3) == _one(network, 3)


def test_jitter_is_exponential_and_added_to_the_latency():
    network = Uniform(latency_s=0.5, bytes_per_s=100.0, jitter_s=0.25)
    late = [_one(network, seed)[0] - 1.5 for seed in range(1000)]
    assert min(late) > 0
    assert statistics.fmean(late) == pytest.approx(0.25, abs=4 * 0.25 / 1000**0.5)
    assert statistics.stdev(late) == pytest.approx(0.25, rel=0.2)
    assert _one(network, 0)[1] == 100


@pytest.mark.parametrize("unsure", [{"loss": 0.4, "retry_s": 3.0}, {"jitter_s": 5.0}], ids=str)
def test_messages_of_two_players_come_in_the_order_in_which_they_were_sent(unsure):
    sizes = [400, 4, 100, 4, 4, 200, 8, 100, 4, 8] * 3

    def script(me, step):
        times = []
        for size in sizes:
            if me.rank == 0:
                yield Send(to=1, message=message(size))
            else:
                yield take(0, size)  # of another size than the next that came it is refused
                times.append((yield Now()))
        return times

    made = run(script, 2, network=Uniform(latency_s=0.5, bytes_per_s=100.0, **unsure), seed=1)
    (times,) = said(made)[1]
    assert times == sorted(times)
    sure = run(script, 2, network=Uniform(latency_s=0.5, bytes_per_s=100.0))
    assert times[-1] > said(sure)[1][0][-1]


def test_what_is_lost_holds_up_nobody_else():
    """Worker 0's message to 1 is lost, its message to 2 leaves right after it."""
    network = Uniform(latency_s=0.5, bytes_per_s=100.0, loss=0.5, retry_s=10.0)

    def script(me, step):
        if me.rank == 0:
            for to in (1, 1, 2):
                yield Send(to=to, message=message(100))
            return None
        for _ in range(3 - me.rank):
            yield take(0, 100)
        return (yield Now())

    seen = set()
    for seed in range(60):
        found = run(script, 3, network=network, seed=seed)
        times = [each[0] for each in said(found)]
        seen.add((times[1], times[2]))
    # The first to 1 is lost once: it leaves at 11, and the second right behind it from 12 to 13,
    # while that to 2 left from 1 to 2.
    assert (13.5, 2.5) in seen
    assert (2.5, 3.5) in seen  # nothing is lost


def test_the_same_seed_loses_the_same():
    def all_of(seed: int) -> list[tuple[int, float]]:
        network = Uniform(latency_s=0.1, bytes_per_s=1e4, loss=0.2, retry_s=1.0, jitter_s=0.3)
        return _pushes(5, network, until=20, seed=seed)

    assert all_of(4) == all_of(4)
    assert all_of(4) != all_of(5)


def test_each_transmission_of_a_push_is_counted():
    network = Uniform(latency_s=0.1, bytes_per_s=1e4, loss=0.25, retry_s=1.0)
    start = torch.zeros(12, dtype=torch.float64)
    algorithm = DataParallel(sync=ASGD())
    clock = simulated(algorithm, _gradient, start, 4, network=network, compute=LogNormal())
    clock.play(200)
    clock.drain()
    pushes = sum(state["pushes"] for state in clock.states[:4])
    sent = sum(clock.sent_bytes[:4])
    assert sent % PUSH == 0
    assert sent // PUSH == pytest.approx(pushes / 0.75, rel=0.06)
    assert sum(clock.ledger.messages[rank, 4] for rank in range(4)) == sent // PUSH
    assert clock.states[4]["version"] == pushes
