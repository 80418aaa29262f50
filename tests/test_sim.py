"""The virtual clock: what happens when, on small cases that are reckoned by hand."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo.effects import (
    ANY,
    Agree,
    Combine,
    Now,
    Numbers,
    Recv,
    Send,
    Sleep,
)
from polyreme.algo.topology.passing import ring_gather
from polyreme.errors import RunError
from polyreme.sim.compute import Factors, LogNormal
from polyreme.sim.network import Hosts, SlowLinks
from scripted import PLAIN, compute, message, run, said, take

torch.set_num_threads(1)


def test_a_message_takes_its_bytes_and_the_latency():
    def script(me, step):
        if me.rank == 0:
            yield Send(to=1, message=message(200))
            return (yield Now())
        yield take(0, 200)
        return (yield Now())

    found = run(script, 2)
    assert said(found) == [[0.0], [2.5]]
    assert found.sent_bytes == [200, 0]
    assert found.received_bytes == [0, 200]


def test_messages_of_one_sender_leave_one_after_another_and_links_are_full_duplex():
    def script(me, step):
        if me.rank == 0:
            for to in (1, 2):
                yield Send(to=to, message=message(100))
        else:
            yield Send(to=0, message=message(100))
        times = []
        for source in (1, 2) if me.rank == 0 else (0,):
            yield take(source, 100)
            times.append((yield Now()))
        return times

    # Worker 0 sends from 0 to 2 while it receives from 0.5 to 2.5, the one after the other.
    assert said(run(script, 3)) == [[[1.5, 2.5]], [[1.5]], [[2.5]]]


def test_a_server_that_all_send_to_receives_one_after_another():
    def script(me, step):
        if me.rank:
            yield Send(to=0, message=message(100))
            return None
        times = []
        for _ in range(me.n - 1):
            received = yield Recv(source=ANY, kinds=message(100).kinds)
            times.append((received.source, (yield Now())))
        return times

    assert said(run(script, 4))[0] == [[(1, 1.5), (2, 2.5), (3, 3.5)]]


def test_a_receiving_link_takes_messages_in_the_order_of_their_first_bytes():
    """A message that waits at its sender holds up nobody at the receiver."""

    def script(me, step):
        if me.rank == 1:
            yield Send(to=3, message=message(400))
            yield Send(to=0, message=message(100))  # leaves from 4 to 5
        if me.rank == 2:
            yield Sleep(seconds=1.0)
            yield Send(to=0, message=message(100))  # leaves from 1 to 2
        if me.rank == 3:
            yield take(1, 400)
        times = []
        for _ in range(2 if me.rank == 0 else 0):
            received = yield Recv(source=ANY, kinds=message(100).kinds)
            times.append((received.source, (yield Now())))
        return times

    assert said(run(script, 4))[0] == [[(2, 2.5), (1, 5.5)]]


def test_a_slow_link_slows_what_it_sends_and_what_it_takes():
    def script(me, step):
        yield Send(to=(me.rank + 1) % 3, message=message(100))
        yield take((me.rank - 1) % 3, 100)
        return (yield Now())

    network = SlowLinks(latency_s=0.5, bytes_per_s=100.0, slow=(1,), slow_factor=4.0)
    assert said(run(script, 3, network=network)) == [[1.5], [4.5], [4.5]]


def test_workers_of_a_host_send_one_after_another_to_another_host_but_not_inside():
    def script(me, step):
        to = {0: (1, 2), 1: (3,), 2: (), 3: ()}[me.rank]
        for each in to:
            yield Send(to=each, message=message(100))
        times = []
        for _ in range(0 if me.rank == 0 else 1):
            yield Recv(source=ANY, kinds=message(100).kinds)
            times.append((yield Now()))
        return times

    network = Hosts(
        per_host=2, latency_s=0.5, bytes_per_s=100.0, inside_latency_s=0.25, inside_bytes_per_s=1e3
    )
    zero, one, two, three = said(run(script, 4, network=network))
    assert (zero, one) == ([[]], [[pytest.approx(0.35)]])
    assert sorted([*two[0], *three[0]]) == [1.5, 2.5]


def test_a_collective_starts_with_the_last_and_goes_round_a_ring():
    def script(me, step):
        yield compute(step)
        yield Combine(message=message(100), function=len)
        return (yield Now())

    made = run(script, 3, compute=Factors(seconds=1.0, factors=(1.0, 2.0, 4.0)))
    assert said(made) == [[7.0]] * 3  # 4 for the slowest, two messages of 1.5
    spent = [(each.compute_s, each.comm_s, each.wait_s) for each in made.spent]
    assert spent == [(1.0, 3.0, 3.0), (2.0, 3.0, 2.0), (4.0, 3.0, 0.0)]
    assert made.utilisation == pytest.approx(7 / 21)
    assert made.sent_bytes == [200] * 3


@pytest.mark.parametrize("sizes", [[100] * 5, [400, 100, 100, 200, 0]])
@pytest.mark.parametrize("network", [PLAIN, SlowLinks(slow=(2,)), Hosts(per_host=2)], ids=str)
def test_the_collective_takes_as_long_as_a_ring_of_messages(network, sizes):
    kinds = [message(size).kinds for size in sizes]

    def script(me, step):
        yield from ring_gather(message(sizes[me.rank]), kinds, range(me.n), me.rank)
        return (yield Now())

    slowest = max(times[0] for times in said(run(script, 5, network=network)))
    assert slowest == pytest.approx(network.gathering_s(sizes))


def test_functions_of_all_messages_are_called_once():
    calls = []

    def script(me, step):
        return (yield Combine(message=message(4 * 3), function=lambda m: calls.append(len(m)) or 7))

    assert said(run(script, 3)) == [[7]] * 3
    assert calls == [3]


def test_a_message_that_comes_late_is_given_up_and_found_the_next_time():
    def script(me, step):
        if me.rank == 1:
            yield Send(to=0, message=message(200))  # comes at 2.5
            return None
        heard = []
        for timeout_s in (1.0, 1.0, 1.0):
            received = yield take(1, 200, timeout_s)
            heard.append((received is not None, (yield Now())))
        return heard

    found = run(script, 2)
    assert said(found)[0] == [[(False, 1.0), (False, 2.0), (True, 2.5)]]


def test_a_limit_that_is_not_reached_leaves_nothing_behind():
    def script(me, step):
        if me.rank == 1:
            yield Send(to=0, message=message(100))  # comes at 1.5
            yield Sleep(seconds=4.0)
            yield Send(to=0, message=message(100))  # comes at 5.5
            return None
        yield take(1, 100, 2.0)
        yield take(1, 100)  # the first limit, at 2, is not this one's
        return (yield Now())

    found = run(script, 2)
    assert said(found)[0] == [5.5]
    assert found.clock.now_s == 5.5


def test_a_far_limit_does_not_lengthen_the_run():
    def script(me, step):
        if me.rank == 1:
            yield Send(to=0, message=message(100))
        else:
            yield take(1, 100, 1000.0)

    assert run(script, 2).clock.now_s == 1.5


def test_any_takes_what_came_first_and_a_source_leaves_others_in_the_box():
    def script(me, step):
        if me.rank:
            yield Sleep(seconds=float(me.n - me.rank))
            yield Send(to=0, message=message(4))
            return None
        yield Sleep(seconds=10.0)
        order = []
        for source in (2, ANY, ANY):
            received = yield take(source, 4)
            order.append(received.source)
        return order, (yield Now())

    assert said(run(script, 4))[0] == [([2, 3, 1], 10.0)]


def test_where_seconds_went_adds_up_to_all_that_passed():
    def script(me, step):
        yield compute(step)
        yield Send(to=(me.rank + 1) % 3, message=message(100))
        yield take((me.rank - 1) % 3, 100)
        if me.rank == 0:
            yield Sleep(seconds=0.25)

    made = run(script, 3, rounds=4, compute=LogNormal(spread=1.0))
    for each in made.spent:
        assert each.compute_s + each.comm_s + each.wait_s == pytest.approx(made.clock.now_s)
        assert min(each.compute_s, each.comm_s, each.wait_s) > 0


def test_waiting_for_a_message_ends_when_it_is_sent():
    def script(me, step):
        if me.rank == 1:
            yield Sleep(seconds=3.0)
            yield Send(to=0, message=message(100))
        else:
            yield take(1, 100)

    spent = run(script, 2).spent
    assert (spent[0].wait_s, spent[0].comm_s) == (3.0, 1.5)
    assert (spent[1].wait_s, spent[1].comm_s) == (4.5, 0.0)


def test_playing_goes_on_where_it_ended():
    def script(me, step):
        yield compute(step)
        return (yield Now())

    made = run(script, 2, compute=Factors(factors=(1.0, 2.0)))
    made.play(1)
    assert made.clock.now_s == 2.0
    made.play(2)
    assert said(made) == [[1.0, 3.0], [2.0, 4.0]]  # all start a call together


def test_workers_that_wait_for_each_other_are_named():
    def script(me, step):
        if me.rank < 2:
            yield take(1 - me.rank, 4)

    with pytest.raises(RunError) as error:
        run(script, 3)
    told = str(error.value)
    assert "worker 0 (step 1) waits for a message from worker 1" in told
    assert "worker 1 (step 1) waits for a message from worker 0" in told
    assert "workers 2 have done their steps" in told


def test_a_collective_that_some_never_come_to_is_named():
    def script(me, step):
        if me.rank:
            yield Agree(batches=(Numbers(),))
        else:
            yield take(ANY, 4)

    with pytest.raises(RunError, match=r"from any worker.*all others at Agree of 1"):
        run(script, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Agree(batches=(Numbers(),)), Combine(message=message(4), function=len)),
        (Agree(batches=(Numbers(),)), Agree(batches=(Numbers(), Numbers()))),
        (
            Combine(message=message(4), function=len),
            Combine(message=message(8), function=len),
        ),
    ],
    ids=["kinds of effect", "numbers of batches", "forms of message"],
)
def test_workers_that_meet_at_different_effects_are_named(one, other):
    def script(me, step):
        yield other if me.rank == 1 else one

    with pytest.raises(RunError, match=r"same collective.*workers 0, 2 at .* and workers 1 at"):
        run(script, 3)


def test_a_message_of_another_form_than_wanted_is_refused():
    def script(me, step):
        if me.rank:
            yield Send(to=0, message=message(8))
        else:
            yield take(1, 4)

    with pytest.raises(RunError, match="worker 0 cannot read the message of worker 1"):
        run(script, 2)
