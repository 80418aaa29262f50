"""Workers that crash, come back and join on the virtual clock, by the fault; by hand if it can."""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.push import HELLO, LEFT, Push
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, SMEGA2, OrLoMo, OrMo, OrMoDA, ShiftedMomentum
from polyreme.algo.sync.kind import State
from polyreme.errors import RunError
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.driver import Simulation
from polyreme.sim.faults import Crash, Fault, Join, RandomCrashes
from polyreme.sim.network import Uniform
from polyreme.sim.options import Simulate
from served import simulated

torch.set_num_threads(1)

HALF = Uniform(latency_s=0.5, bytes_per_s=1e15)
FAR = Uniform(latency_s=5.0, bytes_per_s=1e15)
HEARD: list[tuple[int, int]] = []


class Heard(ASGD, frozen=True, kw_only=True, tag="Heard", tag_field="kind"):
    """ASGD that notes worker and number of what a server reads."""

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Any) -> State:
        HEARD.append((push.worker, push.number))
        return {}


class Silent(ASGD, frozen=True, kw_only=True, tag="Silent", tag_field="kind"):
    """ASGD whose server answers nobody."""

    def answered(self, state: State, push: Push, me: Any) -> tuple[State, tuple[int, ...]]:
        return {}, ()


class Run:
    """A simulation that notes when pushes were recorded, and what was computed."""

    def __init__(self, n: int, faults: list[Fault], sync: Any = None, **more: Any) -> None:
        HEARD.clear()
        self.came: list[tuple[int, float]] = []
        self.computed: list[tuple[int, int]] = []
        algorithm = DataParallel(rule=SGD(), sync=sync or Heard(), **more.pop("members", {}))
        self.clock = simulated(
            algorithm,
            self._gradient,
            torch.linspace(-1, 1, 12, dtype=torch.float64),
            n,
            faults=faults,
            on_record=lambda _me, r, now_s: self.came.append((r.seen.workers[0], _short(now_s))),
            **{"compute": Constant(seconds=1.0), "network": HALF, **more},
        )

    def _gradient(self, rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        self.computed.append((rank, batch))
        return w - rank - math.sin(batch)

    def times(self, worker: int) -> list[float]:
        return [now_s for each, now_s in self.came if each == worker]

    def batches(self, worker: int) -> list[int]:
        return [batch for each, batch in self.computed if each == worker]

    def until(self, now_s: float) -> Run:
        """Play past this time."""
        self.clock.play(0)
        while self.clock.clock.now_s <= now_s:
            assert self.clock.clock.step()
        return self


def _short(now_s: float) -> float:
    return round(now_s, 6)


def _present(clock: Simulation, n: int) -> list[bool]:
    return list(clock.states[n]["present"].values())


# Without faults a push comes at 1.5, its answer at 2, the next push at 3.5, and so on.


def test_a_crash_while_it_computes_loses_the_gradient_and_pushes_go_on_when_it_is_back():
    crashed = Run(2, [Crash(worker=1, at_s=2.5, back_s=10.0)]).until(17)
    # Back at 10 it asks, is answered at 11, and its push comes at 12.5.
    assert crashed.times(1)[:4] == [1.5, 12.5, 14.5, 16.5]
    assert crashed.times(0)[:8] == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5, 15.5]
    assert crashed.batches(1)[:3] == [0, 2, 3]  # batch 1 was begun


def test_what_a_worker_had_sent_before_its_crash_still_arrives():
    crashed = Run(2, [Crash(worker=1, at_s=3.2, back_s=10.0)]).until(15)
    assert crashed.times(1)[:4] == [1.5, 3.5, 12.5, 14.5]
    assert crashed.batches(1)[:4] == [0, 1, 2, 3]


def test_a_crash_for_good_ends_its_pushes_and_the_others_make_the_steps():
    crashed = Run(2, [Crash(worker=1, at_s=3.2)])
    crashed.clock.play(10)
    assert len(crashed.came) == 20
    assert crashed.times(1) == [1.5, 3.5]


def test_servers_hear_of_a_crash_after_a_while_and_of_the_return_at_once():
    crashed = Run(2, [Crash(worker=1, at_s=2.5, back_s=10.0, detect_s=2.0)])
    assert _present(crashed.until(4.6).clock, 2) == [True, True]
    assert _present(crashed.until(5.1).clock, 2) == [True, False]  # half a second on its way
    assert _present(crashed.until(10.1).clock, 2) == [True, False]
    assert _present(crashed.until(10.6).clock, 2) == [True, True]
    assert [number for worker, number in HEARD if worker == 1] == [0, LEFT, HELLO]


def test_a_worker_that_is_back_before_its_crash_is_heard_of_tells_it_first():
    Run(1, [Crash(worker=0, at_s=2.5, back_s=3.0, detect_s=100.0)]).until(120)
    assert [number for _, number in HEARD[:4]] == [0, LEFT, HELLO, 1]
    assert Counter(number for _, number in HEARD)[LEFT] == 1


