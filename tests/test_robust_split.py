"""Robust aggregates between replicas that are split: what whole replicas come to."""

from __future__ import annotations

import pytest

from beside import Family
from drawn import FAMILIES
from polyreme.algo.aggregate import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
)
from polyreme.algo.aggregate.before import NearestNeighbourMixing
from polyreme.algo.attack import NotFinite, SignFlip
from polyreme.algo.compose import DataParallel
from polyreme.algo.feedback import WorkerMomentum
from polyreme.algo.rule import SNGD
from test_split_replicas import _equal, _n, _trained, _WithAlgorithm
from tiny import Case, Model

N = 3
AGGREGATES = {
    "median": CoordinateMedian(byzantine=1),
    "geometric": GeometricMedian(byzantine=1),
    "clipping": CenteredClipping(byzantine=1, tau=0.5, iterations=2),
    "krum": Krum(byzantine=1, neighbours="n-f-1"),
    "mixed": MultiKrum(byzantine=1, neighbours="n-f-1", before=(NearestNeighbourMixing(),)),
}
ATTACKS = {"flipped": (SignFlip(workers=(1,)),), "nan": (NotFinite(workers=(2,)),)}
SPLITS = [
    {"shard": 2, "level": "params"},
    {"pp": 2, "order": "1f1b", "microbatches": 2},
]


def _byzsgdnm(aggregate):
    return DataParallel(
        rule=SNGD(lr=0.05), feedback=WorkerMomentum(momentum=0.9), aggregate=AGGREGATES[aggregate]
    )


def _case(aggregate, attack, split):
    return Case(
        Model(tied=True, gain=True),
        {"replica": N, **split},
        steps=4,
        global_batch=12,
        algorithm=_byzsgdnm(aggregate),
        attack=ATTACKS[attack],
        general=True,
    )


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.slice(4)
def test_split_replicas_under_attack_come_to_what_whole_ones_come_to(
    pool, aggregate, attack, split
):
    whole = {"microbatches": split.get("microbatches", 1)}
    expected, loss = pool(N).run(_trained, _case(aggregate, attack, whole))[0]
    n = _n({"replica": N, **split})
    found, final = pool(n).run(_trained, _case(aggregate, attack, split))[0]
    assert final == pytest.approx(loss, rel=1e-6)
    _equal(found, expected, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("aggregate", ["clipping", "krum"])
def test_tensor_parts_and_stages_of_a_replica_too(pool, aggregate):
    options, sample = FAMILIES["qwen3"]
    found = []
    for split in ({}, {"tp": 2}, {"tp": 2, "pp": 2}):
        plan = {"replica": N, **split}
        case = Family(options=options, sample=sample, plan=plan, global_batch=12, steps=4)
        each = _WithAlgorithm(case, _byzsgdnm(aggregate))
        found.append(pool(_n(plan)).run(_trained, each, timeout_s=240)[0][0])
    _equal(found[1], found[0], 1e-6)
    _equal(found[2], found[0], 1e-6)
