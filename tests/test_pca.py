"""Principal components over workers: variance-reduced steps, and the subspace that they come to."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.decomposition
import torch
from sklearn.datasets import load_digits

from both_clocks import in_processes
from factor_jobs import FactorCase, solved, virtually
from polyreme import spec
from polyreme.algo.sync import PSCOPE, SCOPE, SSP, EveryStep, Sync
from polyreme.algo.sync.kind import SyncKind
from polyreme.algo.sync.scope import Anchored
from polyreme.algo.task import Steps
from polyreme.api.linear_of import objective_of
from polyreme.convex.pca_task import Components, RowSamples, RowTask
from polyreme.data.options import Arrays, Svmlight
from polyreme.data.rows import Rows
from polyreme.errors import ConfigError
from polyreme.graph.options import PCA

torch.set_num_threads(1)


def _rows(seed: int, n: int = 40, d: int = 12) -> np.ndarray:
    """Two numbers of three are not there; the last row has none."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (rng.random((n, d)) < 0.4)
    x[-1] = 0
    return x


def _task(x: np.ndarray, k: int) -> RowTask:
    return RowTask(components=k, rows=Rows.of(x), batch=8)


def _orthonormal(seed: int, d: int, k: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, k)))[0]


def _flat(w: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(w).reshape(-1))