def test_servers_hear_of_a_crash_behind_what_was_sent_before_it():
    """A push that takes long is not overtaken by the news, or its worker would seem to be there."""
    slow = Uniform(latency_s=0.5, bytes_per_s=152 / 20)
    crashed = Run(2, [Crash(worker=1, at_s=1.5, detect_s=0.1)], network=slow).until(60)
    assert [number for worker, number in HEARD if worker == 1] == [0, LEFT]
    assert _present(crashed.clock, 2) == [True, False]


def test_an_answer_to_what_was_sent_before_a_crash_does_not_reach_who_came_back():
    # The push comes at 6, its answer would at 11; the worker asks at 3, is answered at 13,
    # computes until 14, and its push comes at 19. Then a round takes 11 seconds.
    crashed = Run(1, [Crash(worker=0, at_s=2.0, back_s=3.0)], network=FAR).until(31)
    assert crashed.times(0) == [6.0, 19.0, 30.0]


def test_an_answer_on_its_way_when_it_crashes_is_lost():
    # The answer leaves at 6 and would be there at 11; the worker is away from 7 to 8.
    crashed = Run(1, [Crash(worker=0, at_s=7.0, back_s=8.0)], network=FAR).until(25)
    assert crashed.times(0) == [6.0, 24.0]  # asks at 8, is answered at 18, pushes at 19
    assert crashed.batches(0) == [0, 1]


def test_a_worker_that_joins_later_is_absent_until_then():
    joined = Run(3, [Join(worker=2, at_s=30.0)])
    assert _present(joined.until(0.5).clock, 3) == [True, True, False]
    joined.until(34)
    assert joined.times(2) == [32.5]
    assert joined.batches(2)[0] == 0
    assert [number for worker, number in HEARD if worker == 2] == [LEFT, HELLO, 0]
    assert _present(joined.clock, 3) == [True, True, True]


def test_a_worker_that_joins_may_crash_later():
    faults = [Join(worker=0, at_s=10.0), Crash(worker=0, at_s=13.0, back_s=20.0)]
    assert not Simulate(workers=1, faults=tuple(faults)).check()
    joined = Run(1, faults).until(25)
    assert joined.times(0)[:3] == [12.5, 22.5, 24.5]


def test_what_a_worker_kept_of_its_own_is_lost_and_its_counts_go_on():
    members = {"compress": TopK(ratio=0.1, dense_below=0), "feedback": ErrorFeedback()}
    crashed = Run(1, [Crash(worker=0, at_s=6.2, back_s=7.0)], members=members)
    crashed.until(5.9)
    before = crashed.clock.states[0]
    (kept,) = before["exchange"]["0"]["feedback"].values()
    assert kept.abs().sum() > 0
    crashed.until(6.1)  # and the crash
    after = crashed.clock.states[0]
    (kept,) = after["exchange"]["0"]["feedback"].values()
    assert kept.abs().sum() == 0
    assert after["new"]
    assert (after["pushes"], after["step"]) == (before["pushes"], before["pushes"] + 1)
    assert msgspec.json.encode(sorted(before)) == msgspec.json.encode(sorted(after))


@pytest.mark.parametrize("seed", range(3))
def test_every_gradient_that_was_recorded_is_applied_once_under_random_crashes(seed: int):
    """Gradients are marks: the server's model says which were taken, and how often."""
    n, most = 8, 64
    applied = torch.zeros(n * most, dtype=torch.float64)
    computed: list[tuple[int, int]] = []
    records = Counter()

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        computed.append((rank, batch))
        found = torch.zeros_like(w)
        found[rank * most + batch] = -1.0
        return found

    clock = simulated(
        DataParallel(rule=SGD(), sync=ASGD()),
        gradient,
        applied,
        n,
        lr=1.0,
        compute=LogNormal(spread=0.5),
        network=Uniform(latency_s=0.2, bytes_per_s=1e5, jitter_s=0.1),
        faults=[RandomCrashes(every_s=6.0, back_after_s=2.0)],
        seed=seed,
        on_record=lambda _me, record, _now_s: records.update(record.seen.workers),
    )
    clock.play(20)
    clock.drain()
    counts = clock.algorithm.sync.whole(clock.states[n:]).view(n, most)
    assert set(counts.flatten().tolist()) == {0.0, 1.0}
    assert counts.sum(1).tolist() == [records[rank] for rank in range(n)]
    assert clock.states[n]["version"] == sum(records.values()) >= 160
    assert len(set(computed)) == len(computed)
    taken = {(int(rank), int(batch)) for rank, batch in counts.nonzero()}
    assert taken <= set(computed)
    begun = [clock.states[rank]["step"] for rank in range(n)]
    assert sum(begun) > len(taken)  # some were lost


