"""Factors of a matrix: models that see the whole sum as linear ones do, and are not convex."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from both_clocks import in_processes
from factor_jobs import FactorCase, pairs_of, solved, virtually
from polyreme import spec
from polyreme.algo.search import first_eta, plain
from polyreme.algo.sync import PSCOPE, SCOPE, SSP, EveryStep
from polyreme.algo.sync.kind import SyncKind
from polyreme.algo.task import Steps
from polyreme.convex.factor_task import Factorization, FactorTask
from polyreme.convex.factors import Block, joined
from polyreme.data import ratings
from polyreme.data.options import Ratings
from polyreme.errors import ConfigError

torch.set_num_threads(1)

N_USERS, N_ITEMS, RANK = 9, 7, 3


def _task(seed: int, n: int = 40, l2: float = 0.03) -> FactorTask:
    """Pairs at random, some twice; a user and an item without any."""
    rng = np.random.default_rng(seed)
    block = Block(
        users=rng.integers(0, N_USERS - 1, n),
        items=rng.integers(0, N_ITEMS - 1, n),
        y=rng.normal(size=n),
        n_users=N_USERS,
        rank=RANK,
    )
    return FactorTask(objective=Factorization(rank=RANK, l2=l2), block=block, batch=8)


def _model(seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(N_USERS + N_ITEMS) * RANK))


def _dense(task: FactorTask, asked: Steps, anchor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each step moves all of the model; the last, and the mean of all."""
    block, l2 = task.block, task.l2 if asked.exact else 0.0
    w, b = asked.start.numpy().copy(), asked.b.numpy()
    order = np.random.default_rng(asked.seed).integers(0, task.n_own, asked.n)
    total = np.zeros_like(w)

    def pair(w: np.ndarray, at: int) -> np.ndarray:
        u, v = block.parts(w)
        i, j = block.users[at], block.items[at]
        s = u[i] @ v[j] - block.y[at]
        du, dv = np.zeros_like(u), np.zeros_like(v)
        du[i], dv[j] = s * v[j], s * u[i]
        return joined((du, dv))

    for at in order:
        change = b + pair(w, at) - pair(anchor, at)
        w = ((1 - asked.eta * asked.mu) * w - asked.eta * change) / (1 + asked.eta * l2)
        total += w
    return w, total / asked.n


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_autograd(seed: int) -> None:
    task, w = _task(seed), _model(seed + 9).requires_grad_()
    u, v = w[: N_USERS * RANK].view(-1, RANK), w[N_USERS * RANK :].view(-1, RANK)
    users, items = torch.from_numpy(task.block.users), torch.from_numpy(task.block.items)
    slopes = (u[users] * v[items]).sum(1) - torch.from_numpy(task.block.y)
    loss = (slopes**2).sum() / 2
    loss.backward()
    here = task.at(w.detach())
    torch.testing.assert_close(here.gradient, w.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(here.slopes, slopes.detach(), rtol=1e-13, atol=1e-13)
    assert here.loss == pytest.approx(loss.item(), rel=1e-13)
    assert task.loss(w.detach()) == pytest.approx(loss.item(), rel=1e-13)


@pytest.mark.slice(4)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    ("eta", "mu", "exact", "l2"),
    [(0.05, 0.0, True, 0.03), (0.05, 0.4, False, 0.03), (0.01, 0.2, True, 1.5), (0.02, 0, True, 0)],
)
@pytest.mark.parametrize("seed", range(2))
def test_steps_that_were_skipped_come_to_what_each_comes_to(
    seed: int, eta: float, mu: float, exact: bool, l2: float, mean: bool
) -> None:
    task, start, anchor = _task(seed, l2=l2), _model(seed + 5), _model(seed + 6)
    here = task.at(anchor)
    asked = Steps(
        start=start,
        anchor=anchor,
        slopes=here.slopes,
        b=here.gradient / task.n_own,
        n=150,
        eta=eta,
        seed=(seed, 1),
        mu=mu,
        exact=exact,
        mean=mean,
    )
    want = _dense(task, asked, anchor.numpy())[mean]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(task.steps(asked).numpy(), want, rtol=0, atol=1e-10)


def test_a_few_pairs_have_as_much_more_of_the_penalty_as_is_asked() -> None:
    task, w = _task(0), _model(1)
    assert task.few(5, heavier=8.0).n_own == 5
    assert task.few(5, heavier=8.0).penalty(w) == pytest.approx(8 * task.penalty(w), rel=1e-15)


