"""Compressors that need rounds, and matrices at a low rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyreme.algo import exchange
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import ATOMO, GTopK, PowerSGD, TopK
from polyreme.algo.compress.atomo import chances
from polyreme.algo.compress.power_sgd import orthonormal
from polyreme.algo.draw import Draw
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.packet import Like, Message, Packet, from_bytes, to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.vector import Layout
from workers import World, play, workers

torch.set_num_threads(1)

GOLDEN = np.load(Path(__file__).parent / "golden" / "feedback.npz")


def _near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Exchanges:
    """Exchanges of all workers' vectors by one compressor, with error feedback or without."""

    def __init__(self, compress, shapes, n: int, dtype=torch.float64, **parts) -> None:
        self.layout = Layout.of(shapes)
        self.algorithm = DataParallel(rule=SGD(), compress=compress, **parts)
        self.team, self.world, self.step = workers(n, self.layout), World(n=n), 0
        like = torch.zeros(self.layout.n_entries, dtype=dtype)
        self.states = [exchange.init(self.algorithm, like, me) for me in self.team]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """What all workers are given of these."""
        turn = Turn(step=self.step, lr=1.0)
        done = self.world.run(
            [
                exchange.combined(self.algorithm, row, state, me, turn)
                for row, state, me in zip(rows, self.states, self.team, strict=True)
            ]
        )
        self.step += 1
        self.states = [state for _, state in done]
        outs = torch.stack([out for out, _ in done])
        assert torch.equal(outs.nan_to_num(), outs[:1].nan_to_num().expand_as(outs))
        return outs[0]

    def errors(self) -> torch.Tensor:
        return torch.stack([state["feedback"]["error"] for state in self.states])


OUTSIDE = {"feedback": ErrorFeedback(rate="outside")}


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("step", range(5))
def test_power_iteration_is_grace_s_from_the_same_directions(worker: int, step: int) -> None:
    name = "grace/powersgd_r2_world1"
    theirs, left = (
        torch.from_numpy(GOLDEN[f"{name}/{array}"][step, worker]).double()
        for array in ("decompressed", "residual_after")
    )
    given = theirs + left
    # Any directions with M q in the span of their P give their result.
    basis = torch.linalg.svd(theirs).U[:, :2]
    play_one = Exchanges(PowerSGD(rank=2), {"w": (6, 5)}, 1, **OUTSIDE)
    play_one.states[0]["compress"]["0"]["directions"] = torch.linalg.pinv(given) @ basis
    _near(play_one(given.reshape(1, -1)).view(6, 5), theirs, 1e-5)
    _near(play_one.errors().view(6, 5), left, 1e-5)


