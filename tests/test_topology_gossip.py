"""Gossip methods: their statements, what their papers prove, and the bytes they send."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, Dense, GTopK, LowRank, PowerSGD, TopK
from polyreme.algo.effects import Send
from polyreme.algo.feedback import DGC, GMC, ErrorFeedback
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.rule import SGD
from polyreme.algo.topology import Gossip, ParameterServer
from polyreme.algo.topology.graph import (
    Complete,
    Exponential,
    Graph,
    Matrix,
    RandomMatching,
    RingGraph,
    TorusGraph,
)
from polyreme.algo.topology.method import CHOCO, DCD, DPSGD, ECD, SGP, Method
from polyreme.algo.vector import Layout
from workers import Played, World, play, workers

torch.set_num_threads(1)

GRAPHS = [
    RingGraph(),
    TorusGraph(),
    Complete(),
    Exponential(peers="one"),
    Exponential(peers="all"),
    RandomMatching(),
]
METHODS = [
    DPSGD(),
    DPSGD(order="step beside"),
    SGP(),
    DCD(),
    ECD(),
    CHOCO(),
    CHOCO(order="ICML", gamma=1.0),
]
COUNTS = [1, 2, 3, 5, 8]
SHAPES = {"a": (3, 2), "b": (), "c": (4,)}
SIZE = 11


def _targets(n: int) -> torch.Tensor:
    return torch.randn(n, SIZE, generator=torch.Generator().manual_seed(n)).double()


def _played(
    method: Method,
    graph: Graph,
    n: int,
    rounds: int,
    *,
    compress: Any = None,
    lr: Any = 0.1,
    **more: Any,
) -> Played:
    """On |x - target|^2 / 2 of each worker, in float64."""
    targets = _targets(n)
    algorithm = DataParallel(
        rule=SGD(lr=0.1, momentum=more.pop("momentum", 0.0)),
        topology=Gossip(graph=graph, method=method),
        compress=compress or Dense(),
        feedback=more.pop("feedback", DataParallel().feedback),
    )
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    return play(
        algorithm,
        lambda rank, _batch, x: x - targets[rank],
        start,
        n,
        rounds,
        lr=lr,
        shapes=SHAPES,
        **more,
    )


def _by_hand(graph: Graph, n: int, rounds: int, lr: float, order: str) -> torch.Tensor:
    """D-PSGD as matrices: the last models."""
    targets = _targets(n)
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64).expand(n, -1)
    for step in range(rounds):
        weights, way = graph.weights(n, step), -lr * (x - targets)
        x = weights @ (x + way) if order == "step first" else weights @ x + way
    return x


@pytest.mark.slice(6)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("order", ["step first", "step beside"])
def test_d_psgd_is_its_matrices(graph: Graph, n: int, order: Any) -> None:
    got = _played(DPSGD(order=order), graph, n, 9).params[-1]
    torch.testing.assert_close(got, _by_hand(graph, n, 9, 0.1, order), rtol=0, atol=1e-12)


@pytest.mark.slice(8)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_without_loss_methods_are_d_psgd(graph: Graph, n: int) -> None:
    """CHOCO (ICML, gamma 1) and SGP mix after the step, DCD and ECD beside it, as they say."""
    first = _by_hand(graph, n, 9, 0.1, "step first")
    for method in (CHOCO(order="ICML", gamma=1.0), SGP()):
        got = _played(method, graph, n, 9).params[-1]
        torch.testing.assert_close(got, first, rtol=0, atol=1e-11)
    beside = _by_hand(graph, n, 9, 0.1, "step beside")
    for method in (DCD(), ECD()):
        got = _played(method, graph, n, 9).params[-1]
        torch.testing.assert_close(got, beside, rtol=0, atol=1e-11)
    if n > 2:
        assert (first - beside).abs().max() > 1e-3


def test_choco_s_orders_are_their_formulas() -> None:
    """With top-k, from the statements: ICLR gossips with old copies, ICML with new ones."""
    n, gamma, lr, k = 4, 0.3, 0.1, 4
    targets, weights = _targets(n), RingGraph().weights(n, 0)
    compress = TopK(ratio=k / SIZE, per="model")
    for order in ("ICLR", "ICML"):
        x = torch.linspace(-1, 1, SIZE, dtype=torch.float64).expand(n, -1)
        copies = torch.zeros(n, SIZE, dtype=torch.float64)
        for _ in range(7):
            x = x - lr * (x - targets)
            if order == "ICLR":
                x = x + gamma * (weights @ copies - copies)
            lacks = x - copies
            kept = lacks.abs().topk(k, dim=1).indices
            copies = copies + torch.zeros_like(x).scatter(1, kept, lacks.gather(1, kept))
            if order == "ICML":
                x = x + gamma * (weights @ copies - copies)
        got = _played(CHOCO(gamma=gamma, order=order), RingGraph(), n, 7, compress=compress)
        torch.testing.assert_close(got.params[-1], x, rtol=0, atol=1e-12)


@pytest.mark.slice(4)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_gossip_leaves_the_mean_of_models_unmoved(graph: Graph, n: int) -> None:
    """Also under lossy compression, where CHOCO promises it; the mean step alone moves it."""
    for method, compress in [
        (DPSGD(), Dense()),
        (CHOCO(gamma=0.2), TopK(ratio=0.2)),
        (CHOCO(gamma=0.2, order="ICML"), QSGD(levels=2)),
    ]:
        means = _played(method, graph, n, 12, compress=compress).params.mean(1)
        mean = means[0]
        for got in means:
            torch.testing.assert_close(got, mean, rtol=0, atol=1e-12)
            mean = mean - 0.1 * (mean - _targets(n).mean(0))


@pytest.mark.slice(1)
@pytest.mark.parametrize("n", [5])
@pytest.mark.parametrize("graph", [RingGraph(), Exponential(), RandomMatching()], ids=str)
@pytest.mark.parametrize("order", ["ICLR", "ICML"])
def test_choco_reaches_consensus_through_a_third_of_the_entries(
    graph: Graph, n: int, order: Any
) -> None:
    """Koloskova et al. 2019, theorem 2: once steps stop, all end at the mean, here the optimum."""
    played = _played(
        CHOCO(gamma=0.2, order=order),
        graph,
        n,
        300,
        compress=TopK(ratio=0.3, per="model"),
        lr=lambda step: 0.1 * (step < 100),
    )
    end = _targets(n).mean(0).expand(n, -1)
    torch.testing.assert_close(played.params[-1], end, rtol=0, atol=2e-4)


@pytest.mark.parametrize("method", [DCD(), ECD()], ids=str)
def test_dcd_and_ecd_stay_near_d_psgd_through_fine_quantisation(method: Method) -> None:
    played = _played(method, RingGraph(), 5, 60, compress=QSGD(levels=255))
    exact = _by_hand(RingGraph(), 5, 60, 0.1, "step beside")
    torch.testing.assert_close(played.params[-1], exact, rtol=0, atol=0.01)
    assert not torch.equal(played.params[-1], exact)


def test_copies_are_alike_on_all_neighbours() -> None:
    """Each worker's own copy is what others mix: kept as a sum where weights stay."""
    n, compress = 5, QSGD(levels=3)
    for method in (CHOCO(gamma=0.3), DCD(), ECD()):
        for graph in (RingGraph(), Exponential(peers="one")):
            states = _played(method, graph, n, 6, compress=compress).states[-1]
            mixes = [s["exchange"]["topology"] for s in states]
            own = torch.stack([mix["own"] for mix in mixes])
            for rank, mix in enumerate(mixes):
                if "sum" in mix:
                    row = graph.weights(n, 0)[rank].clone()
                    row[rank] = 0
                    torch.testing.assert_close(mix["sum"], row @ own, rtol=0, atol=1e-12)
                else:
                    ever = graph.ever(n)[rank].nonzero().flatten().tolist()
                    assert sorted(mix["others"]) == sorted(str(j) for j in ever if j != rank)
                    for key, copy in mix["others"].items():
                        torch.testing.assert_close(copy, own[int(key)], rtol=0, atol=1e-12)


