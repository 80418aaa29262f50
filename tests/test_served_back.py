"""Compressed answers: what servers think that workers hold is what these hold, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import (
    QSGD,
    AdaComp,
    Compressor,
    Dense,
    Natural,
    PowerSGD,
    RandomK,
    TopK,
)
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ADPSGD, ASGD, EASGD, Downpour, EveryStep, Hogwild, OrLoMo, OrMo, Sync
from polyreme.algo.sync.served import Served
from polyreme.runtime.served.applied import read_applied
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.faults import RandomCrashes
from polyreme.sim.network import Uniform
from served import Post, simulated
from served_members import START, TARGET, gradient, members

torch.set_num_threads(1)
N = 3


def _of(sync, back: Compressor, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, "compress_back": back, **more})


def _members() -> list[Any]:
    """Those that do not refuse it, on one server and on as many as they may have."""
    found = []
    for sync in (kind() for kind in get_args(Sync)):
        if isinstance(sync, Served) and not _of(sync, TopK()).check():
            found.append(sync)
            if not sync.one_server:
                found.append(msgspec.structs.replace(sync, servers=N))
    return found


each_member = pytest.mark.parametrize(
    "sync", _members(), ids=lambda sync: f"{type(sync).__name__}-{sync.servers}"
)


def _start(n: int = 40) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _played(algorithm: DataParallel, until: int, gradient=_gradient, **more) -> Any:
    clock = simulated(
        algorithm, gradient, _start(), N, compute=LogNormal(spread=1.0), **{"lr": 0.01, **more}
    )
    clock.play(until * algorithm.sync.per_push)
    return clock


def _model(clock: Any) -> torch.Tensor:
    return clock.algorithm.sync.whole(clock.states[N:], clock.states[:N])


def _agree(states: list[dict[str, Any]], n: int) -> None:
    """Servers and workers that had an answer hold the same, and know it by the same number."""
    for worker, state in enumerate(states[:n]):
        if min(state["held"]["ids"].values()) < 0:
            continue
        for server, other in enumerate(states[n:]):
            own = other["holds"][str(worker)]
            assert own["id"] == state["held"]["ids"][str(server)]
        for name, whole in state["held"]["vectors"].items():
            pieces = [other["holds"][str(worker)]["vectors"][name] for other in states[n:]]
            assert torch.equal(torch.cat(pieces), whole)


@each_member
def test_packets_of_all_entries_are_answers_as_they_are(sync) -> None:
    plain = _played(_of(sync, Dense()), 12)
    packed = _played(_of(sync, TopK(ratio=1.0)), 12)
    torch.testing.assert_close(_model(packed), _model(plain), rtol=0, atol=1e-12)
    for one, other in zip(packed.states[:N], plain.states[:N], strict=True):
        torch.testing.assert_close(one["params"], other["params"], rtol=0, atol=1e-12)


@pytest.mark.slice(4)
@pytest.mark.parametrize(
    "sync",
    [sync for sync in _members() if sync.servers == 1],
    ids=lambda sync: type(sync).__name__,
)
def test_a_tenth_of_the_entries_brings_a_quadratic_to_its_optimum(sync) -> None:
    """What is left out comes later, so nothing is left out for good."""
    target = torch.sin(torch.arange(40).double())
    lr = 0.1 if sync.steps_at_worker else 0.06 / sync.per_push
    if sync.owns_momentum:
        sync, lr = msgspec.structs.replace(sync, momentum=0.5), lr / 2
    clock = _played(_of(sync, TopK(ratio=0.1)), 300, lambda _r, _b, w: w - target, lr=lr)
    first = float((_start() - target).norm())
    assert float((_model(clock) - target).norm()) < 1e-6 * first
    for state in clock.states[:N]:
        assert float((state["params"] - target).norm()) < 1e-4 * first


BACKS = [
    TopK(ratio=0.1),
    TopK(ratio=0.2, per="model"),
    QSGD(levels=15),
    Natural(),
    RandomK(ratio=0.3),
    AdaComp(),
    PowerSGD().apart,
    TopK(ratio=0.1, dense_below=20),
]


@pytest.mark.parametrize("back", BACKS, ids=lambda back: type(back).__name__)
@pytest.mark.parametrize("sync", [ASGD(servers=3), OrLoMo(local_steps=2, servers=2), Downpour()])
def test_both_ends_hold_the_same_bits(sync, back: Compressor) -> None:
    """Messages travel as bytes here, so nothing is handed over but what they say."""
    drawn = random.Random(1)
    post = Post(_of(sync, back), _gradient, _start(), N, lr=0.01)
    for _ in range(30):
        post.arrive(drawn.choice(post.can()))
        _agree(post.states, N)


@pytest.mark.parametrize("sync", [ASGD(), OrMo(), OrLoMo(local_steps=3)])
def test_the_clock_plays_what_arrival_order_plays(sync) -> None:
    came: list[int] = []
    algorithm = _of(sync, RandomK(ratio=0.3), compress=QSGD(), feedback=ErrorFeedback())
    clock = _played(
        algorithm, 12, on_record=lambda _me, record, _s: came.append(record.seen.workers[0])
    )
    again = Post(algorithm, _gradient, _start(), N, lr=0.01).order(came[:: sync.per_push])
    assert torch.equal(again.params, _model(clock))


def test_bytes_and_seconds_are_those_of_packets() -> None:
    """At 8 bytes a second: a head of 32, then 4 for each of two lengths and what there is."""
    algorithm = _of(ASGD(), TopK(ratio=0.1))
    clock = simulated(
        algorithm,
        _gradient,
        _start(),
        1,
        compute=Constant(seconds=1.0),
        network=Uniform(latency_s=0.0, bytes_per_s=8.0),
    )
    push = 8 * (3 + 4 + 40)
    whole, packed = 32 + 8 + 320, 32 + 8 + (4 * 6 + 7) // 8 + 4 * 8
    for n in range(1, 5):
        clock.play(n)  # n pushes have come, and all answers before the last push
        assert clock.clock.now_s == n * (1 + push / 8) + (
            0 if n == 1 else (whole + (n - 2) * packed) / 8
        )
    clock.drain()
    assert clock.sent_bytes == [4 * push, whole + 3 * packed]


def test_a_server_that_goes_back_unknown_to_itself_is_found_out() -> None:
    """Its packets do not follow on what the worker holds, which then asks for all."""
    post = Post(_of(ASGD(), TopK(ratio=0.1)), _gradient, _start(), 2).order([0, 1, 0])
    own = post.server["holds"]["0"]
    post.order([0, 0])
    later = {**own, "id": own["id"] + 50}
    post.states[2] = {**post.server, "holds": {**post.server["holds"], "0": later}}
    post.arrive(0)
    assert torch.equal(post.states[0]["params"], post.params)
    _agree(post.states, 2)
    post.order([0, 1, 0, 0])
    assert not torch.equal(post.states[0]["params"], post.params)


def test_an_answer_that_leads_to_what_a_worker_has_is_none() -> None:
    """The worker goes on waiting, and what it holds stays."""
    post = Post(_of(ASGD(), TopK(ratio=0.1)), _gradient, _start(), 2).order([0, 1, 0])
    own = post.server["holds"]["0"]
    post.order([0, 0])
    held = post.states[0]["held"]
    post.states[2] = {**post.server, "holds": {**post.server["holds"], "0": own}}
    post.arrive(0)
    assert post.can() == [1]
    assert post.states[0]["held"] is held


def test_a_server_that_knows_that_it_went_back_sends_all() -> None:
    algorithm = _of(OrLoMo(local_steps=2), TopK(ratio=0.1))
    answers = algorithm.sync.answers(algorithm)
    post = Post(algorithm, _gradient, _start(), 2, lr=0.01).order([0, 1, 0])
    snapshot = post.server
    for life in (1, 2, 3):  # each time before there is another snapshot
        post.order([0, 0, 1])
        held = [post.states[worker]["held"]["ids"]["0"] for worker in range(2)]
        post.states[2] = answers.forgotten(snapshot, life)
        for worker in range(2):
            assert post.server["holds"][str(worker)]["id"] > held[worker]
            post.arrive(worker)
            assert torch.equal(post.states[worker]["params"], post.params)
            assert torch.equal(post.states[worker]["momentum"], post.server["momentum"])
        _agree(post.states, 2)


def test_what_a_worker_has_already_is_not_taken_twice() -> None:
    """As when it asks for an answer that is under way."""
    algorithm = _of(ASGD(), QSGD(levels=15))
    post = Post(algorithm, _gradient, _start(), 1).order([0, 0])
    sync, state, server = algorithm.sync, post.states[0], post.states[1]
    message, _ = sync.reply(algorithm, server, 0, post.team[1])
    state = sync.pulled(algorithm, state, "0", message, post.team[0])
    answers = sync.answers(algorithm)
    told = answers.told(state, message)
    assert answers.has(state, 0, told)
    assert not answers.fits(state, 0, told)


@pytest.mark.parametrize("sync", [ASGD(servers=2), OrLoMo(local_steps=2), Downpour()])
def test_workers_that_crash_and_come_back_are_sent_all(sync) -> None:
    def played(faults: list[Any]) -> Any:
        clock = _played(
            _of(sync, TopK(ratio=0.1)),
            30,
            faults=faults,
            network=Uniform(latency_s=0.2, bytes_per_s=1e6),
        )
        clock.drain()
        return clock

    found = played([RandomCrashes(every_s=12.0, back_after_s=2.0)])
    here = [state for state in found.states[:N] if min(state["held"]["ids"].values()) > 0]
    assert here
    _agree(found.states, N)
    assert not torch.equal(_model(found), _model(played([])))


def test_what_cannot_be_compressed_is_refused_by_name() -> None:
    for sync, why in (
        (EveryStep(), "EveryStep has none"),
        (ADPSGD(), "ADPSGD has none"),
        (EASGD(), "EASGD sends what a model loses"),
        (Hogwild(), "Hogwild sends nothing over a link"),
    ):
        (found,) = _of(sync, TopK()).check()
        assert (found.path, found.value) == ("data_parallel.compress_back.kind", "TopK")
        assert why in found.rule
    for back in (PowerSGD(), TopK(warmup_epochs=2)):
        (found,) = _of(ASGD(), back).check()
        assert (found.path, found.rule) == (
            "data_parallel.compress_back.kind",
            "needs all workers at the same step",
        )


# Processes ----------------------------------------------------------------------------------------


def _snapshot(folder: Path, server: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"server-{server}.safetensors")


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [ASGD(), OrLoMo(local_steps=3)])
def test_an_order_recorded_in_processes_played_again_gives_the_same_bits(sync, tmp_path) -> None:
    algorithm = _of(sync, TopK(ratio=0.25))
    with members(algorithm, N, tmp_path) as run:
        run.pushed(60 * sync.per_push)
    order = read_applied(tmp_path / "applied-0.bin")
    assert len(set(order["worker"])) == N
    post = Post(algorithm, gradient, START, N, lr=0.05)
    for row in order:
        assert post.states[row["worker"]]["versions"]["0"] == row["version"]
        post.arrive(int(row["worker"]))
    assert torch.equal(post.params, _snapshot(tmp_path, 0)["worker/0/params"])


@pytest.mark.long
def test_killed_workers_and_servers_lose_nothing_and_hold_what_is_thought(tmp_path) -> None:
    """A worker that did not hold what its servers think would keep all from the optimum.

    Servers are killed while parameters still move, after they kept a snapshot.
    """
    algorithm = _of(OrMo(servers=2, momentum=0.5), TopK(ratio=0.34))
    with members(algorithm, N, tmp_path, lr=0.006) as run:
        run.pushed(20)
        run.kill(0)
        for server in (3, 4):
            while not (tmp_path / f"server-{server - N}.safetensors").exists():
                run.pushed(1)
            run.pushed(40)
            run.kill(server)
        run.pushed(1200)
    for server in range(2):
        found = _snapshot(tmp_path, server)["worker/0/params"]
        assert float((found - TARGET[6 * server : 6 * server + 6]).norm()) < 0.02
        rows = read_applied(tmp_path / f"applied-{server}.bin")
        for worker in range(N):
            for life in {int(row["life"]) for row in rows if row["worker"] == worker}:
                mine = (rows["worker"] == worker) & (rows["life"] == life)
                numbers = rows["number"][mine]
                assert numbers.tolist() == list(range(len(numbers)))
