"""Plans over accelerators of this machine compute what one of them computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyreme import api
from polyreme.algo.rule import AdamW
from polyreme.cluster.accelerator import detect
from polyreme.runtime.launch import Launcher
from test_pipeline import family
from tiny import Case, Model

HERE = detect()
pytestmark = pytest.mark.skipif(HERE.on_host or HERE.count() < 2, reason="needs two accelerators")
CASE = Case(
    model=Model(tied=True, gain=True, frozen=True),
    plan={"precision": "fp32", "microbatches": 4},
    rule=AdamW(lr=0.01),
    global_batch=8,
    clip_norm=0.5,
    steps=5,
)
LLAMA = family("llama tied", dict(CASE.plan), rule=AdamW(lr=0.01), global_batch=8, steps=5)
PLANS = [
    {"replica": 2},
    {"replica": 2, "decouple": True},
    {"replica": 2, "decouple": True, "bucket_bytes": 1},
    *({"shard": 2, "level": level} for level in ("optimizer", "grads", "params")),
    {"shard": 2, "level": "params", "prefetch": False, "recompute": True},
    *(
        {"pp": 2, "order": order}
        for order in ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe-v", "chimera")
    ),
]


def trained(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights at the end, on the accelerators of the launcher's processes."""
    from polyreme.runtime import loop, mesh
    from polyreme.runtime.gathering import full_parameters
    from test_runtime import Record

    world = mesh.open(detect())
    record = Record()
    outcome = loop.train(case.job(), world, log=record)
    weights = {name: each.numpy() for name, each in full_parameters(outcome.state)}
    mesh.close(world)
    return [each.loss for each in record.events if hasattr(each, "loss")], weights


@pytest.fixture(scope="module")
def run():
    with Launcher() as launcher:

        def ran(case, n, plan):
            case = dataclasses.replace(case, plan={**case.plan, **plan})
            return launcher.run(trained, (case,), n_processes=n)[0]

        yield ran


@pytest.fixture(scope="module")
def alone(run):
    return {name: run(case, 1, {}) for name, case in (("tiny", CASE), ("llama", LLAMA))}


def _compare(found, expected):
    losses, weights = found
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert set(weights) == set(expected[1])
    for name, each in expected[1].items():
        one, other = torch.from_numpy(weights[name]), torch.from_numpy(each)
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_two_accelerators_train_what_one_trains(run, alone, plan):
    _compare(run(CASE, 2, plan), alone["tiny"])


@pytest.mark.parametrize(
    "plan",
    [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2, "order": "zb-h1"}, {"pp": 2, "order": "terapipe"}],
    ids=str,
)
def test_two_accelerators_split_a_transformer(run, alone, plan):
    _compare(run(LLAMA, 2, plan), alone["llama"])


TOGETHER = """
[model]
kind = "mlp"
hidden = [16]

[data]
kind = "digits"

[train]
steps = 6
global_batch = 64
precision = "fp32"

[data_parallel]
rule = { kind = "SGD", lr = 0.05, momentum = 0.9 }
"""
EXCHANGES = {
    "sparse packets": ['compress={ kind = "TopK", ratio = 0.1 }', 'feedback={ kind = "GMC" }'],
    "codes": ['compress={ kind = "QSGD", levels = 15 }', 'feedback={ kind = "ErrorFeedback" }'],
    "rounds": ['compress={ kind = "PowerSGD", rank = 2 }', 'feedback={ kind = "ErrorFeedback" }'],
    "a ring": ['topology={ kind = "Ring" }', 'compress={ kind = "Sign" }'],
    "a server": ['topology={ kind = "ParameterServer" }', 'compress={ kind = "Sign" }'],
    "neighbours": ['topology={ kind = "Gossip" }'],
    "votes": ['aggregate={ kind = "MajorityVote" }'],
    "local steps": ['sync={ kind = "LocalSteps", every = 2 }'],
}


@pytest.mark.parametrize("options", EXCHANGES.values(), ids=list(EXCHANGES))
def test_workers_on_accelerators_exchange_what_one_process_plays(tmp_path, options) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(TOGETHER)
    changes = [f"data_parallel.{each}" for each in options]
    if any("GMC" in each for each in options):
        changes.append("data_parallel.rule.momentum=0.0")
    found = api.train(spec, out=tmp_path / "run", devices=2, overrides=changes)
    played = api.simulate(spec, out=tmp_path / "played", overrides=[*changes, "simulate.workers=2"])
    assert found.metrics["heldout_loss"] == pytest.approx(played.metrics["heldout_loss"], rel=1e-3)


SERVED = """
[model]
kind = "mlp"
hidden = [32]

[data]
kind = "digits"

[train]
steps = 60
global_batch = 64

[data_parallel]
rule = { kind = "SGD", lr = 0.05 }
compress = { kind = "TopK", ratio = 0.1 }
compress_back = { kind = "TopK", ratio = 0.1 }
feedback = { kind = "ErrorFeedback" }
sync = { kind = "ASGD", servers = 2 }
"""


def test_workers_on_accelerators_push_to_servers_and_go_on_from_a_checkpoint(tmp_path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SERVED)
    first = api.train(spec, out=tmp_path / "run")
    assert first.metrics["heldout_loss"] < 2.0
    again = api.train(
        spec, out=tmp_path / "run", overrides=["train.steps=80"], resume=str(tmp_path / "run")
    )
    assert (again.status, again.steps) == ("done", 80)