@pytest.mark.parametrize("columns", [_random(6, 2), torch.zeros(6, 2), torch.ones(6, 2)])
def test_columns_become_orthonormal_whatever_their_rank(columns: torch.Tensor) -> None:
    basis = orthonormal(columns)
    _near(basis.T @ basis, torch.eye(2, dtype=columns.dtype), 1e-6)
    _near(basis @ basis.T @ columns, columns, 1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_power_sgd_has_the_rank_and_bytes_that_it_says(rank: int) -> None:
    n, shapes = 3, {"conv": (8, 3, 3), "bias": (5,), "thin": (2, 2), "one": (), "empty": (0, 4)}
    all_of = Exchanges(PowerSGD(rank=rank), shapes, n, **OUTSIDE)
    rows = _random(n, all_of.layout.n_entries)
    mean = all_of(rows)
    views = all_of.layout.views(mean)
    assert torch.linalg.matrix_rank(views["conv"].reshape(8, 9)) == rank
    for name in ("bias", "thin", "one", "empty"):
        dense = torch.stack([all_of.layout.views(row)[name] for row in rows]).mean(0)
        _near(views[name], dense)
    entries = rank * (8 + 9) + 5 + 2 * 2 + 1
    assert all_of.world.nbytes == [8 * entries] * n


def test_workers_own_shares_are_on_average_what_all_are_given() -> None:
    n = 3
    all_of = Exchanges(PowerSGD(rank=1), {"w": (5, 4)}, n, **OUTSIDE)
    rows = _random(n, 20)
    mean = all_of(rows)
    _near((rows - all_of.errors()).mean(0), mean)
    basis = torch.linalg.svd(mean.view(5, 4)).U[:, :1]
    for error in all_of.errors():
        assert error.norm() > 0.1
        _near(basis.T @ error.view(5, 4), torch.zeros(1, 4).double())


@pytest.mark.parametrize("warm", [True, False])
def test_warm_directions_find_the_best_approximation(warm: bool) -> None:
    matrix = _random(7, 6)
    left, values, right = torch.linalg.svd(matrix)
    best = (left[:, :2] * values[:2]) @ right[:2]
    all_of = Exchanges(PowerSGD(rank=2, warm=warm), {"w": (7, 6)}, 1)
    for _ in range(150):
        found = all_of(matrix.reshape(1, -1)).view(7, 6)
    assert bool((found - best).norm() < 1e-6) == warm


def test_a_mean_of_low_rank_is_exact_at_once() -> None:
    matrix = _random(9, 2) @ _random(2, 8, seed=1)
    all_of = Exchanges(PowerSGD(rank=2), {"w": (9, 8)}, 2)
    apart = _random(9, 8, seed=2)
    rows = torch.stack([matrix + apart, matrix - apart]).reshape(2, -1)
    _near(all_of(rows).view(9, 8), matrix, 1e-10)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_power_sgd_goes_on_after_a_matrix_that_gave_no_directions(bad: float) -> None:
    all_of = Exchanges(PowerSGD(rank=2), {"w": (9, 8), "b": (3,)}, 2)
    spoilt = torch.zeros(2, 75).double()
    spoilt[0, 5] = bad
    found = all_of(spoilt)
    assert torch.isfinite(found[:72]).all() == (bad == 0.0)
    assert torch.equal(found[72:], torch.zeros(3).double())
    matrix = _random(9, 2) @ _random(2, 8, seed=1)
    row = torch.cat([matrix.reshape(-1), torch.ones(3).double()])
    _near(all_of(row.expand(2, -1))[:72].view(9, 8), matrix, 1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("compress", [PowerSGD(rank=2), ATOMO(rank=3)])
def test_low_ranks_work_in_every_type(compress, dtype: torch.dtype, tolerance: float) -> None:
    matrix = (_random(9, 2) @ _random(2, 8, seed=1)).to(dtype)
    all_of = Exchanges(compress, {"w": (9, 8)}, 1, dtype)
    found = all_of(matrix.reshape(1, -1)).view(9, 8)
    assert found.dtype == dtype
    if dtype != torch.bfloat16 or isinstance(compress, PowerSGD):
        _near(found, matrix, tolerance)


@pytest.mark.parametrize(
    ("values", "budget", "expected"),
    [
        ([10, 1, 1], 2, [1, 0.5, 0.5]),
        ([1, 1, 1, 1], 2, [0.5] * 4),
        ([3, 1], 1, [0.75, 0.25]),
        ([3, 1], 5, [1, 1]),
        ([3, 1, 0], 2, [1, 1, 0]),
        ([0, 0], 1, [0, 0]),
        ([], 1, []),
    ],
)
def test_chances_sum_to_the_budget_and_none_is_above_one(values, budget, expected) -> None:
    found = chances(torch.tensor(values, dtype=torch.float64), budget)
    _near(found, torch.tensor(expected, dtype=torch.float64))


def _packet(kind: ATOMO, x: torch.Tensor, step: int = 0) -> Packet:
    buffers, _ = kind.encode(x, {}, Draw(seed=0, worker=0, step=step))
    message = Message(packets=(Packet(buffers=buffers, like=Like.of(x), kind=kind),))
    return from_bytes(to_bytes(message), message.kinds).packets[0]


def test_atomo_is_right_in_the_mean_and_sends_its_budget() -> None:
    x, kind, n = _random(5, 4), ATOMO(rank=1), 3000
    packets = [_packet(kind, x, step) for step in range(n)]
    draws = torch.stack([packet.decode() for packet in packets])
    sizes = torch.tensor([packet.nbytes - 8 for packet in packets]).double() / (8 * (5 + 4))
    for found, expected in ((draws, x), (sizes, torch.tensor(1.0).double())):
        assert ((found.mean(0) - expected).abs() < 5 * found.std(0) / n**0.5).all()
    assert draws.std(0).min() > 0


def test_atomo_s_draws_have_the_least_variance() -> None:
    """Proportional chances beat even ones of the same budget (Wang et al. 2018, theorem 3)."""
    values = torch.tensor([4.0, 2.0, 1.0, 1.0]).double()
    chance = chances(values, 2)
    variance = (values**2 * (1 / chance - 1)).sum()
    _near(variance, torch.tensor((2 + 1 + 1) ** 2 - 6.0).double())
    assert variance < (values**2 * (1 / 0.5 - 1)).sum()


@pytest.mark.parametrize("shape", [(7,), (), (0,), (0, 5), (2, 2), (1, 9)])
def test_atomo_sends_what_is_small_as_it_is(shape) -> None:
    x = _random(*shape)
    packet = _packet(ATOMO(rank=1), x)
    assert torch.equal(packet.decode(), x)
    assert packet.nbytes == 8 * x.numel()


def test_atomo_of_zeros_is_nothing_and_of_bad_entries_is_bad() -> None:
    zeros = _packet(ATOMO(), torch.zeros(9, 8))
    assert zeros.nbytes == 8
    assert torch.equal(zeros.decode(), torch.zeros(9, 8))
    for bad in (torch.nan, torch.inf):
        x = torch.ones(9, 8)
        x[1, 2] = bad
        assert torch.isnan(_packet(ATOMO(), x).decode()).all()


def _merged(rows: list[np.ndarray], k: int) -> np.ndarray:
    """The tree of Shi et al. for any number of workers, by hand."""

    def top(x: np.ndarray) -> np.ndarray:
        kept = np.zeros_like(x)
        where = np.argsort(-np.abs(x), kind="stable")[:k]
        kept[where] = x[where]
        return kept

    rows, hop = [top(row) for row in rows], 1
    while hop < len(rows):
        for rank in range(0, len(rows) - hop, 2 * hop):
            rows[rank] = top(rows[rank] + rows[rank + hop])
        hop *= 2
    return rows[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_g_top_k_is_the_tree_s_and_goes_both_ways(n: int) -> None:
    k, rows = 5, _random(n, 40)
    all_of = Exchanges(GTopK(ratio=k / 40), {"w": (40,)}, n, **OUTSIDE)
    expected = _merged([row.numpy() for row in rows], k)
    _near(all_of(rows), torch.from_numpy(expected) / n)
    size = k * 8 + min(-(-k * 6 // 8), 40 // 8)
    assert sum(all_of.world.nbytes) == 2 * (n - 1) * size
    assert max(all_of.world.nbytes) <= size * (n - 1).bit_length()
    chosen = torch.from_numpy(expected) != 0
    for row, error in zip(rows, all_of.errors(), strict=True):
        sent = torch.zeros(40).bool()
        sent[row.abs().topk(k).indices] = True
        assert torch.equal(error, torch.where(sent & chosen, torch.zeros_like(row), row))


def test_g_top_k_of_everything_is_the_mean() -> None:
    rows = _random(3, 10)
    all_of = Exchanges(GTopK(ratio=1.0), {"w": (10,)}, 3, **OUTSIDE)
    _near(all_of(rows), rows.mean(0))
    assert not all_of.errors().any()


def test_g_top_k_of_ties_zeros_and_bad_entries() -> None:
    all_of = Exchanges(GTopK(ratio=0.25), {"w": (8,)}, 2)
    rows = torch.ones(2, 8).double()
    expected = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]).double()
    assert torch.equal(all_of(rows), expected)
    assert torch.equal(all_of(torch.zeros_like(rows)), torch.zeros(8).double())
    rows[1, 6] = torch.nan
    assert torch.isnan(all_of(rows)[6])


def test_g_top_k_sends_tensors_together_and_small_ones_dense() -> None:
    shapes = {"w": (40,), "v": (20,), "small": (3,)}
    all_of = Exchanges(GTopK(ratio=0.1, dense_below=4), shapes, 3, **OUTSIDE)
    rows = _random(3, 63)
    found = all_of.layout.views(all_of(rows))
    for name, k in (("w", 4), ("v", 2)):
        parts = [all_of.layout.views(row)[name].numpy() for row in rows]
        _near(found[name], torch.from_numpy(_merged(parts, k)) / 3)
    _near(found["small"], rows[:, 60:].mean(0))


def test_masking_follows_the_global_set() -> None:
    from polyreme.algo.feedback import DGC

    all_of = Exchanges(GTopK(ratio=1 / 4), {"w": (4,)}, 2, feedback=DGC())
    all_of(torch.tensor([[5.0, 0, 0, 1], [0, 3.0, 0, 1]]).double())
    momentum = [state["feedback"]["momentum_buffer"].tolist() for state in all_of.states]
    assert momentum == [[0, 0, 0, 1], [0, 3, 0, 1]]


@pytest.mark.parametrize("kind", [TopK, GTopK])
def test_the_ratio_falls_epoch_by_epoch_as_in_dgc(kind) -> None:
    warming = kind(ratio=0.001, warmup_epochs=4, epoch_steps=10)
    ratios = [warming.at(step).ratio for step in range(0, 70, 10)]
    theirs = [max(0.001 ** ((epoch + 1) / (4 + 1)), 0.001) for epoch in range(7)]
    assert ratios == pytest.approx(theirs, rel=1e-12)
    assert [round(100 * ratio, 1) for ratio in ratios] == [25.1, 6.3, 1.6, 0.4, 0.1, 0.1, 0.1]
    assert warming.at(9) == warming.at(0) != warming.at(10)
    assert warming.at(0).at(0) == warming.at(0)
    assert kind(ratio=0.01).at(3) == kind(ratio=0.01)


@pytest.mark.parametrize("kind", [TopK, GTopK])
def test_fewer_bytes_are_sent_as_the_ratio_falls(kind) -> None:
    warming = kind(ratio=0.01, warmup_epochs=1, epoch_steps=2)
    algorithm = DataParallel(rule=SGD(), compress=warming, **OUTSIDE)
    start = torch.zeros(1000)
    grads = _random(4, 1000, dtype=torch.float32)
    sent = [
        sum(play(algorithm, lambda rank, *_: grads[rank], start, 2, rounds).nbytes)
        for rounds in range(5)
    ]
    size = [100 * 4 + 125, 10 * 4 + 13]
    assert list(np.diff(sent)) == [2 * size[0], 2 * size[0], 2 * size[1], 2 * size[1]]
