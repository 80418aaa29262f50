"""`pr.apply`: a plan in a loop of one's own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import polyreme as pr
from polyreme.errors import ConfigError
from polyreme.plan import store
from tiny import plan as tiny_plan

DOCS = Path(__file__).parent.parent / "docs" / "runtime.md"
SAMPLE = pr.SampleSpec(
    fields={"features": pr.TensorSpec((6,), "float32"), "labels": pr.TensorSpec((), "int64")},
    n_classes=3,
)
RULE = {"kind": "SGD", "lr": 0.3, "momentum": 0.9}


def _module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def _batches(sizes=(6, 6, 5, 1)) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [
        {
            "features": torch.randn(n, 6, generator=rng),
            "labels": torch.randint(3, (n,), generator=rng),
        }
        for n in sizes
    ]


def _by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same module in a plain loop, in float64."""
    module = _module().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for batch in _batches():
        optimizer.zero_grad()
        scores = module(batch["features"].double())
        loss = nn.functional.cross_entropy(scores, batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def _applied(world, layout):
    graph = pr.graph(_module(), SAMPLE)
    with pr.apply(tiny_plan(graph, **layout), graph, rule=RULE, clip_norm=0.5) as trainer:
        results = [trainer.step(batch) for batch in _batches()]
        return [result.loss for result in results], trainer.state_dict()


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"microbatches": 2},
        {"replica": 2},
        {"shard": 2, "level": "params", "microbatches": 2},
        {"shard": 3, "level": "grads"},
        {"pp": 2, "microbatches": 3},
        {"pp": 2, "replica": 2, "microbatches": 2, "order": "zb-h1"},
    ],
)
def test_any_plan_does_what_a_plain_loop_does(pool, layout):
    n = layout.get("replica", 1) * layout.get("shard", 1) * layout.get("pp", 1)
    found = pool(n).run(_applied, layout)
    losses, weights = _by_hand()
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-6)  # features are float32
    whole = found[0][1]
    assert set(whole) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-8)
    assert all(not others for _, others in found[1:])


def _skips(world):
    graph = pr.graph(_module(), SAMPLE)
    trainer = pr.apply(tiny_plan(graph, replica=2), graph, rule=RULE)
    before = trainer.state_dict()
    (batch,) = _batches((6,))
    batch["features"][5] = torch.nan
    result = trainer.step(batch)
    after = trainer.state_dict()
    return (
        result.loss,
        result.reason,
        result.bad_ranks,
        [bool((before[name] == after[name]).all()) for name in before],
    )


def test_a_batch_that_is_not_finite_changes_nothing(pool):
    for loss, reason, bad, same in pool(2).run(_skips):
        assert loss is None
        assert reason == "loss is not finite"
        assert bad == (1,)
        assert all(same)


def _refused(call) -> str:
    with pytest.raises(ConfigError) as raised:
        call()
    return str(raised.value)


def test_what_cannot_be_applied_is_refused(tmp_path):
    graph = pr.graph(_module(), SAMPLE)
    plan = tiny_plan(graph)
    two = tiny_plan(graph, replica=2)
    assert "is for 2 devices, not for 1 process" in _refused(
        lambda: pr.apply(two, graph, rule=RULE)
    )
    assert "is no rule" in _refused(lambda: pr.apply(plan, graph))
    assert "rule.kind" in _refused(lambda: pr.apply(plan, graph, rule={"kind": "Sgd", "lr": 1}))
    assert "rule.lr" in _refused(lambda: pr.apply(plan, graph, rule={"kind": "SGD", "lr": -1.0}))
    store.save(plan, tmp_path / "plan.json")
    trainer = pr.apply(tmp_path / "plan.json", graph, rule=RULE)
    (batch,) = _batches((4,))
    assert "batch.labels: is missing" in _refused(
        lambda: trainer.step({"features": batch["features"]})
    )
    assert "has 3 samples, and there are 4 labels" in _refused(
        lambda: trainer.step({**batch, "features": batch["features"][:3]})
    )
    assert "batch.features: [3]" in _refused(
        lambda: trainer.step({**batch, "features": batch["features"][:, :3]})
    )
    empty = {name: field[:0] for name, field in batch.items()}
    assert "has no samples" in _refused(lambda: trainer.step(empty))
    assert trainer.step(batch).loss is not None


_THREADS = """
import os
of = "/proc/self/task"
print("left: " + " ".join(open(f"{of}/{each}/comm").read().strip() for each in os.listdir(of)))
"""


def test_the_documents_example_trains_under_torchrun(tmp_path):
    text = DOCS.read_text()
    section = text[text.index("## In a loop of one's own") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "own.py").write_text(code[1] + _THREADS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), "own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) > 1
    assert losses[-1] < losses[0] / 2
    # One of a group that lives when the process ends can abort it.
    assert done.stdout.count("left:") == 2
    assert "gloo" not in done.stdout
