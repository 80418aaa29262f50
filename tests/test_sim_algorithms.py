"""Algorithms on the virtual clock end with the bits and bytes of other players."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from polyreme.algo import compress, feedback, rule, sync, topology
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, Numbers
from polyreme.algo.vector import Layout
from polyreme.sim.compute import Constant, LogNormal, Stragglers
from polyreme.sim.driver import Simulation
from polyreme.sim.network import Hosts, SlowLinks, Uniform
from workers import play, workers

torch.set_num_threads(1)

SHAPES = {"a": (3, 5), "b": (7,), "c": ()}
SGD = rule.SGD(lr=0.1, momentum=0.9)
SPARSE = {"compress": compress.TopK(ratio=0.2), "feedback": feedback.ErrorFeedback()}
ALGORITHMS = {
    "dense": DataParallel(rule=SGD),
    "sparse": DataParallel(rule=SGD, **SPARSE),
    "dense ring": DataParallel(rule=SGD, topology=topology.Ring()),
    "sparse ring": DataParallel(rule=SGD, topology=topology.Ring(), **SPARSE),
    "varying": DataParallel(
        rule=SGD, topology=topology.Ring(), compress=compress.QSGD(levels=2, coding="elias")
    ),
    "servers": DataParallel(
        rule=rule.SGD(lr=0.1),
        topology=topology.ParameterServer(servers=2, back=compress.TopK(ratio=0.3)),
        **SPARSE,
    ),
    "local": DataParallel(
        rule=SGD, sync=sync.LocalSteps(every=2), compress=compress.QSGD(levels=4)
    ),
    "gossip": DataParallel(rule=SGD, topology=topology.Gossip(), compress=compress.QSGD()),
}


def _gradient(rank: int, batch: int, params: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(params.shape, generator=torch.Generator().manual_seed(97 * rank + batch))
    return params * 0.5 + noise


def _gradients(rank: int, params: torch.Tensor, batch: int) -> Computed:
    return Computed(gradient=_gradient(rank, batch, params), loss=0.0, weight=1.0)


def _simulated(algorithm: DataParallel, n: int, start: torch.Tensor, **more: Any) -> Simulation:
    team = workers(n, Layout.of(SHAPES))
    states = [algorithm.sync.init(algorithm, start.clone(), me) for me in team]
    return Simulation(algorithm, team, states, _gradients, **more)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", ALGORITHMS)
def test_states_are_those_of_a_player_without_a_clock_that_sends_bytes(name):
    algorithm, n, start = ALGORITHMS[name], 5, torch.linspace(-1, 1, 23)
    played = play(algorithm, _gradient, start, n, 3, shapes=SHAPES)
    made = _simulated(
        algorithm, n, start, compute=Stragglers(probability=0.5, spell=1), network=Hosts(per_host=2)
    )
    made.play(played.states[-1][0]["step"])
    assert all(_same(a, b) for a, b in zip(made.states, played.states[-1], strict=True))


@pytest.mark.parametrize("name", ["dense ring", "sparse ring", "varying", "servers", "gossip"])
def test_bytes_are_those_of_a_player_that_sends_bytes(name):
    """Of topologies that send messages; what workers agree on is not sent there."""
    algorithm, n, start = ALGORITHMS[name], 5, torch.linspace(-1, 1, 23)
    played = play(algorithm, _gradient, start, n, 3, shapes=SHAPES)
    made = _simulated(algorithm, n, start)
    made.play(3)
    numbers = 3 * (n - 1) * 8 * len(Numbers())
    assert [sent - numbers for sent in made.sent_bytes] == played.nbytes


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_is_the_same_twice_in_a_row(name):
    def once() -> tuple[list[Any], Counter[tuple[int, int]], list[Any], list[float]]:
        times: list[float] = []
        made = _simulated(
            ALGORITHMS[name],
            4,
            torch.ones(23),
            compute=LogNormal(spread=1.0),
            seed=3,
            on_record=lambda _me, _record, now_s: times.append(now_s),
        )
        made.play(4)
        return made.states, made.ledger.bytes, made.spent, times

    first, second = once(), once()
    assert all(_same(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_clock_changes_no_bits_of_algorithms_that_wait_for_all(name):
    found = []
    for network in (Uniform(), SlowLinks(slow=(2,), slow_factor=100.0)):
        made = _simulated(ALGORITHMS[name], 4, torch.ones(23), network=network, seed=len(found))
        made.play(2)
        made.play(4)
        found.append(made)
    assert all(_same(a, b) for a, b in zip(found[0].states, found[1].states, strict=True))
    assert found[0].clock.now_s < found[1].clock.now_s
    assert 0 < found[1].utilisation < found[0].utilisation <= 1


def test_one_worker_pays_for_nothing_but_gradients():
    made = _simulated(ALGORITHMS["sparse"], 1, torch.ones(23), compute=Constant(seconds=2.0))
    made.play(3)
    assert made.clock.now_s == 6.0
    assert made.utilisation == 1.0
    assert made.sent_bytes == [0]
