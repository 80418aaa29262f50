"""Workers without a gradient are no rows of an aggregate that is no mean."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo.aggregate.kind import AggregatorKind
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import PowerSGD, TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.feedback import EF21, ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import LAG, EveryStep, FedAvg, LocalSteps
from polyreme.algo.topology import AllReduce, ParameterServer, Ring
from workers import play, workers

torch.set_num_threads(1)


class Median(AggregatorKind, frozen=True, kw_only=True, tag="Median", tag_field="kind"):
    """Entry by entry; it counts its rows."""

    def combine(self, rows, state):
        return torch.stack(list(rows)).median(0).values, {"rows": len(rows)}, ()

    def init(self, like):
        return {"rows": 0}


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64)


def _played(n: int, rounds: int = 3, weight=lambda _rank, _batch: 1.0, **more):
    algorithm = DataParallel(**{"rule": SGD(), "aggregate": Median(), **more})
    return play(algorithm, _gradient, _start(), n, rounds, shapes={"w": (4, 3)}, weight=weight)


@pytest.mark.parametrize("sync", [EveryStep(), LocalSteps(every=2), FedAvg(batches=2)], ids=str)
@pytest.mark.parametrize("topology", [AllReduce(), Ring(), ParameterServer()], ids=str)
@pytest.mark.parametrize("compress", [Dense(), TopK(ratio=1.0), PowerSGD(rank=1)], ids=str)
def test_a_worker_without_labels_is_no_row(sync, topology, compress) -> None:
    """The last of six: the median is that of the other five, at their full length."""
    more = {"sync": sync, "topology": topology, "compress": compress}
    six = _played(6, weight=lambda rank, _batch: float(rank < 5), **more)
    five = _played(5, **more)
    torch.testing.assert_close(six.params[:, :5], five.params, rtol=0, atol=1e-12)
    assert (six.params == six.params[:, :1]).all()
    assert six.states[-1][0]["exchange"]["aggregate"] == {"rows": 5}


def test_clients_that_are_not_sampled_are_no_rows() -> None:
    sync = FedAvg(fraction=0.5, batches=1)
    played = _played(6, sync=sync)
    w = _start()
    for number in range(3):
        sampled = sync.sampled([1.0] * 6, number, workers(6, None)[0])  # type: ignore[arg-type]
        batches = [state["batch"] for state in played.states[number]]
        rows = [0.1 * _gradient(rank, batches[rank], w) for rank in sampled]
        w = w - torch.stack(rows).median(0).values
        torch.testing.assert_close(played.params[number + 1, 0], w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "more", [{"sync": LAG(xi=1e9)}, {"sync": FedAvg(fraction=0.5), "feedback": EF21()}], ids=str
)
def test_of_whom_something_is_known_silence_is_a_row_of_no_difference(more) -> None:
    played = _played(6, **more)
    assert played.states[-1][0]["exchange"]["aggregate"] == {"rows": 6}


def test_all_are_rows_where_all_have_a_gradient() -> None:
    played = _played(5, feedback=ErrorFeedback(), compress=TopK(ratio=0.5))
    assert played.states[-1][0]["exchange"]["aggregate"] == {"rows": 5}


@pytest.mark.parametrize("n_entries", [0, 1])
def test_a_short_vector_has_rows_too(n_entries: int) -> None:
    algorithm = DataParallel(rule=SGD(), aggregate=Median())
    start = torch.ones(n_entries)
    played = play(algorithm, _gradient, start, 3, 2, weight=lambda rank, _batch: float(rank < 2))
    assert played.params.shape == (3, 3, n_entries)
    assert torch.isfinite(played.params).all()
