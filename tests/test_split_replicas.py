"""Algorithms between replicas that are split themselves: the same as between whole ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from beside import Family
from drawn import FAMILIES
from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import LARS, SGD, SNGM, AdamW
from polyreme.algo.sync import LocalSteps
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.saver import Saver
from tiny import Case, Model

ALGORITHMS = {
    "plain": DataParallel(rule=SGD(lr=0.1, momentum=0.9)),
    "local": DataParallel(rule=AdamW(lr=0.01), sync=LocalSteps(every=2)),
    "one norm": DataParallel(rule=SNGM(lr=0.1)),
    "norms": DataParallel(rule=LARS(lr=0.5)),
}
SPLITS = [
    {"pp": 2, "order": "1f1b", "microbatches": 2},
    {"pp": 2, "order": "zb-h1", "microbatches": 2},
    {"shard": 2, "level": "none"},
    {"shard": 2, "level": "params"},
    {"pp": 2, "shard": 2, "level": "grads", "microbatches": 2},
]


def _n(plan):
    n = 1
    for axis in ("replica", "shard", "tp", "pp"):
        n *= plan.get(axis, 1)
    return n


def _trained(world, case, run=None, until=None, resume=False):
    job = case.job()
    newest = checkpoints.newest(run) if resume else None
    asked = [checkpoint.read_meta(newest).progress.step if newest else 0]

    def stop():
        asked[0] += 1
        return asked[0] == until

    outcome = loop.train(
        job,
        world,
        stop=stop,
        save=None if run is None else Saver(run, job.graph, world, keep=1),
        load=(lambda state: checkpoint.load(state, newest, graph=job.graph)) if newest else None,
    )
    return {n: t.numpy() for n, t in full_parameters(outcome.state)}, outcome.final_loss


def _equal(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        ours, theirs = torch.from_numpy(found[name]), torch.from_numpy(values)
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), name


def _case(name, split, **more):
    plan = {"replica": 2, **split}
    model = Model(tied=True, gain=True)
    return Case(
        model, plan, steps=4, global_batch=8, algorithm=ALGORITHMS[name], general=True, **more
    )


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slice(4)
def test_split_replicas_come_to_what_whole_ones_come_to(pool, name, split):
    microbatches = split.get("microbatches", 1)
    whole, loss = pool(2).run(_trained, _case(name, {"microbatches": microbatches}))[0]
    found, final = pool(_n({"replica": 2, **split})).run(_trained, _case(name, split))[0]
    assert final == pytest.approx(loss, rel=1e-12)
    _equal(found, whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["local", "one norm"])
def test_tensor_parts_of_a_replica_too(pool, name):
    options, sample = FAMILIES["qwen3"]

    def case(**split):
        return Family(
            options=options, sample=sample, plan={"replica": 2, **split}, global_batch=8, steps=4
        )

    found = []
    for split in ({}, {"tp": 2}, {"tp": 2, "pp": 2}):
        each = _WithAlgorithm(case(**split), ALGORITHMS[name])
        found.append(pool(_n({"replica": 2, **split})).run(_trained, each, timeout_s=120)[0][0])
    _equal(found[1], found[0], 1e-6)  # the library's norms round to float32
    _equal(found[2], found[0], 1e-6)


@dataclasses.dataclass(frozen=True)
class _WithAlgorithm:
    case: Family
    algorithm: DataParallel

    def job(self):
        return dataclasses.replace(self.case.job(), algorithm=self.algorithm, general=True)


@pytest.mark.parametrize("split", SPLITS[1:4:2], ids=str)
def test_a_split_replica_goes_on_as_if_it_had_never_stopped(pool, tmp_path, split):
    case = _case("local", split)
    n = _n(case.plan)
    unbroken, _ = pool(n).run(_trained, case)[0]
    pool(n).run(_trained, case, tmp_path, 2)
    found, _ = pool(n).run(_trained, case, tmp_path, None, True)[0]
    _equal(found, unbroken, 0.0)
