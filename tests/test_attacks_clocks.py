"""Attacks on both clocks: processes and simulator alike to the bit, checkpoints, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from both_clocks import in_processes, job_of, on_the_clock
from hostile import Middle
from polyreme import api
from polyreme.algo.attack import (
    ALIE,
    Attack,
    InnerProduct,
    LabelFlip,
    Mimic,
    Noise,
    NotFinite,
    Optimised,
    Replay,
    SignFlip,
    Silence,
)
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.feedback import WorkerMomentum
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.push import Form
from polyreme.algo.rule import SGD, SNGD
from polyreme.algo.sync import LocalSteps
from polyreme.algo.topology import ParameterServer
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.errors import ConfigError
from polyreme.report import suspects
from polyreme.report.page import render
from polyreme.report.runs import read_run

BYZANTINE = DataParallel(
    rule=SNGD(lr=0.1), feedback=WorkerMomentum(momentum=0.5), aggregate=Middle()
)
CASES: list[tuple[DataParallel, tuple[Attack, ...]]] = [
    (BYZANTINE, (SignFlip(workers=(3,)), NotFinite(workers=(2,)))),
    (BYZANTINE, (Noise(workers=(3,), relative=True), Silence(workers=(0,)))),
    (BYZANTINE, (ALIE(workers=(3,)), LabelFlip(workers=(1,)))),
    (BYZANTINE, (InnerProduct(workers=(1,)), Replay(workers=(0,), steps=2))),
    (BYZANTINE, (Mimic(workers=(2, 3), warm_up=3),)),
    (BYZANTINE, (Optimised(workers=(2,), direction="mean", tries=6),)),
    (
        DataParallel(rule=SGD(lr=0.1), topology=ParameterServer(), aggregate=Middle()),
        (Mimic(workers=(3,), warm_up=3), Silence(workers=(2,))),
    ),
    (
        DataParallel(rule=SGD(lr=0.1), sync=LocalSteps(every=2), compress=TopK(ratio=0.5)),
        (ALIE(workers=(3,)), Replay(workers=(1,))),
    ),
    (DataParallel(rule=SGD(lr=0.1)), (SignFlip(workers=(3,)), Silence(workers=(1,)))),
]


@pytest.mark.parametrize(("algorithm", "attack"), CASES, ids=range(len(CASES)))
def test_an_attack_is_the_same_on_both_clocks(
    pool: Any, algorithm: DataParallel, attack: tuple[Attack, ...]
) -> None:
    case = job_of(algorithm, 4, attack=attack)
    (real, _, _), *_ = pool(4).run(in_processes, case)
    (virtual, _), *_ = pool(1).run(on_the_clock, case, 4)
    assert real.keys() == virtual.keys()
    assert all(torch.equal(real[name], virtual[name]) for name in real)
    (clean, _), *_ = pool(1).run(on_the_clock, job_of(algorithm, 4), 4)
    assert any(not torch.equal(clean[name], virtual[name]) for name in clean)


@pytest.mark.parametrize(
    "attack", [Replay(workers=(3,), steps=4), Mimic(workers=(3,), warm_up=4)], ids=str
)
def test_what_an_attack_keeps_is_in_checkpoints(pool: Any, attack: Attack, tmp_path: Path) -> None:
    case = job_of(BYZANTINE, 4, attack=(attack,))
    (whole, _, _), *_ = pool(4).run(in_processes, case, tmp_path / "whole")
    (_, stopped, _), *_ = pool(4).run(in_processes, case, tmp_path / "part", 1)
    (resumed, steps, _), *_ = pool(4).run(in_processes, case, tmp_path / "part", 0, True)
    assert (stopped, steps) == (1, 6)
    assert whole
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


LAYOUT = Layout.of({"w": (6,)})


def _worker(rank: int, *attack: Attack) -> Worker:
    return Worker(rank=rank, n=3, layout=LAYOUT, seed=1, lr=lambda _: 0.1, attack=attack)


@pytest.mark.parametrize("compress", [None, TopK(ratio=0.5, per="model")], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_hostile_push_holds_the_attack_on_what_the_honest_one_holds(
    compress: Any, momentum: float
) -> None:
    more = {} if compress is None else {"compress": compress}
    algorithm = DataParallel(feedback=WorkerMomentum(momentum=momentum), **more)
    form = Form(algorithm=algorithm, servers=2, n_vectors=1, n_batches=1)
    honest, liar = _worker(1), _worker(1, SignFlip(workers=(1,), scale=2.0))
    vector = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0, 6.0])
    states = [form.init(vector, me)["0"] for me in (honest, liar)]
    for step in range(3):
        turn, given, found = Turn(step=step, lr=0.1), vector * (step + 1), []
        for at, me in enumerate((honest, liar)):
            packets, states[at] = form.packed(given, states[at], 0, turn, me)
            found.append(
                torch.cat([each.decode().reshape(-1) for part in packets for each in part])
            )
        torch.testing.assert_close(found[1], -2.0 * found[0])


SERVED = """
[model]
kind = "mlp"
hidden = [4]

