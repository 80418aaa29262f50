"""Workers that share memory and change it themselves, without locks."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyreme import api
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Numbers, alone, settled
from polyreme.algo.push import Push
from polyreme.algo.rule import LARS, SGD, AdamW
from polyreme.algo.sync import Hogwild
from polyreme.algo.vector import Layout
from polyreme.cluster.accelerator import Accelerator
from polyreme.errors import ConfigError, RunError
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.served.memory import Memory, shared
from polyreme.runtime.served.nursery import Nursery
from served import team
from served_members import START, TARGET, gradient, hammer, members

torch.set_num_threads(1)
RULES = [SGD(), SGD(momentum=0.9, weight_decay=0.1), AdamW(), LARS()]
each_rule = pytest.mark.parametrize("rule", RULES, ids=["SGD", "momentum", "AdamW", "LARS"])


def _of(rule: Any = None) -> DataParallel:
    return DataParallel(rule=rule or SGD(), sync=Hogwild())


def _plain(rule: Any, n_steps: int, lr: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """What one worker comes to that nobody else knows of."""
    layout = Layout.of({"w": (12,)})
    params, state = START.clone(), rule.init(START)
    for batch in range(n_steps):
        found = gradient(0, batch, params)
        delta, state = alone(settled(rule.update(found, state, params, lr=lr, layout=layout)))
        params = params + delta
    return params, state


def _numbers(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Of each life of each worker the numbers of its updates, in the order of the list."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in read_applied(folder / "applied-0.bin"):
        found.setdefault((int(row["worker"]), int(row["life"])), []).append(int(row["number"]))
    return found


def _without_gap(folder: Path) -> int:
    """Every update of every life is listed once, from the first to the last; how many are."""
    numbers = _numbers(folder)
    for who, found in numbers.items():
        assert found == list(range(len(found))), who
    return sum(map(len, numbers.values()))


@pytest.mark.slice(1)
@each_rule
def test_one_worker_is_the_rule_itself_to_the_bit(rule, tmp_path) -> None:
    with members(_of(rule), 1, tmp_path, lr=0.05) as run:
        rows = run.pushed(60)
    assert {row[1] for row in rows} == {0}
    version = run.left["version"]
    assert version >= 60
    params, state = _plain(rule, version, 0.05)
    assert torch.equal(run.left["params"], params)
    for name, kept in state.items():
        assert torch.equal(torch.as_tensor(run.left["rule"][name]), torch.as_tensor(kept)), name


def test_several_workers_lose_no_update_from_list_and_log(tmp_path) -> None:
    with members(_of(), 3, tmp_path) as run:
        rows = run.pushed(300)
        run.rest()
        while not run.home.told.empty():
            rows.append(run.home.told.get())
    n_listed = _without_gap(tmp_path)
    assert {worker for worker, _ in _numbers(tmp_path)} == {0, 1, 2}
    assert len(rows) == n_listed == run.left["version"] == run.left["step"]
    delays = Counter(int(row[1]) for row in rows)
    assert min(delays) >= 0
    assert max(delays) > 0
    assert (run.left["params"] - TARGET).norm() < 0.1


def test_entries_that_a_step_leaves_are_never_written(tmp_path) -> None:
    """Workers that move different entries of the same lines lose nothing to each other."""
    sync, n, count, size = Hogwild(), 2, 10_000, 512
    algorithm = DataParallel(rule=SGD(), sync=sync)
    server = team(algorithm, Layout.of({"w": (size,)}), n)[n]
    state = sync.init(algorithm, torch.zeros(size, dtype=torch.float64), server)
    with (
        shared(state, n) as file,
        Nursery(("torch", "served_members"), tmp_path, files=(file,)) as nursery,
    ):
        for rank in range(n):
            nursery.begin(rank, hammer, (sync, file, n, rank, count, size))
        end_s = time.monotonic() + 120
        ended: list[Any] = []
        while len(ended) < n and time.monotonic() < end_s:
            ended += nursery.ended()
            time.sleep(0.01)
        assert [each.code for each in ended] == [0] * n, ended
        left = Memory(file, state, n).state()
        assert torch.equal(left["params"], torch.full((size,), -float(count)).double())
        assert (left["version"], left["step"]) == (n * count, n * count)


def test_a_killed_server_loses_nothing_of_the_memory_nor_of_the_list(tmp_path) -> None:
    with members(_of(), 1, tmp_path, lr=0.05) as run:
        run.pushed(100)
        run.kill(1)
        run.pushed(100)
        run.kill(1)
        run.pushed(200)
        run.rest()
    params, _ = _plain(SGD(), run.left["version"], 0.05)
    assert torch.equal(run.left["params"], params)
    assert _without_gap(tmp_path) == run.left["version"]


def test_a_killed_worker_comes_back_to_the_memory_of_now(tmp_path) -> None:
    with members(_of(), 3, tmp_path) as run:
        run.pushed(60)
        run.kill(1)
        run.pushed(300)
        run.rest()
    assert _without_gap(tmp_path) <= run.left["version"]  # what it had not told is in no list
    assert {life for worker, life in _numbers(tmp_path) if worker == 1} == {0, 1}
    assert (run.left["params"] - TARGET).norm() < 0.1


def _storm(seed: int, n_moments: int, killed: set[int], folder: Path) -> int:
    """Signals to three workers and their server (3) at random moments, SIGKILL to some alone.

    Gives how many updates of the memory are in no list.
    """
    drawn, n = random.Random(seed), 3
    with members(_of(), n, folder, lr=0.02) as run:
        run.pushed(20)
        for _ in range(n_moments):
            time.sleep(drawn.uniform(0.0, 0.15))
            member = drawn.randrange(n + 1)
            if drawn.random() < 0.5 and member in killed:
                run.kill(member)
            else:
                run.kill(member, signal.SIGSTOP)
                time.sleep(drawn.uniform(0.0, 0.15))
                run.kill(member, signal.SIGCONT)
        while not run.home.told.empty():
            run.home.told.get()
        run.pushed(600)
        run.rest()
    assert (run.left["params"] - TARGET).norm() < 0.1
    return run.left["version"] - _without_gap(folder)


def test_a_server_killed_at_random_moments_hears_of_every_update(tmp_path) -> None:
    assert _storm(1, 10, {3}, tmp_path) == 0


@pytest.mark.long
def test_workers_killed_at_random_moments_leave_no_gap_and_no_double(tmp_path) -> None:
    assert _storm(2, 8, {0, 1, 2, 3}, tmp_path) >= 0  # what they had not told is in no list


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 6))
def test_fifty_signals_at_random_moments(seed: int, tmp_path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "all").mkdir()
    assert _storm(seed, 50, {3}, tmp_path / "some") == 0
    assert _storm(seed, 50, {0, 1, 2, 3}, tmp_path / "all") >= 0


def _memory(file: int, algorithm: DataParallel, n: int = 2) -> tuple[Memory, Any]:
    server = team(algorithm, Layout.of({"w": (12,)}), n, lr=lambda step: 0.1 / (1 + step))[n]
    return Memory(file, _begun(algorithm, n), n), server


def _begun(algorithm: DataParallel, n: int = 1) -> dict[str, Any]:
    server = team(algorithm, Layout.of({"w": (12,)}), n)[n]
    return algorithm.sync.init(algorithm, START.clone(), server)


def _push(found: torch.Tensor, worker: int = 0, version: int = 0) -> Push:
    finite = float(found.isfinite().all())
    row = Numbers(0.5, 4.0, finite, 4.0)
    return Push(worker=worker, number=0, version=version, lr=0.1, vectors=(found,), rows=(row,))


def test_an_update_tells_its_delay_its_rate_and_whether_it_was_applied() -> None:
    algorithm = _of(AdamW())
    state = {**_begun(algorithm, 2), "step": 7, "version": 5}
    with shared(state, 2) as file:
        memory, server = _memory(file, algorithm)
        first = memory.update(algorithm.sync, algorithm, _push(START, 0, 5), server)
        bad = START.clone()
        bad[3] = math.nan
        before = memory.state()["params"].clone()
        second = memory.update(algorithm.sync, algorithm, _push(bad, 1, 5), server)
        assert torch.equal(memory.state()["params"], before)
        assert (first.delay, first.taken, first.step, first.row.weight) == (0, True, 4, 4.0)
        assert (second.delay, second.taken, second.step, second.row.weight) == (1, False, 5, 0.0)
        assert (first.lr, second.lr) == (0.1 / 4, 0.1 / 5)
        left = memory.state()
        assert (left["step"], left["version"], left["rule"]["step"]) == (9, 6, 1)
        assert type(second).opened(second.packed()) == second


def test_an_entry_that_nothing_is_added_to_keeps_its_sign_of_zero() -> None:
    """-0 + 0 is 0: who adds nothing and writes is seen."""
    algorithm = _of()
    with shared(_begun(algorithm, 2), 2) as file:
        memory, server = _memory(file, algorithm)
        memory.state()["params"].copy_(-torch.zeros(12).double())
        found = -torch.zeros(12).double()
        found[4] = 1.0
        memory.update(algorithm.sync, algorithm, _push(found), server)
        left = memory.state()["params"]
        assert left[4] == -0.1
        assert left.signbit().all()


def test_what_others_did_between_read_and_write_stays(monkeypatch) -> None:
    algorithm, change = _of(), Hogwild.change
    with shared(_begun(algorithm, 2), 2) as file:
        memory, server = _memory(file, algorithm)

        def interrupted(sync: Hogwild, algorithm: DataParallel, state: Any, push: Push, *more: Any):
            changed = yield from change(sync, algorithm, state, push, *more)
            if push.worker == 0:
                memory.update(sync, algorithm, _push(TARGET, 1), server)
            return changed

        monkeypatch.setattr(Hogwild, "change", interrupted)
        note = memory.update(algorithm.sync, algorithm, _push(START, 0), server)
        left = memory.state()
        assert torch.equal(left["params"], START - 0.1 * TARGET - 0.1 * START)
        assert (left["version"], left["step"], note.delay) == (2, 2, 0)


def test_the_memory_ends_with_its_run_also_by_an_error() -> None:
    algorithm = _of()
    state = _begun(algorithm)
    files: list[int] = []

    def fails() -> None:
        with shared(state, 1) as file:
            files.append(file)
            assert os.fstat(file).st_nlink == 0  # no name that could be left behind
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(files[0])


def test_no_room_for_the_memory_is_said_before_workers_begin(monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    algorithm = _of()
    state = _begun(algorithm)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(RunError, match=r"no room for \d+ bytes that workers share"),
        shared(state, 1),
    ):
        pass


def test_one_memory_is_not_cut_for_servers() -> None:
    (found,) = DataParallel(rule=SGD(), sync=Hogwild(servers=2)).check()
    assert (found.path, found.value, found.legal) == ("data_parallel.sync.servers", 2, "1")
    assert "one memory" in found.rule


# `polyreme train` ---------------------------------------------------------------------------------

SPEC = """
[model]
kind = "mlp"
hidden = [8]

