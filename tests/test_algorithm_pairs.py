"""Every two members of an algorithm go together, and come to the same on both clocks.

Rows are whole algorithms, made so that every pair of members that is not refused is in one of
them; pairs that are refused must be those of the list below.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from both_clocks import in_processes, job_of, on_the_clock
from polyreme.algo import aggregate, compress, feedback, rule, sync, topology
from polyreme.algo.aggregate import before
from polyreme.algo.compose import DataParallel
from polyreme.algo.members import members
from polyreme.algo.sync.kind import SyncKind
from polyreme.algo.topology import graph, method

N = 4
SLICE = 4
AXES: dict[str, list[Any]] = {
    "rule": [
        rule.SGD(lr=0.1),
        rule.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        rule.SGD(lr=0.1, momentum=0.5, weight_decay=0.01, decoupled=True),
        rule.Adam(lr=0.01),
        rule.AdamW(lr=0.01),
        rule.LARS(lr=0.1),
        rule.LAMB(lr=0.01),
        rule.SNGD(lr=0.05, weight_decay=0.01),
        rule.SNGM(lr=0.05),
        rule.SignSGD(lr=0.01),
        rule.Signum(lr=0.01),
        rule.Lion(lr=0.01),
        rule.ProximalSGD(lr=0.1, l1=0.01, group_l1=0.01, group_size=3),
        rule.TruncatedGradient(lr=0.1, gravity=0.01, period=2),
    ],
    "sync": [
        sync.EveryStep(),
        sync.LocalSteps(every=2),
        sync.LocalSteps(every=2, after=1, keep_momentum=False),
        sync.AdaptivePeriod(every=3),
        sync.DiLoCo(every=2),
        sync.FedAvg(fraction=0.75, batches=2),
        sync.GrowingBatch(growth=1.5, at_most=3),
        sync.LAG(),
        sync.ThreePoint(),
        sync.CSER(every=2, reset=compress.TopK(ratio=0.5)),
    ],
    "topology": [
        topology.AllReduce(),
        topology.Ring(),
        topology.RecursiveDoubling(),
        topology.BinaryTree(),
        topology.DoubleBinaryTree(),
        topology.Hierarchical(),
        topology.Torus2D(),
        topology.Auto(),
        topology.ParameterServer(servers=2),
        topology.ParameterServer(back=compress.QSGD()),
        topology.Gossip(),
        topology.Gossip(graph=graph.Exponential(), method=method.SGP()),
        topology.Gossip(graph=graph.TorusGraph(), method=method.DCD()),
        topology.Gossip(graph=graph.Complete(), method=method.ECD()),
        topology.Gossip(graph=graph.RandomMatching(), method=method.CHOCO(gamma=0.3)),
        topology.Gossip(method=method.CHOCO(gamma=0.3, order="ICML")),
    ],
    "compress": [
        compress.Dense(),
        compress.Cast(to="bf16"),
        compress.QSGD(levels=4),
        compress.QSGD(levels=1, coding="elias"),
        compress.TernGrad(),
        compress.Natural(),
        compress.Sign(scale="mean"),
        compress.OneBit(),
        compress.TopK(ratio=0.2, per="model"),
        compress.TopK(ratio=0.2, select="sampled"),
        compress.RandomK(ratio=0.3),
        compress.Threshold(threshold=0.01),
        compress.AdaComp(bin_size=8),
        compress.VarianceBased(),
        compress.SBC(ratio=0.2),
        compress.STC(ratio=0.2),
        compress.Rotated(),
        compress.CountSketch(ratio=1.0, keep=0.2),
        compress.GTopK(ratio=0.2),
        compress.PowerSGD(rank=1),
        compress.LowRank(rank=1),
        compress.ATOMO(rank=1),
    ],
    "feedback": [
        feedback.NoFeedback(),
        feedback.ErrorFeedback(),
        feedback.ErrorFeedback(rate="outside"),
        feedback.ECQ(),
        feedback.EF21(),
        feedback.DIANA(),
        feedback.DEF(),
        feedback.GMC(),
        feedback.DGC(masking=False),
        feedback.DGC(masking=True),
        feedback.WorkerMomentum(),
        feedback.OneBitAdam(warmup=2),
    ],
    "aggregate": [
        aggregate.Mean(),
        aggregate.MajorityVote(),
        aggregate.Krum(neighbours="n-f-1"),
        aggregate.MultiKrum(neighbours="n-f-1", before=(before.Clipping(),)),
        aggregate.CoordinateMedian(),
        aggregate.TrimmedMean(before=(before.NearestNeighbourMixing(),)),
        aggregate.GeometricMedian(before=(before.ARC(),)),
        aggregate.CenteredClipping(),
        aggregate.MinimumDiameterAveraging(),
        aggregate.MoNNA(),
        aggregate.MeanAroundMedian(byzantine=0, before=(before.Bucketing(),)),
        aggregate.Bulyan(byzantine=0),
    ],
}
Row = dict[str, Any]
Pair = frozenset[tuple[str, int]]


def _pairs(row: dict[str, int]) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(row.items(), 2)}


def _algorithm(row: dict[str, int]) -> DataParallel:
    return DataParallel(**{axis: AXES[axis][index] for axis, index in row.items()})


def _refused(row: dict[str, int]) -> list[Any]:
    algorithm = _algorithm(row)
    return [*algorithm.check(), *algorithm.refused(N)]


def _rows() -> list[dict[str, int]]:
    """Greedily: each takes the pair that is left first, and as many others as are found."""
    draw = random.Random(0)
    left: dict[Pair, None] = {}
    for one, other in itertools.combinations(AXES, 2):
        for i, j in itertools.product(range(len(AXES[one])), range(len(AXES[other]))):
            if not _refused({one: i, other: j} | _quiet(one, other)):
                left[frozenset({(one, i), (other, j)})] = None
    rows = []
    while left:
        first = next(iter(left))
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(12):
            row = {axis: draw.randrange(len(each)) for axis, each in AXES.items()} | dict(first)
            if not _refused(row):
                best = max(
                    best, (sum(pair in left for pair in _pairs(row)), row), key=lambda b: b[0]
                )
        row = best[1] or dict(first) | _quiet(*dict(first))
        for pair in _pairs(row):
            left.pop(pair, None)
        left.pop(first, None)
        rows.append({axis: row[axis] for axis in AXES})
    return rows


def _quiet(*axes: str) -> dict[str, int]:
    """Members of the other axes that forbid nothing."""
    top_k = AXES["compress"].index(compress.TopK(ratio=0.2, per="model"))  # masking wants names
    quiet = dict.fromkeys(AXES, 0) | {"compress": top_k}
    return {axis: index for axis, index in quiet.items() if axis not in axes}


def _same_on_both_clocks(pool: Any, row: dict[str, int]) -> None:
    algorithm = _algorithm(row)
    case = job_of(algorithm, N, steps=5, global_batch=8)
    virtual, sent = pool(1).run(on_the_clock, case, N)[0]
    real = pool(N).run(in_processes, case)
    for key, tensor in real[0][0].items():
        assert torch.equal(tensor, virtual[key]), f"{key} of {algorithm}"
        assert torch.isfinite(tensor.double()).all(), f"{key} of {algorithm}"
    assert [wire for _, _, wire in real] == sent, f"{algorithm}"


def _name(row: dict[str, int]) -> str:
    return "-".join(f"{type(AXES[axis][i]).__name__}{i}" for axis, i in row.items())


ROWS = _rows()


@pytest.mark.parametrize("row", random.Random(1).sample(ROWS, SLICE), ids=_name)
def test_a_slice_of_all_pairs_is_the_same_on_both_clocks(pool: Any, row: Row) -> None:
    _same_on_both_clocks(pool, row)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_every_pair_is_the_same_on_both_clocks(pool: Any, row: Row) -> None:
    _same_on_both_clocks(pool, row)


def _stateful() -> list[DataParallel]:
    """Each member that keeps something, beside others that do not."""
    sparse = {"compress": compress.TopK(ratio=0.3), "rule": rule.SGD(lr=0.1)}
    found = []
    for axis, each in AXES.items():
        for member in each:
            needs = sparse if axis == "feedback" else {}
            found.append(DataParallel(**{**needs, axis: member}))
    return found


def _resumes(pool: Any, tmp_path: Any, algorithm: DataParallel) -> None:
    n = N if algorithm.aggregate.robust else 2
    case = job_of(algorithm, n, steps=6, global_batch=8)
    unbroken, steps, _ = pool(n).run(in_processes, case, tmp_path / "a")[0]
    _, stopped, _ = pool(n).run(in_processes, case, tmp_path / "b", 1)[0]
    assert stopped < steps
    resumed, _, _ = pool(n).run(in_processes, case, tmp_path / "b", 0, True)[0]
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


@pytest.mark.parametrize("algorithm", random.Random(2).sample(_stateful(), 5), ids=str)
def test_a_slice_of_members_resumes_with_the_same_bits(
    pool: Any, tmp_path: Any, algorithm: DataParallel
) -> None:
    _resumes(pool, tmp_path, algorithm)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", _stateful(), ids=str)
def test_every_member_resumes_with_the_same_bits(
    pool: Any, tmp_path: Any, algorithm: DataParallel
) -> None:
    _resumes(pool, tmp_path, algorithm)


def test_every_member_of_every_part_is_among_the_pairs() -> None:
    there = {type(member) for each in AXES.values() for member in each}
    there |= {
        type(getattr(t, part))
        for t in AXES["topology"]
        for part in ("graph", "method")
        if hasattr(t, part)
    }
    there |= {type(each) for a in AXES["aggregate"] for each in getattr(a, "before", ())}
    listed = {member.cls for member in members() if member.part.split(".")[0] in AXES}
    served = {each for each in listed if issubclass(each, SyncKind) and each().n_servers(N)}
    listed -= served  # see test_served_contract
    listed -= {each for each in listed if getattr(each, "finite_sum", False)}  # test_finite_sums
    assert listed - there - {graph.Matrix} == set()


def _sums(other: str, a: Any, b: Any) -> bool:
    """Whether one takes what all sent for a sum, or in shares, which no robust aggregate is."""
    if other != "aggregate" or not b.robust:
        return False
    apart = getattr(a, "servers", 1) > 1 and not b.by_entry
    sums = any(getattr(a, name, False) for name in ("remembers", "in_rounds", "adds_up"))
    return apart or sums or not getattr(a, "exact", True)


def test_no_pair_is_refused_but_those_that_contradict_each_other() -> None:
    refused = set()
    for one, other in itertools.combinations(AXES, 2):
        for i, j in itertools.product(range(len(AXES[one])), range(len(AXES[other]))):
            if _refused({one: i, other: j} | _quiet(one, other)):
                refused.add((one, other, AXES[one][i], AXES[other][j]))
    for one, other, a, b in refused:
        momentum = (one, other) == ("rule", "feedback") and b.owns_momentum and a.keeps_momentum
        masking = (one, other) == ("compress", "feedback") and isinstance(b, feedback.DGC)
        assert momentum or (masking and b.masking and not a.sparse) or _sums(other, a, b), (
            f"{a} and {b}"
        )