[data]
kind = "digits"

[train]
steps = 8
global_batch = 16
eval_every = 8

[cluster]
cpu_processes = 2

[data_parallel]
rule = { kind = "SGD", lr = 0.02 }
sync = { kind = "SYNC" }

[simulate]
workers = 2
attack = { kind = "ATTACK", workers = [1] }
"""


@pytest.mark.long
def test_hostile_workers_of_a_server_spoil_the_model_on_both_clocks(
    tmp_path: Path, warm: None
) -> None:
    """Steps thirty times as long in the wrong direction are seen whatever comes first."""
    spec = tmp_path / "spec.toml"
    attack = 'SignFlip", scale = 30.0'
    spec.write_text(SERVED.replace("SYNC", "ASGD").replace('ATTACK"', attack))
    real = api.train(spec, out=tmp_path / "real", attack=True)
    virtual = api.simulate(spec, out=tmp_path / "virtual")
    honest = api.simulate(spec, out=tmp_path / "honest", overrides=["simulate.attack=[]"])
    assert real is not None
    lost = [each.metrics["heldout_loss"] for each in (real, virtual, honest)]
    assert None not in lost
    assert min(lost[:2]) > 2 * lost[2]  # type: ignore[type-var, operator]


@pytest.mark.long
def test_servers_never_hear_of_a_silent_worker(tmp_path: Path, warm: None) -> None:
    """On both clocks all pushes are of the other, and the run ends."""
    spec = tmp_path / "spec.toml"
    spec.write_text(SERVED.replace("SYNC", "ASGD").replace("ATTACK", "Silence"))
    for folder, run in (("real", api.train), ("virtual", api.simulate)):
        more: dict[str, Any] = {"attack": True} if folder == "real" else {}
        summary = run(spec, out=tmp_path / folder, **more)
        assert summary is not None
        assert (summary.status, summary.steps) == ("done", 8)
        (told,) = (each for each in _events(tmp_path / folder) if each["kind"] == "delays")
        assert set(told["by_worker"]) == {"0"}


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


MET = """
[model]
kind = "mlp"
hidden = [4]

[data]
kind = "digits"

[train]
steps = 6
global_batch = 32
log_every = 4

[cluster]
cpu_processes = 2

[data_parallel]
rule = { kind = "SGD", lr = 0.02 }