def _turn(w: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(anchor.T @ w)
    return left @ right


def _dense(x: np.ndarray, asked: Steps, k: int) -> np.ndarray:
    """VR-PCA as it is written down, all of W at each step, with a symmetric root."""
    anchor = w = asked.start.numpy().reshape(-1, k)
    if asked.anchor is not None:
        anchor = asked.anchor.numpy().reshape(-1, k)
    b, total = asked.b.numpy().reshape(-1, k), np.zeros_like(w)
    for at in np.random.default_rng(asked.seed).integers(0, len(x), asked.n):
        turn, row = _turn(w, anchor), x[at]
        back = np.outer(row, row @ w - row @ anchor @ turn) - b @ turn
        w = (1 - asked.eta * asked.mu) * w + asked.eta * back
        values, vectors = np.linalg.eigh(w.T @ w)
        w = w @ (vectors / np.sqrt(values)) @ vectors.T
        total += w @ _turn(w, anchor).T
    return total / asked.n if asked.mean else w @ _turn(w, anchor).T


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_those_of_autograd(seed: int, k: int) -> None:
    x = _rows(seed)
    task, w = _task(x, k), torch.randn(12, k, dtype=torch.float64).requires_grad_()
    rows = torch.from_numpy(x)
    loss = -((rows @ w) ** 2).sum() / 2
    loss.backward()
    here = task.at(w.detach().reshape(-1))
    torch.testing.assert_close(here.gradient.view(12, k), w.grad, rtol=1e-12, atol=1e-12)
    assert here.loss == pytest.approx(loss.item(), rel=1e-12)

    w.grad = None
    moment = rows.T @ rows / len(x)
    span = -torch.trace(torch.linalg.inv(w.T @ w) @ w.T @ moment @ w) / 2
    span.backward()
    samples = RowSamples(components=k, rows=Rows.of(x))
    gradient, total = samples.gradient(np.arange(len(x)), w.detach().reshape(-1))
    torch.testing.assert_close(gradient.view(12, k), w.grad, rtol=1e-10, atol=1e-12)
    assert total / len(x) == pytest.approx(span.item(), rel=1e-12)


@pytest.mark.slice(1)
@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize(
    ("eta", "mu", "mean", "n"),
    [(0.01, 0, False, 1200), (0.2, 0, False, 300), (0.02, 0, True, 100), (0.02, 0.5, False, 700)],
)
def test_steps_on_stored_numbers_are_those_on_all(
    k: int, eta: float, mu: float, mean: bool, n: int
) -> None:
    x = _rows(7)
    anchor, start = _orthonormal(1, 12, k), _orthonormal(2, 12, k)
    task = _task(x, k)
    b = task.at(_flat(anchor)).gradient / len(x)
    pull = {"b": b, "slopes": b[:0], "eta": eta, "mu": mu, "mean": mean, "n": n, "seed": (3,)}
    asked = Steps(start=_flat(start), anchor=_flat(anchor), **pull)
    found = task.steps(asked).numpy().reshape(12, k)
    np.testing.assert_allclose(found, _dense(x, asked, k), rtol=0, atol=1e-9)


def test_a_pull_that_leaves_nothing_of_the_model_is_a_step_too() -> None:
    x, anchor = _rows(4), _orthonormal(1, 12, 2)
    task = _task(x, 2)
    b = task.at(_flat(anchor)).gradient / len(x) - 2 * _flat(anchor)
    for mu in (1.2, 2.0):
        asked = Steps(start=_flat(anchor), b=b, slopes=b[:0], eta=0.5, mu=mu, n=30, seed=(1,))
        found = task.steps(asked).numpy().reshape(12, 2)
        np.testing.assert_allclose(found, _dense(x, asked, 2), rtol=0, atol=1e-9)


def test_steps_that_are_far_too_large_end_orthonormal_or_infinite() -> None:
    x, start = 1e3 * _rows(5), _flat(_orthonormal(1, 12, 3))
    task = _task(x, 3)
    for scale in (1e3, 1e150, np.inf):
        b = task.at(start).gradient * scale
        asked = Steps(start=start, b=b, slopes=b[:0], eta=1e3, n=50, seed=(1,))
        found = task.steps(asked).numpy().reshape(12, 3)
        fine = np.allclose(found.T @ found, np.eye(3), atol=1e-8)
        assert fine or np.isinf(found).all()
    assert not fine


def _leading(x: np.ndarray, k: int) -> tuple[float, np.ndarray]:
    """The least objective, and the subspace."""
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    return float(-values[-k:].sum() / 2), vectors[:, -k:]


def _sine(w: np.ndarray, subspace: np.ndarray) -> float:
    """Of the largest angle between subspaces."""
    return float(np.linalg.norm(w - subspace @ (subspace.T @ w), 2))


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of which each direction has about half the variance of the one before."""
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("spread") / "rows.npz"
    x = rng.normal(size=(400, 20)) @ np.diag(1.4 ** -np.arange(20.0)) @ _orthonormal(0, 20, 20)
    labels = rng.integers(0, 3, 400)
    np.savez(path, x_train=x[:320], y_train=labels[:320], x_test=x[320:], y_test=labels[320:])
    return path


def _read(path: Path) -> np.ndarray:
    source = Arrays(path=str(path)).open(None, 0)
    return source.train(np.arange(source.n_train))["features"].double().numpy()


@pytest.mark.slice(2)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("n", "sync"), [(1, PSCOPE()), (2, SCOPE(c=0.01)), (4, PSCOPE())])
def test_workers_come_to_the_leading_subspace(spread: Path, n: int, sync: SyncKind, k: int) -> None:
    case = FactorCase.pca(Arrays(path=str(spread)), k=k, sync=sync, n=n, steps=60)
    least, subspace = _leading(_read(spread), k)
    (w,) = (tensor.numpy() for tensor in virtually(case).values())
    np.testing.assert_allclose(w.T @ w, np.eye(k), rtol=0, atol=1e-12)
    assert _sine(w, subspace) < 1e-8
    found = solved(case)
    assert found["objective"] == pytest.approx(least, abs=1e-12)
    assert found["gradient"] < 1e-8
    assert set(found) == {"heldout_loss", "objective", "gradient"}
    with np.load(spread) as packed:
        held = packed["x_test"].astype(np.float32).astype(float) @ subspace
    assert found["heldout_loss"] == pytest.approx(-(held**2).sum() / 2 / 80, abs=1e-9)


def test_the_angle_falls_by_a_factor_each_round(spread: Path) -> None:
    subspace, sines = _leading(_read(spread), 3)[1], []
    for steps in (3, 6, 9, 12):
        case = FactorCase.pca(Arrays(path=str(spread)), k=3, sync=PSCOPE(), n=2, steps=steps)
        (w,) = (tensor.numpy() for tensor in virtually(case).values())
        sines.append(_sine(w, subspace))
    assert all(after < 0.4 * before for before, after in itertools.pairwise(sines))


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [PSCOPE(), SCOPE(c=1e-3), EveryStep()])
def test_processes_and_the_clock_give_the_same_bits(
    spread: Path, pool: Any, sync: SyncKind
) -> None:
    case = FactorCase.pca(Arrays(path=str(spread)), k=3, sync=sync, n=2, steps=4)
    want = virtually(case)
    got, _, _ = pool(2).run(in_processes, case)[0]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [EveryStep(), SSP()])
def test_gradients_of_batches_lead_to_the_subspace(spread: Path, sync: SyncKind) -> None:
    case = FactorCase.pca(Arrays(path=str(spread)), k=2, sync=sync, n=2, steps=300, lr=0.2)
    least, _ = _leading(_read(spread), 2)
    assert least <= solved(case)["objective"] < 0.98 * least


def test_rows_of_a_lower_rank_than_asked_for_and_all_directions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 6))
    for x, k in ((low, 4), (rng.normal(size=(60, 6)), 6)):
        np.savez(tmp_path / "a.npz", x_train=x, y_train=np.zeros(60, int))
        data = Arrays(path=str(tmp_path / "a.npz"), heldout=0)
        found = solved(FactorCase.pca(data, k=k, sync=PSCOPE(), n=2, steps=40))
        least, _ = _leading(_read(tmp_path / "a.npz"), k)
        assert found["objective"] == pytest.approx(least, rel=0.2)


def test_sparse_rows_are_read_as_they_are_stored(tmp_path: Path) -> None:
    x, y = load_digits(return_X_y=True)
    x = x / 16
    lines = [
        f"{label} "
        + " ".join(f"{j + 1}:{value!r}" for j, value in enumerate(row.tolist()) if value)
        for row, label in zip(x, y, strict=True)
    ]
    (tmp_path / "digits.svm").write_text("\n".join(lines))
    data = Svmlight(path=str(tmp_path / "digits.svm"), n_features=64, heldout=0, sparse=True)
    case = FactorCase.pca(data, k=3, sync=PSCOPE(), n=2, steps=30)
    (w,) = (tensor.numpy() for tensor in virtually(case).values())
    assert _sine(w, _leading(x, 3)[1]) < 1e-8


def _refused(model: dict[str, Any], data: dict[str, Any], **tables: Any) -> list[str]:
    document = {"model": model, "data": data, "train": {"steps": 2}, **tables}
    with pytest.raises(ConfigError) as caught:
        spec.parse(document, trusted=["data"])
    return sorted(each.path for each in caught.value.violations)


def test_specs_that_are_wrong_are_refused(spread: Path) -> None:
    model, data = {"kind": "pca", "components": 2}, {"kind": "arrays", "path": "x.npz"}
    assert _refused({**model, "components": 0}, data) == ["model.components"]
    assert _refused(model, {"kind": "digits"}) == ["data.kind"]
    assert _refused(model, data, train={"steps": 2, "gap": 1e-3}) == ["train.gap"]
    assert _refused(model, data, parallel={"tp": 2}) == ["parallel.tp"]
    source = Arrays(path=str(spread)).open(None, 0)
    PCA(components=20).graph(source.sample)
    with pytest.raises(ConfigError) as caught:
        PCA(components=21).graph(source.sample)
    assert caught.value.violations[0].path == "model.components"


@pytest.mark.parametrize("kind", [each for each in Sync.__args__ if each.finite_sum])
def test_syncs_that_ask_for_convex_sums_are_refused(kind: type[SyncKind]) -> None:
    document = {
        "model": {"kind": "pca"},
        "data": {"kind": "arrays", "path": "x.npz"},
        "train": {"steps": 2},
        "data_parallel": {"sync": {"kind": kind.__struct_config__.tag}},
    }
    if issubclass(kind, Anchored):
        spec.parse(document, trusted=["data"])
        return
    with pytest.raises(ConfigError) as caught:
        spec.parse(document, trusted=["data"])
    assert [each.path for each in caught.value.violations] == ["data_parallel.sync.kind"]


# Centred rows


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize(
    ("eta", "mu", "mean", "n"),
    [(0.01, 0, False, 1200), (0.1, 0, False, 300), (0.02, 0, True, 100), (0.02, 0.5, False, 700)],
)
def test_steps_on_stored_numbers_are_those_on_rows_less_their_mean(
    k: int, eta: float, mu: float, mean: bool, n: int
) -> None:
    x = _rows(7) + (np.arange(12) < 4) * 2.0
    centre = x.mean(0)
    anchor, start = _orthonormal(1, 12, k), _orthonormal(2, 12, k)
    task = RowTask(components=k, rows=Rows.of(x), batch=8, centre=centre)
    here, dense = task.at(_flat(anchor)), _task(x - centre, k).at(_flat(anchor))
    torch.testing.assert_close(here.gradient, dense.gradient, rtol=1e-12, atol=1e-12)
    assert here.loss == pytest.approx(dense.loss, rel=1e-12)
    b = here.gradient / len(x)
    pull = {"b": b, "slopes": b[:0], "eta": eta, "mu": mu, "mean": mean, "n": n, "seed": (3,)}
    asked = Steps(start=_flat(start), anchor=_flat(anchor), **pull)
    found = task.steps(asked).numpy().reshape(12, k)
    np.testing.assert_allclose(found, _dense(x - centre, asked, k), rtol=0, atol=1e-9)
    assert task._longest() == pytest.approx(((x - centre) ** 2).sum(1).max(), rel=1e-12)


@pytest.fixture
def shifted(tmp_path: Path) -> Path:
    """Rows whose mean is longer than any of their deviations."""
    x, _ = load_digits(return_X_y=True)
    path = tmp_path / "shifted.npz"
    x = x[:900, 8:40] / 16 + 1.5
    np.savez(path, x_train=x, y_train=np.zeros(len(x), int))
    return path


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4])
def test_directions_are_those_of_sklearn_on_dense_rows(shifted: Path, n: int) -> None:
    data = Arrays(path=str(shifted), heldout=0)
    source = data.open(None, 0)
    x = source.train(np.arange(source.n_train))["features"].double().numpy()
    for center in (True, False):
        case = FactorCase.pca(data, k=3, sync=PSCOPE(), n=n, steps=40, center=center)
        w = virtually(case)["pca.weight"].numpy()
        want = (
            sklearn.decomposition.PCA(3, svd_solver="full").fit(x).components_
            if center
            else np.linalg.svd(x, full_matrices=False)[2][:3]
        )
        assert _sine(w, want.T) < 1e-7
        least = ((x - center * x.mean(0)) @ w) ** 2
        assert solved(case)["objective"] == pytest.approx(-least.sum() / 2 / len(x), rel=1e-10)


def test_directions_are_those_of_sklearn_on_sparse_rows_which_stay_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = (rng.random((400, 50)) < 0.1) * rng.uniform(0.5, 3, (400, 50)) * np.linspace(3, 0.2, 50)
    lines = [
        "1 " + " ".join(f"{j + 1}:{value!r}" for j, value in enumerate(row.tolist()) if value)
        for row in x
    ]
    (tmp_path / "rows.svm").write_text("\n".join(lines))
    monkeypatch.setattr(Rows, "dense", None)
    data = Svmlight(path=str(tmp_path / "rows.svm"), n_features=50, heldout=0, sparse=True)
    case = FactorCase.pca(data, k=2, sync=PSCOPE(), n=3, steps=80, center=True)
    want = sklearn.decomposition.PCA(2, svd_solver="full").fit(x).components_
    assert _sine(virtually(case)["pca.weight"].numpy(), want.T) < 1e-6


def test_held_out_rows_are_less_the_mean_of_training_rows(shifted: Path) -> None:
    data = Arrays(path=str(shifted), heldout=0.2)
    case = FactorCase.pca(data, k=2, sync=PSCOPE(), n=2, steps=30, center=True)
    source = data.open(None, 0)
    x = source.train(np.arange(source.n_train))["features"].flatten(1).double().numpy()
    held = source.heldout(np.arange(source.n_heldout))["features"].flatten(1).double().numpy()
    found, model = solved(case), sklearn.decomposition.PCA(2, svd_solver="full").fit(x)
    assert len(held) > 100
    want = -(model.transform(held) ** 2).sum() / 2 / len(held)
    assert found["heldout_loss"] == pytest.approx(want, rel=1e-6)


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [PSCOPE(), EveryStep()])
def test_centred_rows_give_the_same_bits_on_both_clocks(
    shifted: Path, pool: Any, sync: SyncKind
) -> None:
    data = Arrays(path=str(shifted), heldout=0)
    case = FactorCase.pca(data, k=3, sync=sync, n=2, steps=4, center=True)
    want = virtually(case)
    got, _, _ = pool(2).run(in_processes, case)[0]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    first = virtually(FactorCase.still(case))["pca.weight"].numpy()
    least = _leading(_read(shifted) - _read(shifted).mean(0), 3)[1]
    assert _sine(want["pca.weight"].numpy(), least) < _sine(first, least)


def test_rows_are_centred_unless_a_spec_says_otherwise() -> None:
    for center, document in ((True, {}), (False, {"center": False})):
        model = {"kind": "pca", "components": 2, **document}
        data = {"kind": "arrays", "path": "x.npz"}
        parsed = spec.parse({"model": model, "data": data, "train": {"steps": 2}}, trusted=["data"])
        found = objective_of(parsed)
        assert isinstance(found, Components)
        assert found.center is center


@pytest.mark.long
@pytest.mark.skipif("POLYREME_DATA" not in os.environ, reason="POLYREME_DATA is not set")
def test_real_sparse_rows() -> None:
    path = Path(os.environ["POLYREME_DATA"]) / "libsvm" / "a9a.train.libsvm.gz"
    data = Svmlight(path=str(path), heldout=0, sparse=True)
    case = FactorCase.pca(data, k=4, sync=PSCOPE(), n=4, steps=40)
    x = data.open(None, 0).rows.dense().astype(float)
    (w,) = (tensor.numpy() for tensor in virtually(case).values())
    assert _sine(w, _leading(x, 4)[1]) < 1e-8
