"""What a robust aggregate changes of a step: who is absent, who is a suspect, what is scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch

from polyreme.algo.aggregate import CoordinateMedian, Krum, MajorityVote, MoNNA
from polyreme.algo.aggregate.kind import AggregatorKind, Combined, State
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import PowerSGD, Sign, TopK
from polyreme.algo.effects import Computed, Record, Split, SumShards
from polyreme.algo.feedback import EF21, WorkerMomentum
from polyreme.algo.rule import SGD
from polyreme.algo.sync import LAG, EveryStep, FedAvg, LocalSteps
from polyreme.algo.topology import Gossip, ParameterServer, Ring
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.errors import RunError
from polyreme.sim.driver import Simulation

N, D = 5, 3


class Middle(AggregatorKind, frozen=True, kw_only=True, tag="Middle", tag_field="kind"):
    """The row in the middle by its sum over all shards; the farthest is a suspect."""

    robust: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True

    @property
    def bears(self) -> int:
        return 2

    def combine(
        self,
        rows: Sequence[torch.Tensor],
        state: State,
        weights: Sequence[float] | None = None,
        absent: int = 0,
    ) -> Split[Combined]:
        assert absent <= self.bears
        sums = yield SumShards(partial=torch.stack([row.sum() for row in rows]))
        order = sums.argsort().tolist()
        return rows[order[len(rows) // 2]].clone(), state, (order[-1],)


def _rate(step: int) -> float:
    return 1.0 + 0 * step


def _played(
    algorithm: DataParallel,
    gradients: dict[int, float],
    steps: int = 1,
    n: int = N,
    weights: Mapping[int, float] | None = None,
) -> tuple[list[torch.Tensor], list[Record]]:
    """Parameters of all workers, and what the first recorded; each gradient is one number."""
    layout = Layout.of({"w": (D,)})
    workers = [Worker(rank=rank, n=n, layout=layout, seed=0, lr=_rate) for rank in range(n)]
    states = [algorithm.sync.init(algorithm, torch.zeros(D), me) for me in workers]
    records: list[Record] = []

    def gradient(rank: int, params: torch.Tensor, batch: int) -> Computed:
        del params, batch
        return Computed(
            gradient=torch.full((D,), gradients[rank]),
            loss=1.0,
            weight=float(rank + 1) if weights is None else weights[rank],
            n_samples=1,
        )

    def first(me: Worker, record: Record, now_s: float) -> None:
        del now_s
        if me.rank == 0:
            records.append(record)

    simulation = Simulation(algorithm, workers, states, gradient, on_record=first)
    simulation.play(steps)
    return [state["params"] for state in simulation.states], records


GRADIENTS = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 50.0}


@pytest.mark.parametrize("topology", [Ring(), ParameterServer()])
def test_rows_are_given_unscaled_and_the_suspect_is_recorded(topology: object) -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=Middle(), topology=topology)  # type: ignore[arg-type]
    params, (record,) = _played(algorithm, GRADIENTS)
    assert all(each.tolist() == [-3.0] * D for each in params)
    assert record.suspects == (4,)


def test_workers_that_are_not_finite_are_absent_and_keep_their_momentum() -> None:
    algorithm = DataParallel(
        rule=SGD(lr=1.0), aggregate=Middle(), feedback=WorkerMomentum(momentum=0.5)
    )
    bad = {**GRADIENTS, 3: float("nan"), 4: float("inf")}
    params, (record,) = _played(algorithm, bad)
    assert not record.seen.skipped
    assert all(each.tolist() == [-2.0] * D for each in params)
    assert record.suspects == (2, 3, 4)  # the farthest of those there, and those that are not
    assert record.seen.loss == 1.0


def test_a_step_is_skipped_when_more_are_not_finite_than_the_aggregate_bears() -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=Middle())
    bad = dict.fromkeys((2, 3, 4), float("nan"))
    params, (record,) = _played(algorithm, {**GRADIENTS, **bad})
    assert record.seen.skipped
    assert record.seen.bad == (2, 3, 4)
    assert all(each.tolist() == [0.0] * D for each in params)


def test_votes_go_on_without_workers_that_are_not_finite_and_name_them() -> None:
    aggregate = MajorityVote(byzantine=2)
    algorithm = DataParallel(rule=SGD(), compress=Sign(), aggregate=aggregate)
    gradients = {0: -3.0, 1: float("nan"), 2: 0.5, 3: 2.0, 4: float("inf")}
    params, (record,) = _played(algorithm, gradients)
    assert all(torch.equal(each, torch.full((D,), -1.0)) for each in params)
    assert record.suspects == (1, 4)
    assert not record.seen.skipped
    assert not aggregate.refused(5)
    (violation,) = aggregate.refused(4)
    assert "n >= 2 f + 1" in violation.rule


def test_a_trusted_worker_is_the_same_whoever_is_absent() -> None:
    bad = {**GRADIENTS, 1: float("nan")}
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=MoNNA(byzantine=2, trusted=3))
    params, (record,) = _played(algorithm, bad)
    assert all(each.tolist() == pytest.approx([-8 / 3] * D) for each in params)  # of 1, 3 and 4
    assert record.suspects == (1, 4)
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=MoNNA(byzantine=2, trusted=1))
    with pytest.raises(RunError, match="row 1, which MoNNA trusts, is missing or not finite"):
        _played(algorithm, bad)


def test_local_steps_go_on_without_ways_that_are_not_finite() -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=Middle(), sync=LocalSteps(every=2))
    params, records = _played(algorithm, {**GRADIENTS, 4: float("inf")}, steps=2)
    assert all(each.tolist() == [-6.0] * D for each in params)
    assert not any(record.seen.skipped for record in records)


@pytest.mark.parametrize(
    ("part", "member"),
    [("topology", Gossip()), ("feedback", EF21()), ("compress", PowerSGD(rank=2))],
)
def test_members_that_need_sums_are_refused_by_name(part: str, member: object) -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=Middle(), **{part: member})  # type: ignore[arg-type]
    assert [each.path for each in algorithm.check()] == [f"data_parallel.{part}.kind"]
    assert "Middle" in algorithm.check()[0].rule
    assert not DataParallel(rule=SGD(lr=1.0), **{part: member}).check()  # type: ignore[arg-type]


def test_compression_that_is_decoded_at_once_goes_with_any_aggregate() -> None:
    algorithm = DataParallel(
        rule=SGD(lr=1.0), aggregate=Middle(), compress=TopK(ratio=1.0), sync=EveryStep()
    )
    assert not algorithm.check()
    params, _ = _played(algorithm, GRADIENTS)
    assert all(each.tolist() == [-3.0] * D for each in params)


def test_clients_that_were_not_sampled_are_not_taken_for_hostile() -> None:
    algorithm = DataParallel(
        rule=SGD(lr=1.0),
        aggregate=CoordinateMedian(byzantine=1),
        sync=FedAvg(fraction=0.6, alike=True),
    )
    params, records = _played(algorithm, GRADIENTS, steps=4)
    assert all(torch.equal(each, params[0]) for each in params)
    assert not any(record.seen.skipped for record in records)
    assert params[0].isfinite().all()
    assert (params[0] < 0).all()


def test_workers_without_labels_are_no_rows_and_not_hostile() -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), aggregate=Krum(byzantine=1))
    weights = {rank: float(rank > 0) for rank in range(N + 2)}
    params, (record,) = _played(algorithm, {**GRADIENTS, 5: 3.0, 6: 3.0}, n=N + 2, weights=weights)
    assert all(each.tolist() == [-3.0] * D for each in params)
    assert 0 not in record.suspects


def test_differences_that_add_up_are_refused_by_name() -> None:
    (found,) = DataParallel(rule=SGD(lr=1.0), aggregate=Middle(), sync=LAG()).check()
    assert found.path == "data_parallel.sync.kind"