[simulate]
workers = 2
attack = [{ kind = "LabelFlip", workers = [1] }]
"""


def test_a_real_run_plays_attacks_only_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: None
) -> None:
    """Without the flag it says so and is the run without them; with it, that of the simulator."""
    spec = tmp_path / "spec.toml"
    spec.write_text(MET)
    honest_only = ["simulate.attack=[]"]
    ignored = api.train(spec, out=tmp_path / "ignored")
    assert capsys.readouterr().err.count("simulate.attack is not played") == 1
    api.train(spec, out=tmp_path / "hostile", attack=True)
    assert "is not played" not in capsys.readouterr().err
    api.simulate(spec, out=tmp_path / "virtual")
    honest = api.simulate(spec, out=tmp_path / "honest", overrides=honest_only)
    hostile_, virtual, clean = (
        load_file(tmp_path / each / "final.safetensors")
        for each in ("hostile", "virtual", "honest")
    )
    assert all(torch.equal(hostile_[name], virtual[name]) for name in clean)
    assert any(not torch.equal(hostile_[name], clean[name]) for name in clean)
    assert ignored is not None
    assert ignored.final_loss == pytest.approx(honest.final_loss, rel=1e-4)
    with pytest.raises(ConfigError, match="--attack"):
        api.train(spec, out=tmp_path / "none", overrides=honest_only, attack=True)
    with pytest.raises(ConfigError, match="not among the 1 workers"):
        api.train(spec, out=tmp_path / "few", devices=1, attack=True)


def test_flipped_labels_are_those_of_hostile_workers_in_training_alone() -> None:
    from polyreme.runtime.feed import Feed, Seat
    from tiny import VOCABULARY

    case = job_of(DataParallel(), 2)
    job = case.job()
    from polyreme.data.order import arrange

    order = arrange(job.source, None, n_workers=2, global_batch=6, seed=0, tail="drop")
    feeds = [
        Feed(
            source=job.source,
            order=order,
            graph=job.graph,
            seat=Seat(worker=1, n_workers=2),
            device=torch.device("cpu"),
            n_microbatches=1,
            attack=(LabelFlip(workers=(rank,)),),
        )
        for rank in (0, 1)
    ]
    (honest,), (flipped,) = (feed.read(0) for feed in feeds)
    assert honest is not None
    assert flipped is not None
    for name in honest:
        wanted = honest[name]
        if name == job.graph.labels:
            wanted = torch.where(wanted < 0, wanted, VOCABULARY - 1 - wanted)
        assert torch.equal(flipped[name], wanted)
    assert not torch.equal(flipped[job.graph.labels], honest[job.graph.labels])


def test_the_log_counts_suspects_of_steps_that_it_lists_or_not(tmp_path: Path) -> None:
    """By a run whose log has one step of four; terminal, page and JSON name the same workers."""
    folder = _suspected(tmp_path)
    run = read_run(folder)
    assert suspects.shares(run) == pytest.approx({0: 0.2, 2: 0.6, 3: 1.0})
    assert suspects.line(run) == (
        "workers 2, 3 were set aside or farthest in 60 %, 100 % of 10 steps"
    )
    assert api.run_json(folder)["suspects"] == pytest.approx({"0": 0.2, "2": 0.6, "3": 1.0})
    page = render([folder], tmp_path / "report.html").read_text()
    assert "Workers 2, 3 were set aside or farthest in 60 %, 100 % of 10 steps." in page
    from rich.console import Console

    console = Console(width=100, record=True)
    api.show_run(folder, console)
    said = " ".join(console.export_text().replace("│", " ").split())
    assert suspects.line(run) in said


def _suspected(folder: Path) -> Path:
    from polyreme.runlog import StepEvent, SuspectsEvent, Writer

    writer = Writer(folder / "log.jsonl")
    for step in (4, 8):
        writer.write(
            StepEvent(
                t=float(step),
                attempt=0,
                step=step,
                loss=1.0,
                grad_norm=None,
                lr=0.1,
                samples=1,
                tokens=0,
                step_s=1.0,
                compute_s=1.0,
                comm_s=0.0,
                wait_s=0.0,
                wire_bytes=0,
                memory_bytes=0,
                suspects=(3,),
            )
        )
    by_worker = {0: 2, 2: 6, 3: 10}
    writer.write(SuspectsEvent(t=9.0, attempt=0, step=10, named=10, by_worker=by_worker))
    writer.close()
    return folder