def test_a_worker_without_pairs_stays_where_it_is() -> None:
    task, w = _task(0, n=0), _model(1)
    here = task.at(w)
    asked = Steps(start=w, slopes=here.slopes, b=w, n=0, eta=0.1, seed=(0,))
    assert torch.equal(task.steps(asked), w)
    assert first_eta(task, w, plain(True, 0.0), 0.0) == 1.0
    assert here.loss == 0


def _alternating(path: Path, rank: int, l2: float, rounds: int = 3000) -> float:
    """Least squares for all users, then for all items, until nothing changes: the objective."""
    pairs, values = pairs_of(path)
    n, shape = len(values), pairs.max(0) + 1
    rng = np.random.default_rng(5)
    factors = [rng.normal(size=(count, rank)) for count in shape]
    eye = n * l2 * np.eye(rank)
    least = np.inf
    for _ in range(rounds):
        for side in (0, 1):
            other = factors[1 - side]
            for one in range(shape[side]):
                own = pairs[:, side] == one
                x = other[pairs[own, 1 - side]]
                factors[side][one] = np.linalg.solve(x.T @ x + eye, x.T @ values[own])
        u, v = factors
        left = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1) - values
        found = (left**2).mean() / 2 + l2 / 2 * float((u**2).sum() + (v**2).sum())
        if least - found < 1e-13:
            break
        least = found
    return float(found)


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values of rank 2 and noise, at a third of all pairs."""
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("rated") / "ratings.npz"
    u, v = rng.normal(size=(30, 2)), rng.normal(size=(20, 2))
    pairs = np.argwhere(rng.random((30, 20)) < 0.5)
    values = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1) + 0.1 * rng.normal(size=len(pairs))
    cut = len(pairs) - 40
    pairs, values = pairs[(order := rng.permutation(len(pairs)))], values[order]
    named = {"train": pairs[:cut], "train_values": values[:cut]}
    np.savez(path, **named, test=pairs[cut:], test_values=values[cut:])
    return path


@pytest.mark.slice(2)
@pytest.mark.parametrize(("n", "sync"), [(1, PSCOPE()), (2, SCOPE()), (4, PSCOPE()), (4, SCOPE())])
def test_workers_come_to_the_objective_of_alternating_least_squares(
    rated: Path, n: int, sync: SyncKind
) -> None:
    # Of a rank above that of the optimum every local optimum is a global one.
    case = FactorCase.ratings(rated, rank=5, l2=0.02, sync=sync, n=n, steps=300)
    found = solved(case)
    assert found["objective"] == pytest.approx(_alternating(rated, 5, 0.02), abs=1e-6)
    assert found["gradient"] < 1e-6
    assert "gap" not in found


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [PSCOPE(), SCOPE(c=1e-3), EveryStep()])
def test_processes_and_the_clock_give_the_same_bits(rated: Path, pool: Any, sync: SyncKind) -> None:
    case = FactorCase.ratings(rated, rank=2, l2=0.01, sync=sync, n=2, steps=5)
    want = virtually(case)
    got, _, _ = pool(2).run(in_processes, case)[0]
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert got.keys() == want.keys()


def test_gradients_of_batches_lead_down(rated: Path) -> None:
    for sync in (EveryStep(), SSP()):
        case = FactorCase.ratings(rated, rank=5, l2=0.02, sync=sync, n=2, steps=300, lr=3.0)
        assert solved(case)["objective"] < 0.8 * solved(FactorCase.still(case))["objective"]


def test_negatives_are_pairs_that_are_not_there_and_all_different() -> None:
    rng = np.random.default_rng(0)
    cells = rng.permutation(20 * 30)[:200]
    pairs = ratings.Pairs(users=cells // 30, items=cells % 30, values=np.ones(200))
    dense = np.bincount(pairs.users).max()
    for negatives in (1, 30 // dense - 1):
        found = ratings.with_negatives(pairs, 30, negatives, 7)
        drawn = found.users[200:] * 30 + found.items[200:]
        assert len(np.unique(drawn)) == len(drawn) == 200 * negatives
        assert not np.isin(drawn, cells).any()
        assert (np.bincount(found.users) == (1 + negatives) * np.bincount(pairs.users)).all()
        assert (found.values == np.repeat([1, 0], [200, 200 * negatives])).all()
        again = ratings.with_negatives(pairs, 30, negatives, 7)
        other = ratings.with_negatives(pairs, 30, negatives, 8)
        assert (found.items == again.items).all()
        assert (found.items != other.items).any()
    with pytest.raises(ConfigError) as caught:
        ratings.with_negatives(pairs, 30, 30, 7)
    assert caught.value.violations[0].path == "data.negatives"


def test_negatives_fill_up_all_that_a_user_has_left() -> None:
    pairs = ratings.Pairs(users=np.zeros(50, int), items=np.arange(50), values=np.ones(50))
    found = ratings.with_negatives(pairs, 100, 1, 0)
    assert (np.sort(found.items) == np.arange(100)).all()


@pytest.mark.parametrize(
    ("arrays", "path"),
    [
        ({"train": np.array([[0, -1]])}, "data.path"),
        ({"train": np.array([[0.0, 1.0]])}, "data.path"),
        ({"train": np.array([0, 1])}, "data.path"),
        ({"train": np.zeros((2, 3), int)}, "data.path"),
        ({"train": np.zeros((0, 2), int)}, "data.path"),
        ({"train": np.array([[0, 2**40]])}, "data.path"),
        ({"train": np.zeros((2, 2), int), "train_values": np.array([1, np.nan])}, "data.path"),
        ({"train": np.zeros((2, 2), int), "train_values": np.ones(3)}, "data.path"),
        ({"train": np.zeros((2, 2), int), "train_values": np.array(["a", "b"])}, "data.path"),
        ({"train": np.zeros((2, 2), int), "test": np.array([[0, -3]])}, "data.path"),
        ({"pairs": np.zeros((2, 2), int)}, "data.path"),
        ({}, "data.path"),
    ],
)
def test_ratings_that_are_wrong_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], path: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError) as caught:
        Ratings(path=str(tmp_path / "a.npz")).open(None, 0)
    assert [each.path for each in caught.value.violations] == [path]


def test_a_file_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"")
    for name in ("a.npz", "b.npz"):
        assert [each.path for each in Ratings(path=str(tmp_path / name)).check()] == ["data.path"]


def test_held_out_are_the_pairs_of_test_or_of_valid(tmp_path: Path) -> None:
    train, path = np.array([[0, 1], [2, 0]]), tmp_path / "a.npz"
    np.savez(path, train=train)
    source = Ratings(path=str(path)).open(None, 0)
    assert (source.n_train, source.n_heldout, source.baselines()) == (2, 0, {})
    assert source.sample.numbered == {"users": 3, "items": 2}
    np.savez(path, train=train, valid=np.array([[4, 1]]))
    assert Ratings(path=str(path)).open(None, 0).sample.numbered == {"users": 5, "items": 2}
    np.savez(path, train=train, valid=np.array([[4, 1]]), test=np.array([[0, 9]] * 2))
    assert Ratings(path=str(path)).open(None, 0).n_heldout == 2
    assert Ratings(path=str(path), heldout="valid").open(None, 0).n_heldout == 1
    np.savez(path, train=train, test=np.array([[0, 9]] * 2))
    (violation,) = Ratings(path=str(path), heldout="valid").check()
    assert violation.path == "data.heldout"


def _refused(model: dict[str, Any], data: dict[str, Any], **tables: Any) -> list[str]:
    document = {"model": model, "data": data, "train": {"steps": 2}, **tables}
    with pytest.raises(ConfigError) as caught:
        spec.parse(document, trusted=["data"])
    return sorted(each.path for each in caught.value.violations)


MF = {"kind": "matrix_factorization", "rank": 2}
RATINGS = {"kind": "ratings", "path": "x.npz"}


def test_specs_that_are_wrong_are_refused() -> None:
    assert _refused({**MF, "rank": 0}, RATINGS) == ["model.rank"]
    assert _refused({**MF, "l2": -1}, RATINGS) == ["model.l2"]
    assert _refused(MF, {"kind": "digits"}) == ["data.kind"]
    assert _refused(MF, {**RATINGS, "negatives": -1}) == ["data.negatives"]
    assert _refused(MF, RATINGS, train={"steps": 2, "gap": 1e-3}) == ["train.gap"]
    assert _refused(MF, RATINGS, train={"steps": 2, "precision": "fp32"}) == ["train.precision"]
    assert _refused(MF, RATINGS, parallel={"pp": 2}) == ["parallel.pp"]
    assert _refused({"kind": "mlp"}, RATINGS) == ["data.kind"]


@pytest.mark.long
@pytest.mark.skipif("POLYREME_DATA" not in os.environ, reason="POLYREME_DATA is not set")
def test_real_pairs_are_factored() -> None:
    path = Path(os.environ["POLYREME_DATA"]) / "ratings" / "gowalla.npz"
    case = FactorCase.ratings(path, rank=4, l2=1e-6, sync=PSCOPE(), n=4, steps=15, negatives=1)
    found = solved(case)
    assert found["objective"] < 0.2
    assert found["heldout_loss"] < found["mean_value_loss"] == 0.125
