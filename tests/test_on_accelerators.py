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
