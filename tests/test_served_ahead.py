"""Workers that compute while their pushes and the answers travel."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, RandomK, TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, SSP, Downpour, OrLoMo, OrMo, Sync
from polyreme.algo.sync.momentum import group
from polyreme.algo.sync.served import Served
from polyreme.runtime.served.applied import read_applied
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.faults import RandomCrashes
from polyreme.sim.network import Uniform
from served import simulated
from served_members import START, gradient, members

torch.set_num_threads(1)
SERVED = [sync for sync in (kind() for kind in get_args(Sync)) if isinstance(sync, Served)]
FAR = Uniform(latency_s=0.5, bytes_per_s=1e30)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _played(sync, n: int, until: int, *, gradient=_gradient, **more: Any) -> Any:
    members = more.pop("members", {})
    options = {"lr": 0.05, "network": FAR, **more}
    clock = simulated(_of(sync, **members), gradient, _start(), n, **options)
    clock.play(until)
    return clock


def _model(clock: Any, n: int) -> torch.Tensor:
    return clock.algorithm.sync.whole(clock.states[n:], clock.states[:n])


# How long it takes --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("compute_s", [0.25, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_takes_what_is_longer(compute_s: float, ahead: int, servers: int) -> None:
    """Answers come a second after their pushes, so C + 1 becomes the larger of C and its share."""
    clock = _played(ASGD(ahead=ahead, servers=servers), 1, 4, compute=Constant(seconds=compute_s))
    times = []
    for n in (8, 20):
        clock.play(n)
        times.append(clock.clock.now_s)
    each = max(compute_s, (compute_s + 1.0) / (ahead + 1))
    assert times[1] - times[0] == pytest.approx(12 * each, rel=1e-12)


def test_a_worker_never_has_more_unanswered_than_it_may() -> None:
    seen: list[int] = []
    clocks: list[Any] = []

    def noted(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        seen.append(max(clocks[0].states[rank]["awaits"].values()) if clocks else 0)
        return _gradient(rank, batch, w)

    clocks.append(
        simulated(
            _of(ASGD(ahead=2, servers=2)),
            noted,
            _start(),
            3,
            lr=0.01,
            compute=LogNormal(spread=1.0),
            network=Uniform(latency_s=2.0, bytes_per_s=1e30),
        )
    )
    clocks[0].play(20)
    assert max(seen) == 2
    clocks[0].drain()
    assert not any(any(state["awaits"].values()) for state in clocks[0].states[:3])
    applied = [state["version"] for state in clocks[0].states[3:]]
    assert applied == [sum(state["pushes"] for state in clocks[0].states[:3])] * 2


# What is computed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("compute_s", [0.125, 3.0])
def test_one_worker_has_sgd_with_a_delay(ahead: int, compute_s: float) -> None:
    """Of `ahead` where answers take long; of one where they come while the next is computed."""
    delay = ahead if compute_s < 1 else 1
    clock = _played(ASGD(ahead=ahead), 1, 30, compute=Constant(seconds=compute_s))
    seen = [_start()]
    for batch in range(30):
        at = seen[max(0, batch - delay)]
        seen.append(seen[-1] - 0.05 * _gradient(0, batch, at))
    _close(_model(clock, 1), seen[-1])


def test_delays_that_are_told_are_those_of_gradients() -> None:
    """By the parameters that each gradient was computed at, of all that there were."""
    delays: list[int] = []
    models, at = [_start()], {}

    def noted(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        at[rank, batch] = next(i for i, model in enumerate(models) if torch.equal(model, w))
        return _gradient(rank, batch, w)

    numbers: dict[int, int] = defaultdict(int)

    def told(_me: Any, record: Any, _now_s: float) -> None:
        (worker,), (delay,) = record.seen.workers, record.delays
        delays.append(delay)
        applied = len(models) - 1
        models.append(
            models[-1] - 0.05 * _gradient(worker, numbers[worker], models[applied - delay])
        )
        assert at[worker, numbers[worker]] == applied - delay
        numbers[worker] += 1

    clock = _played(
        ASGD(ahead=1), 3, 20, gradient=noted, on_record=told, compute=LogNormal(spread=1.0)
    )
    _close(_model(clock, 3), models[-1])
    assert max(delays) > 3


class Pushes:
    """The version and the gradient of each push, in the order in which they were applied."""

    def __init__(self) -> None:
        self.came: list[tuple[int, torch.Tensor]] = []
        self._found: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._done: dict[int, int] = defaultdict(int)

    def gradient(self, rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        self._found[rank].append(_gradient(rank, batch, w))
        return self._found[rank][-1]

    def told(self, _me: Any, record: Any, _now_s: float) -> None:
        (worker,), (delay,) = record.seen.workers, record.delays
        self.came.append((len(self.came) - delay, self._found[worker][self._done[worker]]))
        self._done[worker] += 1


@pytest.mark.parametrize("seed", range(4))
def test_ormo_is_the_sum_of_all_gradients_by_their_age(seed: int) -> None:
    """Its closed form holds whatever is under way."""
    n, beta, lr, pushes = 3, 0.8, 0.05, Pushes()
    clock = _played(
        OrMo(momentum=beta, ahead=1 + seed % 2),
        n,
        15,
        gradient=pushes.gradient,
        on_record=pushes.told,
        compute=LogNormal(spread=1.0),
        seed=seed,
    )
    now = group(len(pushes.came) - 1, n)
    ages = [now - group(version, n) for version, _ in pushes.came]
    assert max(len(pushes.came) - 1 - version for version, _ in pushes.came) > n
    each = list(zip(ages, pushes.came, strict=True))
    momentum = sum(beta**age * lr * g for age, (_, g) in each)
    gone = sum((1 - beta ** (age + 1)) / (1 - beta) * lr * g for age, (_, g) in each)
    _close(clock.states[n]["momentum"], momentum, atol=1e-10)
    _close(_model(clock, n), _start() - gone, atol=1e-10)


def test_orlomo_of_one_local_step_is_ormo_at_a_rate_by_delay() -> None:
    n, more = 3, {"compute": LogNormal(spread=1.0), "lr": 0.1}

    class Rated(OrMo, frozen=True, kw_only=True, tag="Rated", tag_field="kind"):
        def rate_at(self, lr: float, delay: int, n: int) -> float:
            return lr / n if delay <= 2 * n else lr / delay

    ours = _played(OrLoMo(local_steps=1, ahead=2), n, 20, **more)
    theirs = _played(Rated(ahead=2), n, 20, **more)
    _close(_model(ours, n), _model(theirs, n))
    _close(ours.states[n]["momentum"], theirs.states[n]["momentum"])


@pytest.mark.slice(3)
@pytest.mark.parametrize(
    "sync",
    [
        ASGD(ahead=1),
        ASGD(ahead=2, servers=3),
        OrMo(ahead=1, momentum=0.5),
        OrLoMo(ahead=1, momentum=0.5, local_steps=3),
        Downpour(ahead=1, push_every=2, fetch_every=4),
    ],
    ids=lambda sync: f"{type(sync).__name__}-{sync.servers}",
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_quadratic_is_brought_to_its_optimum(sync, packed: bool) -> None:
    target = torch.sin(torch.arange(12).double())
    back = {"compress_back": TopK(ratio=0.25)} if packed else {}
    clock = _played(
        sync,
        3,
        400,
        gradient=lambda _r, _b, w: w - target,
        compute=LogNormal(spread=1.0),
        lr=0.02,
        members=back,
    )
    assert float((_model(clock, 3) - target).norm()) < 1e-5


@pytest.mark.parametrize("ahead", [1, 2])
def test_both_ends_hold_the_same_where_answers_overtake_nothing(ahead: int) -> None:
    """Several packets are under way, each of which follows on the one before."""
    more = {
        "compress": QSGD(),
        "feedback": ErrorFeedback(),
        "compress_back": RandomK(ratio=0.3),
    }
    clock = _played(
        ASGD(ahead=ahead, servers=2), 3, 20, compute=LogNormal(spread=1.0), members=more
    )
    clock.drain()
    for worker, state in enumerate(clock.states[:3]):
        assert not any(state["awaits"].values())
        pieces = [other["holds"][str(worker)] for other in clock.states[3:]]
        assert [each["id"] for each in pieces] == list(state["held"]["ids"].values())
        assert torch.equal(
            torch.cat([each["vectors"]["params"] for each in pieces]), state["params"]
        )


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_drained_goes_on_from_states_alone(packed: bool) -> None:
    back = {"compress_back": TopK(ratio=0.25)} if packed else {}
    more = {"compute": LogNormal(spread=1.0), "members": back}
    first = _played(OrMo(ahead=1), 3, 7, **more)
    first.drain()
    one, other = (_played(OrMo(ahead=1), 3, 20, states=first.states, **more) for _ in range(2))
    assert torch.equal(_model(one, 3), _model(other, 3))
    assert one.states[3]["version"] >= first.states[3]["version"] + 39


@pytest.mark.parametrize("packed", [False, True])
def test_crashes_leave_nobody_waiting(packed: bool) -> None:
    """Answers to a worker that is gone come to nobody; one that is back is owed nothing."""
    back = {"compress_back": TopK(ratio=0.25)} if packed else {}
    came: list[int] = []
    clock = _played(
        ASGD(ahead=2, servers=2),
        4,
        60,
        compute=LogNormal(spread=1.0),
        faults=[RandomCrashes(every_s=15.0, back_after_s=3.0)],
        members=back,
        on_record=lambda _me, record, _s: came.append(record.seen.workers[0]),
    )
    assert set(came[-60:]) == {0, 1, 2, 3}
    clock.drain()
    assert not any(any(state["awaits"].values()) for state in clock.states[:4] if not state["new"])


# Who does not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SERVED, ids=lambda sync: type(sync).__name__)
def test_members_that_would_break_their_laws_are_refused_by_name(sync) -> None:
    found = _of(msgspec.structs.replace(sync, ahead=1)).check()
    name = type(sync).__name__
    if name in ("ASGD", "BASGD", "OrMo", "OrMoDA", "OrLoMo", "Downpour", "DelayedBlockProximal"):
        assert not found
        return
    (each,) = found
    assert (each.path, each.value, each.legal) == ("data_parallel.sync.ahead", 1, "0")
    assert name in each.rule


def test_none_ahead_is_as_it_was() -> None:
    """An answer is no longer, and no state has more."""
    plain = _played(SSP(), 2, 3, compute=Constant())
    assert "came" not in plain.states[2]
    assert "held" not in plain.states[0]
    clock = _played(ASGD(), 1, 3, compute=Constant())
    clock.drain()
    assert clock.sent_bytes[1] == 3 * (8 + 8 * 12)


# Processes ----------------------------------------------------------------------------------------


def _snapshot(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "server-0.safetensors")["worker/0/params"]


def _replayed(folder: Path, lr: float) -> torch.Tensor:
    """Steps along gradients at the versions that the list names."""
    models = [START]
    for row in read_applied(folder / "applied-0.bin"):
        at = models[int(row["version"])]
        models.append(models[-1] - lr * gradient(int(row["worker"]), int(row["number"]), at))
    return models[-1]


def test_one_worker_in_processes_is_one_push_late_at_most(tmp_path) -> None:
    with members(_of(ASGD(ahead=1)), 1, tmp_path) as run:
        run.pushed(60)
    rows = read_applied(tmp_path / "applied-0.bin")
    late = rows["number"] - rows["version"]
    assert set(late.tolist()) <= {0, 1}
    assert 1 in late
    _close(_snapshot(tmp_path), _replayed(tmp_path, 0.05))


def test_what_processes_applied_is_steps_along_gradients_at_what_they_name(tmp_path) -> None:
    with members(_of(ASGD(ahead=2)), 3, tmp_path) as run:
        run.pushed(150)
    rows = read_applied(tmp_path / "applied-0.bin")
    for worker in range(3):
        numbers = rows["number"][rows["worker"] == worker]
        assert numbers.tolist() == list(range(len(numbers)))
    _close(_snapshot(tmp_path), _replayed(tmp_path, 0.05))
