"""BASGD with the aggregates and attacks that there are: on a quadratic, on digits, in processes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregators import MEMBERS
from polyreme import api
from polyreme.algo.aggregate import CoordinateMedian, TrimmedMean
from polyreme.algo.attack import NotFinite, SignFlip, Silence
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import WorkerMomentum
from polyreme.algo.rule import SGD, SNGD
from polyreme.algo.sync import BASGD
from polyreme.algo.vector import Layout
from polyreme.errors import RunError
from polyreme.runtime import own
from polyreme.runtime.served.applied import read_applied
from polyreme.sim.compute import LogNormal
from polyreme.sim.driver import Simulation
from served import team

torch.set_num_threads(1)
N, BUFFERS = 10, 7
TARGET = torch.sin(torch.arange(12).double())
START = torch.linspace(-1, 1, 12, dtype=torch.float64)


def _clock(algorithm: DataParallel, attack: tuple[Any, ...], states: Any = None) -> Simulation:
    """Ten workers with the same minimum, each gradient with noise of its own."""
    players = [
        replace(me, attack=attack) for me in team(algorithm, Layout.of({"w": (12,)}), N, lr=0.1)
    ]

    def found(rank: int, w: torch.Tensor, batch: int) -> Computed:
        noise = torch.sin(torch.arange(12).double() * (rank + 1) + batch)
        return Computed(gradient=w - TARGET + 0.05 * noise, loss=0.0, weight=1.0, n_samples=1)

    given = states or [algorithm.sync.init(algorithm, START.clone(), me) for me in players]
    return Simulation(algorithm, players, given, found, compute=LogNormal(spread=0.5))


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
@pytest.mark.parametrize("rule", [SGD(), SNGD()], ids=["BASGDm", "with SNGD"])
@pytest.mark.slice(3)
def test_every_aggregate_of_buffers_bears_a_hostile_worker(member: Any, rule: Any) -> None:
    """And goes on from what was kept, state and all."""
    algorithm = DataParallel(
        rule=rule,
        sync=BASGD(buffers=BUFFERS),
        aggregate=member(byzantine=1),
        feedback=WorkerMomentum(momentum=0.5),
    )
    assert not algorithm.check() + algorithm.refused(N)
    clock = _clock(algorithm, (SignFlip(workers=(4,), scale=100.0),))
    clock.play(100)
    clock.drain()
    server = clock.states[N]
    assert server["version"] > 50
    assert (server["params"] - TARGET).norm() < 0.2 * (START - TARGET).norm()
    again = own.joined(own.apart(server), server)
    clocks = [
        _clock(algorithm, (), states=[*map(dict, clock.states[:N]), state])
        for state in (server, again)
    ]
    for each in clocks:
        each.play(110)
    assert torch.equal(clocks[0].states[N]["params"], clocks[1].states[N]["params"])


def test_too_few_buffers_for_the_hostile_are_refused_whatever_the_workers() -> None:
    algorithm = DataParallel(sync=BASGD(buffers=4), aggregate=TrimmedMean(byzantine=2))
    (found,) = algorithm.refused(100)
    assert found.path == "data_parallel.aggregate.byzantine"
    assert not DataParallel(sync=BASGD(buffers=5), aggregate=TrimmedMean(byzantine=2)).refused(9)


def test_two_silent_workers_of_ten_with_a_buffer_each_are_gone_without() -> None:
    algorithm = DataParallel(
        rule=SGD(), sync=BASGD(buffers=N, timeout_s=8.0), aggregate=TrimmedMean(byzantine=3)
    )
    attack = (Silence(workers=(0, 7)), SignFlip(workers=(4,), scale=50.0))
    clock = _clock(algorithm, attack)
    clock.play(100)
    assert (clock.states[N]["params"] - TARGET).norm() < 0.1 * (START - TARGET).norm()
    assert clock.states[N]["version"] > 50


def test_pieces_are_aggregated_by_entry_at_several_servers() -> None:
    algorithm = DataParallel(
        rule=SGD(), sync=BASGD(buffers=5, servers=3), aggregate=CoordinateMedian(byzantine=2)
    )
    assert not algorithm.check() + algorithm.refused(N)
    attack = (SignFlip(workers=(3,), scale=50.0), NotFinite(workers=(6,)))
    clock = _clock(algorithm, attack)
    clock.play(100)
    model = algorithm.sync.whole(clock.states[N:])
    assert (model - TARGET).norm() < 0.1 * (START - TARGET).norm()


SPEC = """
[model]
kind = "mlp"
hidden = [32]

