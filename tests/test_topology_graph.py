"""Gossip graphs: weights that mix, and refusals of those that do not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.topology import Gossip
from polyreme.algo.topology.graph import (
    Complete,
    Exponential,
    Graph,
    Matrix,
    RandomMatching,
    RingGraph,
    TorusGraph,
)
from polyreme.algo.topology.method import SGP
from polyreme.errors import ConfigError
from workers import play

torch.set_num_threads(1)

GRAPHS = [
    RingGraph(),
    TorusGraph(),
    Complete(),
    Exponential(peers="one"),
    Exponential(peers="all"),
    RandomMatching(),
]
DIRECTED = [[0.5, 0.0, 0.4], [0.5, 0.7, 0.0], [0.0, 0.3, 0.6]]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_weights_keep_the_mean_and_reach_all(graph: Graph, n: int) -> None:
    product = torch.eye(n, dtype=torch.float64)
    for step in range(64):
        weights = graph.weights(n, step, seed=3)
        ones = torch.ones(n, dtype=torch.float64)
        assert bool((weights >= 0).all())
        torch.testing.assert_close(weights.sum(0), ones, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights.sum(1), ones, rtol=0, atol=1e-12)
        if graph.symmetric:
            assert torch.equal(weights, weights.T)
        assert not bool(((weights != 0) & ~graph.ever(n)).any())
        product = weights @ product
    assert not graph.refused(n)
    assert graph.spectral_gap(n) > 0
    assert bool((product > 0).all())


@pytest.mark.parametrize("n", [3, 5, 8])
def test_spectral_gaps_are_the_known_ones(n: int) -> None:
    assert RingGraph().spectral_gap(n) == pytest.approx(1 - (1 + 2 * math.cos(math.tau / n)) / 3)
    assert Complete().spectral_gap(n) == pytest.approx(1)
    torus = TorusGraph(rows=3).spectral_gap(9)
    assert torus == pytest.approx(1 - (3 + 2 * math.cos(math.tau / 3)) / 5)


def test_the_static_exponential_graph_s_gap_is_the_published_one() -> None:
    """Ying et al. 2021, proposition 1: 2 / (1 + ceil(log2 n)) for even n."""
    for n in (2, 4, 6, 8, 16, 32):
        gap = Exponential(peers="all").spectral_gap(n)
        assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(n))))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_at_a_time_gives_the_mean_after_log_n_steps(n: int) -> None:
    """Ying et al. 2021, lemma 1."""
    graph = Exponential(peers="one")
    product = torch.eye(n, dtype=torch.float64)
    for step in range(graph.period(n)):
        product = graph.weights(n, step + 5) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / n), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [4, 5])
def test_matchings_are_pairs_that_change_and_depend_on_the_seed(n: int) -> None:
    graph = RandomMatching()
    drawn = [graph.weights(n, step, seed=1) for step in range(2000)]
    for weights in drawn[:20]:
        assert int((weights == 0.5).sum()) == 4 * (n // 2)
    again = [graph.weights(n, step, seed=1) for step in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(again, drawn, strict=False))
    assert any(not torch.equal(graph.weights(n, step, seed=2), drawn[step]) for step in range(20))
    mean = torch.stack(drawn).mean(0)
    sizes = torch.linalg.eigvalsh(mean).sort(descending=True).values
    assert graph.spectral_gap(n) == pytest.approx(1 - float(sizes[1]), abs=0.05)


GOOD = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]


@pytest.mark.parametrize("suffix", ["npy", "json", "txt", "csv"])
def test_a_matrix_is_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w.{suffix}"
    if suffix == "npy":
        np.save(path, np.array(GOOD))
    elif suffix == "json":
        path.write_text(json.dumps(GOOD))
    else:
        joint = " " if suffix == "txt" else ","
        path.write_text("\n".join(joint.join(map(str, row)) for row in GOOD) + "\n")
    graph = Matrix(path=str(path))
    assert graph.weights(3, 7).tolist() == GOOD
    assert not graph.refused(3)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]], "not connected: nothing of worker 1 ever"),
        ([[0.5, 0.5, 0], [0.5, 0.5, 0.5], [0, 0, 0.5]], "not doubly stochastic: row 1 sums to 1.5"),
        ([[0.5, 0.5, 0], [0.5, 0.4, 0.05], [0, 0.1, 0.95]], "not doubly stochastic: row"),
        ([[0, 0, 1], [1, 0, 0], [0, 1, 0]], "never mixes"),
        ([[1.5, -0.5, 0], [-0.5, 1.5, 0], [0, 0, 1]], "negative or not finite"),
        ([[math.nan] * 3] * 3, "negative or not finite"),
        ([[0.5, 0.5], [0.5, 0.5]], "2 x 2 numbers for 3 workers"),
        ([[0.5, 0.5], [0.5]], "holds no matrix"),
        ([["a"]], "holds no matrix"),
        ({}, "holds"),
    ],
)
def test_matrices_that_do_not_mix_are_refused_in_words(
    tmp_path: Path, rows: Any, said: str
) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(rows))
    topology = Gossip(graph=Matrix(path=str(path)))
    found = topology.refused(3, DataParallel())
    assert said in " ".join(map(str, found))
    assert all(each.path.startswith("data_parallel.topology") for each in found)
    with pytest.raises(ConfigError, match=r"data_parallel\.topology\.graph"):
        play(DataParallel(topology=topology), lambda _rank, _batch, x: x, torch.ones(2), 3, 1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = Matrix(path=str(tmp_path / "none.txt")).refused(3)
    assert "holds no matrix" in str(found[0])
    assert "none.txt" in str(found[0])


def test_push_sum_alone_takes_a_matrix_whose_columns_sum_to_one(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(DIRECTED))
    graph = Matrix(path=str(path))
    assert not Gossip(graph=graph, method=SGP()).refused(3, DataParallel())
    assert "doubly" in str(Gossip(graph=graph).refused(3, DataParallel())[0])
    path = tmp_path / "v.json"
    path.write_text(json.dumps(torch.tensor(DIRECTED).T.tolist()))
    found = Gossip(graph=Matrix(path=str(path)), method=SGP()).refused(3, DataParallel())
    assert "not column stochastic" in str(found[0])


def test_rows_of_a_torus_that_are_not_full_are_refused() -> None:
    found = Gossip(graph=TorusGraph(rows=3)).refused(4, DataParallel())
    assert "Legal: 1, 2, 4" in str(found[0])