SYNCS = [ASGD(), ShiftedMomentum(), SMEGA2(), OrMo(), OrMoDA(), OrLoMo(local_steps=3)]


def _random(sync: Any, seed: int, **more: Any) -> Run:
    return Run(
        8,
        [RandomCrashes(every_s=10.0, back_after_s=4.0), Join(worker=3, at_s=7.0)],
        msgspec.structs.replace(sync, servers=2),
        compute=LogNormal(spread=0.5),
        network=Uniform(latency_s=0.1, bytes_per_s=1e4, loss=0.1, retry_s=0.5, jitter_s=0.2),
        seed=seed,
        **more,
    )


@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: type(sync).__name__)
def test_eight_workers_with_random_crashes_train_to_the_end_and_the_same_each_time(sync):
    def played(seed: int) -> tuple[list[tuple[int, float]], torch.Tensor, list[int]]:
        made = _random(sync, seed)
        made.clock.play(24)
        return made.came, sync.whole(made.clock.states[8:]), made.clock.sent_bytes

    came, model, sent_bytes = played(1)
    assert len(came) >= 24 * 8
    assert {worker for worker, _ in came} == set(range(8))
    assert model.isfinite().all()
    again, same, same_bytes = played(1)
    assert came == again
    assert sent_bytes == same_bytes
    assert torch.equal(model, same)
    assert played(2)[0] != came


def test_compressors_of_a_worker_that_is_back_draw_anew():
    """Pushes go on counting, and draws are functions of their number."""
    found = _random(ASGD(), 3, members={"compress": QSGD()})
    found.clock.play(20)
    found.clock.drain()
    for rank in range(8):
        numbers = found.clock.states[rank]["pushes"]
        assert numbers <= found.clock.states[rank]["step"]
        assert numbers >= len(found.times(rank))


def test_what_is_drained_amid_crashes_goes_on_in_a_new_simulation():
    first = _random(OrMo(), 5)
    first.clock.play(12)
    first.clock.drain()
    states = first.clock.states
    assert states[8]["version"] == states[9]["version"]
    assert not any(any(state["awaits"].values()) for state in states[:8] if not state["new"])
    first.clock.play(20)  # and in this one
    assert first.clock.states[8]["step"] >= 160
    other = simulated(
        first.clock.algorithm,
        lambda rank, _batch, w: w - rank,
        torch.zeros(12, dtype=torch.float64),
        8,
        states=states,
        network=HALF,
    )
    other.play(20)
    assert all(_present(other, 8))
    assert other.states[8]["step"] >= 160


def test_draining_does_not_wait_for_who_is_to_come_back():
    made = Run(2, [Crash(worker=1, at_s=2.5, back_s=1e6), Join(worker=0, at_s=1e7)])
    made.until(2.6)
    made.clock.drain()
    assert made.clock.clock.now_s < 10


def test_seconds_of_a_worker_that_was_away_add_up():
    made = _random(OrMo(), 6)
    made.clock.play(30)
    made.clock.drain()
    for each in made.clock.spent:
        assert min(each.compute_s, each.wait_s) >= 0
        total = each.compute_s + each.comm_s + each.wait_s
        assert total == pytest.approx(made.clock.clock.now_s)
    away = Run(1, [Crash(worker=0, at_s=2.5, back_s=10.0)]).until(10.6).clock
    assert away.spent[0].compute_s == pytest.approx(1.5)


def test_workers_that_are_all_gone_are_named():
    made = Run(2, [Crash(worker=0, at_s=2.5), Crash(worker=1, at_s=4.0)])
    with pytest.raises(RunError) as error:
        made.clock.play(10)
    assert "server 0 (step 4) waits for a message from any worker" in str(error.value)
    assert "workers 0, 1 are gone" in str(error.value)


def test_a_run_that_only_a_crash_could_move_is_stuck_at_once():
    made = Run(2, [RandomCrashes(every_s=1e6)], Silent())
    with pytest.raises(RunError, match=r"worker 0 .* waits for a message from server 0"):
        made.clock.play(10)
    assert made.clock.clock.now_s < 10


def test_a_run_leaves_the_garbage_collector_as_it_was_also_where_it_fails():
    before, during = gc.get_threshold(), []

    class Watched(Silent, frozen=True, kw_only=True, tag="Watched", tag_field="kind"):
        def heard(self, algorithm: DataParallel, state: State, push: Push, me: Any) -> State:
            during.append(gc.get_threshold()[0])
            return {}

    with pytest.raises(RunError):
        Run(2, [Crash(worker=0, at_s=2.5)], Watched()).clock.play(10)
    assert min(during) > before[0]
    assert gc.get_threshold() == before


def test_a_worker_that_is_to_come_back_is_waited_for():
    made = Run(1, [Crash(worker=0, at_s=2.5, back_s=1e6)])
    made.clock.play(2)
    assert made.times(0) == [1.5, 1e6 + 2.5]