[data]
kind = "digits"

[train]
steps = {steps}
global_batch = {batch}

[cluster]
cpu_processes = {n}

[data_parallel]
rule = {{ kind = "SGD", lr = 0.03 }}
{sync}

[simulate]
workers = {n}
compute = {{ kind = "heterogeneous", slow_fraction = 0.3, slow_factor = 2.0 }}
{attack}
"""
ROBUST = """sync = {{ kind = "BASGD", buffers = {n} }}
aggregate = {{ kind = "CoordinateMedian", byzantine = {f} }}"""
ENOUGH = 100
"""Steps of the server; after 75 of them digits are told apart as 85 % (without processes)."""
HOSTILE = """attack = [
    { kind = "NotFinite", workers = [2] },
    { kind = "NotFinite", workers = [5], value = "inf" },
    { kind = "SignFlip", workers = [8], scale = 10.0 },
]"""


def _spec(folder: Path, n: int, steps: int, sync: str, attack: str) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.toml"
    path.write_text(SPEC.format(n=n, steps=steps, batch=16 * n, sync=sync, attack=attack))
    return path


def _counted(log: Path) -> tuple[Counter[int], int]:
    """In how many steps each worker is a suspect, and how many steps there are."""
    steps = [json.loads(line) for line in log.read_text().splitlines() if '"step"' in line]
    steps = [event for event in steps if event["kind"] == "step"]
    counts = Counter(worker for event in steps for worker in event.get("suspects") or ())
    return counts, len(steps)


def _named(log: Path) -> set[int]:
    """Workers that are suspects in more than half of the steps."""
    counts, n_steps = _counted(log)
    return {worker for worker, count in counts.items() if count > n_steps / 2}


@pytest.mark.parametrize("momentum", ["", 'feedback = { kind = "WorkerMomentum" }'])
@pytest.mark.long
def test_three_of_ten_hostile_on_the_virtual_clock_leave_digits_as_they_were(
    momentum: str, tmp_path: Path
) -> None:
    sync = ROBUST.format(n=10, f=3) + "\n" + momentum
    quiet = api.simulate(_spec(tmp_path, 10, 150, sync, ""), out=tmp_path / "quiet")
    struck = api.simulate(_spec(tmp_path, 10, 150, sync, HOSTILE), out=tmp_path / "struck")
    assert quiet.metrics["test_accuracy"] > 0.8
    assert struck.metrics["test_accuracy"] > quiet.metrics["test_accuracy"] - 0.03
    assert {2, 5, 8} == _named(tmp_path / "struck" / "log.jsonl")


def test_the_same_with_a_sign_flipped_spoils_asgd(tmp_path: Path) -> None:
    attack = 'attack = { kind = "SignFlip", workers = [2, 5, 8], scale = 10.0 }'
    sync = 'sync = { kind = "ASGD" }'
    with pytest.raises(RunError, match="not finite"):
        api.simulate(_spec(tmp_path, 10, 150, sync, attack), out=tmp_path / "struck")


@pytest.mark.long
def test_two_of_five_hostile_processes_leave_digits_as_they_were(tmp_path: Path) -> None:
    attack = """attack = [
        { kind = "NotFinite", workers = [1] },
        { kind = "SignFlip", workers = [3], scale = 10.0 },
    ]"""
    spec = _spec(tmp_path, 5, 240, ROBUST.format(n=5, f=2), attack)
    out, made, steps = tmp_path / "struck", 0, 0
    while made < ENOUGH:  # of pushes while one worker was not run by a busy machine none is made
        steps, before = steps + 240, made
        struck = api.train(
            spec, overrides=[f"train.steps={steps}"], out=out, resume="auto", attack=True
        )
        made = int(read_applied(out / "servers" / "applied-0.bin")["version"].max())
        assert made > before
        assert (struck.status, struck.steps) == ("done", steps)
    assert struck.metrics["test_accuracy"] > 0.8
    counts, _ = _counted(out / "log.jsonl")  # shares fall with pushes of which no step is made
    assert min(counts[1], counts[3]) > 2 * max(counts[0], counts[2], counts[4])
