"""Specs of linear models with a penalty: played on both clocks, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lasso import LASSO, N, X, Y, shard_of, theirs
from polyreme import api, runlog
from polyreme.errors import ConfigError

torch.set_num_threads(1)

SPEC = """
[model]
kind = "linear"
l1 = 0.04

[data]
kind = "arrays"
path = "{path}"
heldout = 0

[train]
steps = 400
global_batch = {batch}
eval_every = 200

[cluster]
cpu_processes = 2

[data_parallel]
sync = {{ kind = "ASGD" }}
rule = {{ kind = "ProximalSGD", lr = 0.3 }}

[simulate]
workers = 2
"""
ASYNC = 'sync = { kind = "ASGD" }'


def _spec(folder: Path, *changes: tuple[str, str]) -> Path:
    arrays, path = folder / "rows.npz", folder / "spec.toml"
    np.savez(arrays, x_train=X, y_train=(Y > 0).astype(int))
    text = SPEC.format(path=arrays, batch=N)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def _objective(run: Path) -> float:
    events = runlog.read(run / "log.jsonl")
    evaluated = [event for event in events if isinstance(event, runlog.EvalEvent)]
    return evaluated[-1].metrics["objective"]


CLOCKS = {
    "asynchronous": ASYNC,
    "stale": 'sync = { kind = "SSP", staleness = 1000000 }',
    "blocks": 'sync = { kind = "DelayedBlockProximal", ahead = 1, blocks = 3 }',
    "admm": 'sync = { kind = "AsyncADMM", rho = 0.3 }',
}


@pytest.mark.long
@pytest.mark.parametrize("name", CLOCKS)
def test_both_clocks_come_near_the_optimum(name: str, tmp_path: Path) -> None:
    spec = _spec(tmp_path, (ASYNC, CLOCKS[name]))
    best = shard_of(slice(None), LASSO).certificate(theirs()).objective
    api.simulate(spec, out=tmp_path / "clock")
    api.train(spec, out=tmp_path / "processes", progress=False)
    for run in ("clock", "processes"):
        assert best - 1e-6 < _objective(tmp_path / run) < best + 1e-2


PROX = 'rule = { kind = "ProximalSGD", lr = 0.3 }'
GROUPED = ("l1 = 0.04", "group_l1 = 0.04\ngroup_size = 3")
OF_LAYERS = ('kind = "linear"\nl1 = 0.04', 'kind = "mlp"\nhidden = [2]')
REFUSED = {
    "another rule": (
        [(PROX, 'rule = { kind = "SGD" }')],
        'out. Legal: "ProximalSGD", "TruncatedGradient" (or model.l1 = 0, ',
    ),
    "the default rule": ([(PROX, "")], '"AdamW" leaves the l1 of the model out'),
    "no rule for groups": (
        [GROUPED, (PROX, 'rule = { kind = "TruncatedGradient" }')],
        '"TruncatedGradient" leaves the group_l1 of the model out. Legal: "ProximalSGD" (or ',
    ),
    "a sync that is SGD": (
        [(ASYNC, 'sync = { kind = "OrMo" }'), (PROX, 'rule = { kind = "SGD" }')],
        'data_parallel.sync.kind: "OrMo" is SGD with momentum, which leaves model.l1 out',
    ),
    "another penalty": (
        [(PROX, 'rule = { kind = "ProximalSGD", l1 = 0.1 }')],
        "rule.l1: 0.1 is not model.l1, which the objective has. Legal: leave it out (or 0.04).",
    ),
    "groups in pieces": (
        [GROUPED, (ASYNC, 'sync = { kind = "ASGD", servers = 2 }')],
        "data_parallel.sync.servers: 2 splits vectors, and data_parallel.rule ProximalSGD has",
    ),
    "groups in pieces that servers settle": (
        [GROUPED, (ASYNC, 'sync = { kind = "SSP", servers = 2 }')],
        "data_parallel.sync.servers: 2 splits vectors, and data_parallel.rule ProximalSGD has",
    ),
    "workers that stay silent at a point that is no optimum": (
        [(ASYNC, 'sync = { kind = "LAG" }')],
        "data_parallel.sync.xi: 0.1 measures steps by gradients, which are not 0 where model.l1",
    ),
    "blocks with another step": (
        [
            ("l1 = 0.04", "l2 = 0.04"),
            (ASYNC, 'sync = { kind = "DelayedBlockProximal" }'),
            (PROX, 'rule = { kind = "SGD", momentum = 0.9 }'),
        ],
        'data_parallel.rule.kind: "SGD" has a step of its own, and DelayedBlockProximal takes',
    ),
    "groups of layers' weights": (
        [OF_LAYERS, (PROX, 'rule = { kind = "ProximalSGD", group_l1 = 0.1 }')],
        "data_parallel.rule.group_l1: 0.1 ties features of a linear model, and the model is none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_penalty_that_nobody_would_take_is_refused(name: str, tmp_path: Path) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        api.simulate(_spec(tmp_path, *changes), out=tmp_path / "run")
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        [("l1 = 0.04", "l2 = 0.04"), (PROX, 'rule = { kind = "SGD" }')],
        [(PROX, 'rule = { kind = "ProximalSGD", l1 = 0.04 }')],
        [(ASYNC, 'sync = { kind = "pSCOPE" }'), (PROX, "")],
        [OF_LAYERS, (PROX, 'rule = { kind = "ProximalSGD", l1 = 0.1 }')],
        [GROUPED, (ASYNC, 'sync = { kind = "LocalSteps" }')],
        [(ASYNC, 'sync = { kind = "LAG", xi = 0.0 }')],
    ],
    ids=str,
)
def test_what_takes_the_penalty_or_has_none_is_not_refused(changes, tmp_path: Path) -> None:
    spec = _spec(tmp_path, ("steps = 400", "steps = 2"), ("eval_every = 200", ""), *changes)
    assert api.simulate(spec, out=tmp_path / "run").steps == 2