[data]
kind = "digits"

[train]
steps = 24
global_batch = 32
eval_every = 12
checkpoint_every = 8

[cluster]
cpu_processes = 2

[data_parallel]
rule = { kind = "AdamW", lr = 0.01 }
sync = { kind = "Hogwild" }

[simulate]
workers = 2
"""


@pytest.mark.long
def test_a_run_is_logged_without_gap_and_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, run = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(SPEC)
    first = api.train(spec, out=run, progress=True)
    assert "polyreme: 2 workers and 1 server\n" in capsys.readouterr().err
    assert (first.status, first.steps, first.workers) == ("done", 24, 2)
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 25))
    assert [sum(event["delays"].values()) for event in steps] == [2] * 24
    evals = [event["metrics"]["heldout_loss"] for event in events if event["kind"] == "eval"]
    assert len(evals) == 2
    assert evals[-1] < steps[0]["loss"]  # the first may be late: workers do not wait for the log
    rows = read_applied(run / "servers" / "applied-0.bin")
    left = load_file(run / "servers" / "server-0.safetensors")
    assert len(rows) == _without_gap(run / "servers") == int(left["worker/0/version"])
    assert np.all(rows["version"] < len(rows))
    kept = run / "checkpoints" / "step-16"
    again = api.train(spec, out=tmp_path / "again", resume=str(kept))
    assert (again.status, again.steps) == ("done", 24)
    later = load_file(tmp_path / "again" / "servers" / "server-0.safetensors")
    since = len(read_applied(tmp_path / "again" / "servers" / "applied-0.bin"))
    assert int(later["worker/0/version"]) >= 32 + since
    assert later["worker/0/version"] == later["worker/0/rule/step"]
    simulated = api.simulate(spec, out=tmp_path / "clock", resume=str(kept))
    assert simulated.steps == 24


class Card(Accelerator):
    """A device with memory of its own."""

    def count(self) -> int:
        return 2

    def device_name(self, index: int = 0) -> str:
        return "Card"


def test_devices_with_memory_of_their_own_are_refused(tmp_path: Path, monkeypatch) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    card = Card(name="card", device_type="meta", backend="none")
    monkeypatch.setattr("polyreme.api.problem.here", lambda *_: (None, card))
    with pytest.raises(ConfigError, match="memory of the host") as caught:
        api.train(spec, out=tmp_path / "run")
    (found,) = caught.value.violations
    assert (found.path, found.value, found.legal) == (
        "data_parallel.sync.kind",
        "Hogwild",
        '"ASGD"',
    )