DIRECTED = [[0.5, 0.0, 0.4], [0.5, 0.7, 0.0], [0.0, 0.3, 0.6]]


def test_push_sum_s_weights_sum_to_n_and_models_reach_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(DIRECTED))
    n, graph = 3, Matrix(path=str(path))
    played = _played(SGP(), graph, n, 200, lr=lambda step: 0.5 / (1 + step / 5))
    weights = [[s["exchange"]["topology"]["weight"] for s in each] for each in played.states]
    assert all(sum(each) == pytest.approx(n, abs=1e-12) for each in weights)
    assert max(weights[-1]) > 1.1
    end = _targets(n).mean(0).expand(n, -1)
    torch.testing.assert_close(played.params[-1], end, rtol=0, atol=0.05)


def test_push_sum_is_its_statement(tmp_path: Path) -> None:
    """Assran et al. 2019, algorithm 1: gradients at z = x / w, x and w pushed."""
    path = tmp_path / "w.json"
    path.write_text(json.dumps(DIRECTED))
    n, lr, push = 3, 0.1, torch.tensor(DIRECTED, dtype=torch.float64)
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64).expand(n, -1)
    w = torch.ones(n, 1, dtype=torch.float64)
    for _ in range(9):
        x = x - lr * (x / w - _targets(n))
        x, w = push @ x, push @ w
    got = _played(SGP(), Matrix(path=str(path)), n, 9).params[-1]
    torch.testing.assert_close(got, x / w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_one_worker_is_alone(method: Method) -> None:
    """It sends nothing and takes plain steps, whatever the method."""
    played = _played(method, RingGraph(), 1, 5)
    assert played.nbytes == [0]
    expected = _by_hand(Complete(), 1, 5, 0.1, "step first")
    torch.testing.assert_close(played.params[-1], expected, rtol=0, atol=1e-11)


@pytest.mark.slice(8)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("method", [DPSGD(), SGP(), CHOCO()], ids=str)
def test_each_neighbour_is_sent_one_message(method: Method, graph: Graph, n: int) -> None:
    topology = Gossip(graph=graph, method=method)
    algorithm = DataParallel(topology=topology, compress=QSGD(levels=7))
    team = workers(n, Layout.of(SHAPES))
    x, links = torch.ones(SIZE), Counter()

    class Counted(World):
        def _alone(self, rank: int, effect: Any) -> Any:
            if isinstance(effect, Send):
                links[effect.to, rank] += effect.message.nbytes
            return super()._alone(rank, effect)

    turn = Turn(step=0, lr=0.1)
    Counted(n=n).run(
        [topology.mix(x, topology.init(algorithm, x, me), me, turn, algorithm) for me in team]
    )
    packets = sum(math.ceil(size * 4 / 8) + 4 for size in (6, 1, 4))
    each = packets + 8 * isinstance(method, SGP)
    takes = graph.ever(n) if method.keeps_copies else graph.weights(n, 0) != 0
    pairs = [tuple(pair) for pair in takes.nonzero().tolist() if pair[0] != pair[1]]
    assert links == dict.fromkeys(pairs, each)
    cost = topology.cost(n, each)
    assert cost.link_bytes == max(links.values(), default=0)
    assert cost.n_messages == max(Counter(source for _, source in pairs).values(), default=0)


@pytest.mark.parametrize("feedback", [ErrorFeedback(), GMC(momentum=0.5), DGC(momentum=0.5)])
def test_momentum_of_a_feedback_is_each_worker_s_own(feedback: Any) -> None:
    """Gradients stay with their worker, so it is the momentum of a rule."""
    got = _played(CHOCO(), RingGraph(), 4, 8, feedback=feedback).params
    momentum = 0.0 if isinstance(feedback, ErrorFeedback) else 0.5
    expected = _played(CHOCO(), RingGraph(), 4, 8, momentum=momentum).params
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("graph", [RingGraph(), RandomMatching()], ids=str)
def test_nothing_but_the_state_outlives_a_round(method: Method, graph: Graph) -> None:
    whole = _played(method, graph, 4, 6, compress=QSGD(levels=3))
    half = _played(method, graph, 4, 3, compress=QSGD(levels=3))
    rest = _played(method, graph, 4, 3, compress=QSGD(levels=3), states=half.states[-1])
    assert torch.equal(rest.params[-1], whole.params[-1])


def test_a_worker_s_nan_skips_the_step_for_all() -> None:
    def gradient(rank: int, batch: int, x: torch.Tensor) -> torch.Tensor:
        return x * (math.nan if rank == 2 and batch == 1 else 1.0)

    played = play(DataParallel(topology=Gossip()), gradient, torch.ones(3), 4, 3)
    assert torch.equal(played.params[2], played.params[1])
    assert bool(torch.isfinite(played.params[3]).all())
    assert not torch.equal(played.params[3], played.params[2])


@pytest.mark.parametrize(
    ("rounds", "packets"),
    [(PowerSGD(rank=1), LowRank(rank=1)), (GTopK(ratio=0.2), TopK(ratio=0.2))],
    ids=["PowerSGD", "GTopK"],
)
@pytest.mark.parametrize("where", ["gossip", "back"])
def test_what_exchanges_in_rounds_among_all_has_packets_between_two(rounds, packets, where) -> None:
    """Neighbours, and a server's way back, know of no rounds."""

    def end(compress) -> torch.Tensor:
        if where == "gossip":
            more = {"topology": Gossip(method=CHOCO(gamma=0.3)), "compress": compress}
        else:
            more = {"topology": ParameterServer(back=compress)}
        algorithm = DataParallel(rule=SGD(lr=0.1), **more)
        shapes = {"matrix": (6, 5), "vector": (3,)}
        start = torch.ones(33)
        return play(algorithm, lambda r, _, x: x + r, start, 3, 4, shapes=shapes).params[-1]

    assert torch.equal(end(rounds), end(packets))


def test_what_is_aggregated_under_gossip_is_each_worker_s_own() -> None:
    algorithm = DataParallel(rule=SGD(lr=1.0), topology=Gossip(), aggregate=MajorityVote())
    played = play(algorithm, lambda _, __, x: torch.full_like(x, 3.0), torch.zeros(2), 3, 1, lr=1.0)
    torch.testing.assert_close(played.params[-1], torch.full((3, 2), -1.0))
