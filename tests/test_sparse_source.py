"""Sparse samples: svmlight files, folders of rows, rows that are generated; labels as signs."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_svmlight_file

from polyreme.data import csr, generated
from polyreme.data.options import Csr, Generated, Svmlight
from polyreme.data.rows import Rows
from polyreme.data.signed import named, signed
from polyreme.errors import ConfigError

DATA = os.environ.get("POLYREME_DATA")


def _matrix(n: int, d: int, density: float = 0.2) -> sparse.csr_matrix:
    return sparse.random(n, d, density, "csr", random_state=np.random.default_rng(24))


def _svm(path: Path, matrix: object, targets: object) -> str:
    dump_svmlight_file(matrix, targets, str(path), zero_based=False)
    return str(path)


def _dense(batch: dict[str, torch.Tensor], n_features: int) -> torch.Tensor:
    n = len(batch["labels"])
    return torch.zeros(n, n_features, dtype=batch["values"].dtype).scatter_add_(
        1, batch["indices"], batch["values"]
    )


def _refused(options: object) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as caught:
        options.open(None, 0)
    (violation,) = caught.value.violations
    return violation.path, violation.rule, violation.legal


@pytest.mark.parametrize("heldout", [0, 0.25, "files"])
def test_sparse_and_dense_samples_are_the_same(tmp_path: Path, heldout: float | str) -> None:
    matrix, y = _matrix(80, 30), np.arange(80) % 3 % 2 * 5 + 2
    path = _svm(tmp_path / "a.svm", matrix, y)
    if heldout == "files":
        heldout = _svm(tmp_path / "b.svm", _matrix(20, 40), np.full(20, 7))
    options = Svmlight(path=path, heldout=heldout, n_features=40)
    dense = options.open(None, 0)
    source = msgspec.structs.replace(options, sparse=True).open(None, 0)
    assert (source.n_train, source.n_heldout) == (dense.n_train, dense.n_heldout)
    assert source.metric == dense.metric == "test_accuracy"
    assert source.baselines() == dense.baselines()
    assert source.baselines(3) == dense.baselines(3)
    np.testing.assert_array_equal(source.labels(), dense.labels())
    for read, expected, rows, n in (
        (source.train, dense.train, source.rows, source.n_train),
        (source.heldout, dense.heldout, source.heldout_rows, source.n_heldout),
    ):
        which = np.random.default_rng(24).permutation(n)[: n // 2]
        batch, other = read(which), expected(which)
        assert torch.equal(_dense(batch, 40).float(), other["features"])
        assert batch["labels"].tolist() == (2 * other["labels"] - 1).tolist()
        assert (batch["values"].dtype, batch["indices"].dtype, batch["labels"].dtype) == (
            torch.float64,
            torch.int64,
            torch.float64,
        )
        assert batch["indices"].shape == (len(which), source.sample.stored)
        np.testing.assert_array_equal(rows.take(which).dense(), _dense(batch, 40))
        labels = source.predicted if read == source.train else source.heldout_predicted
        np.testing.assert_array_equal(labels[which], batch["labels"])
    assert source.sample.fields["features"].shape == (40,)
    assert source.sample.stored == max(source.rows.longest, source.heldout_rows.longest)
    assert set(source.targets.tolist()) == {2.0, 7.0}


def test_rows_without_numbers_can_be_read_in_batches(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1\n-1\n1\n")
    source = Svmlight(path=str(tmp_path / "a.svm"), heldout=0, sparse=True).open(None, 0)
    batch = source.train(np.array([2, 1]))
    assert (batch["indices"].tolist(), batch["values"].tolist()) == ([[0], [0]], [[0], [0]])
    assert batch["labels"].tolist() == [1, -1]
    assert source.train(np.arange(0))["values"].shape == (0, 1)
    assert source.baselines() == {}


def test_several_files_are_one_after_another(tmp_path: Path) -> None:
    matrices = [_matrix(n, 9) for n in (4, 1, 7)]
    for at, matrix in enumerate(matrices):
        _svm(tmp_path / f"{at}.svm", matrix, np.arange(matrix.shape[0]) % 2)
    options = Svmlight(path=str(tmp_path), heldout=0, n_features=9, sparse=True)
    source = options.open(None, 0)
    expected = sparse.vstack(matrices).toarray()
    np.testing.assert_allclose(source.rows.dense(), expected, rtol=1e-14)
    assert source.targets.tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0]


def test_three_classes_want_a_positive_one(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_text("# 9\n1 1:1\n2 1:1\n\n1 2:1\n3 1:1\n2 1:3\n3 1:2\n")
    options = Svmlight(path=str(path), heldout=0, sparse=True)
    source = options.open(None, 0)
    assert (source.metric, source.sample.n_classes) == ("heldout_loss", 3)
    assert source.train(np.arange(6))["labels"].tolist() == [1, 2, 1, 3, 2, 3]
    assert source.labels().tolist() == [0, 1, 0, 2, 1, 2]
    with pytest.raises(ConfigError, match=r"3 classes: 1, 2, 3 \(the third first at .*line 6\)"):
        source.signs()
    one = msgspec.structs.replace(options, positive=2.0).open(None, 0)
    assert one.train(np.arange(6))["labels"].tolist() == [-1, 1, -1, -1, 1, -1]
    assert one.labels().tolist() == [0, 1, 0, 0, 1, 0]
    assert one.targets.tolist() == [1, 2, 1, 3, 2, 3]
    assert one.fingerprint != source.fingerprint
    dense = msgspec.structs.replace(options, positive=2.0, sparse=False).open(None, 0)
    assert dense.labels().tolist() == [0, 1, 0, 0, 1, 0]
    for wrong in (True, False):
        other = msgspec.structs.replace(options, positive=4.0, sparse=wrong)
        assert _refused(other) == ("data.positive", "is the label of no sample", "1, 2, 3")


def test_a_class_that_is_held_out_alone_is_still_a_class(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("0 1:1\n1 1:1\n")
    (tmp_path / "b.svm").write_text("0 1:1\n")
    options = Svmlight(
        path=f"{tmp_path}/a.svm", heldout=f"{tmp_path}/b.svm", sparse=True, positive=1.0
    )
    train, heldout = options.open(None, 0).signs()
    assert (train.tolist(), heldout.tolist()) == ([-1, 1], [-1])


def test_numbers_to_predict_are_held_out_by_a_plain_share(tmp_path: Path) -> None:
    y = np.random.default_rng(24).normal(size=100)
    path = _svm(tmp_path / "a.svm", _matrix(100, 5), y)
    source = Svmlight(path=path, heldout=0.2, sparse=True).open(None, 0)
    assert (source.n_train, source.n_heldout, source.metric) == (80, 20, "heldout_loss")
    both = [*source.targets, *source.heldout_targets]
    np.testing.assert_allclose(sorted(both), sorted(y), rtol=1e-12)
    again = Svmlight(path=path, heldout=0.2, sparse=True).open(None, 9)
    np.testing.assert_array_equal(source.heldout_targets, again.heldout_targets)
    assert source.baselines() == {}
    with pytest.raises(ConfigError, match=r"data\.partition"):
        source.labels()
    with pytest.raises(ConfigError, match=r"100 classes: .* and 95 more"):
        source.signs()


@pytest.mark.parametrize("classes", [[-1, 1], [0, 1], [1, 2], [-3.5, 7]])
def test_the_larger_of_two_labels_is_1(classes: list[float]) -> None:
    targets = np.array(classes, float)[[0, 1, 1, 0]]
    assert signed(targets).tolist() == [-1, 1, 1, -1]
    assert signed(targets, classes[0]).tolist() == [1, -1, -1, 1]
    assert signed(targets[:1], classes=np.array(classes, float)).tolist() == [-1]
    assert signed(targets[:0]).tolist() == []


@pytest.mark.parametrize("positive", [None, 4.0])
def test_labels_of_one_class_are_refused(positive: float | None) -> None:
    with pytest.raises(ConfigError, match="one class alone: 4"):
        signed(np.full(3, 4.0), positive)


def test_few_of_many_classes_are_named() -> None:
    assert named(np.array([0.5, 1, 1e20])) == "0.5, 1, 100000000000000000000"
    assert named(np.arange(5.0)) == "0, 1, 2, 3, 4"
    with pytest.raises(ConfigError, match=r"7 classes: 0, 1, 2, 3, 4 and 2 more\."):
        signed(np.arange(7.0))


def test_real_labels_of_breast_cancer(tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    path = _svm(tmp_path / "a.svm", x, y)
    source = Svmlight(path=path, heldout=0, sparse=True).open(None, 0)
    expected, targets = load_svmlight_file(path)
    np.testing.assert_array_equal(source.rows.dense(), expected.toarray())
    np.testing.assert_array_equal(source.signs()[0], 2 * targets - 1)


def _written(folder: Path, n: int = 50, dtype: type = np.float64) -> tuple[Rows, np.ndarray]:
    rows, y = Rows.of(_matrix(n, 12).astype(dtype)), np.arange(n) % 2 * 2.0 - 1
    csr.write(folder, rows, y)
    return rows, y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_folder_of_rows_is_mapped_and_its_last_rows_held_out(tmp_path: Path, dtype: type) -> None:
    rows, y = _written(tmp_path / "rows", dtype=dtype)
    source = Csr(path=str(tmp_path / "rows"), heldout=0.1, sparse=True).open(None, 0)
    assert (source.n_train, source.n_heldout) == (45, 5)
    for mapped in (source.rows.values, source.rows.indices):
        while not isinstance(mapped, np.memmap):
            mapped = mapped.base
            assert mapped is not None
    assert source.rows.values.dtype == dtype
    np.testing.assert_array_equal(source.rows.dense(), rows.dense()[:45])
    np.testing.assert_array_equal(source.heldout_rows.dense(), rows.dense()[45:])
    np.testing.assert_array_equal(source.heldout_targets, y[45:])
    which = np.array([7, 3, 44])
    batch = source.train(which)
    np.testing.assert_array_equal(_dense(batch, 12), rows.dense()[which])
    assert batch["labels"].tolist() == y[which].tolist()
    dense = Csr(path=str(tmp_path / "rows")).open(None, 0)
    assert (dense.n_train, dense.n_heldout) == (50, 0)
    np.testing.assert_array_equal(
        dense.train(which)["features"], rows.dense()[which].astype(np.float32)
    )


def test_a_folder_of_rows_changes_its_name_with_its_contents(tmp_path: Path) -> None:
    rows, y = _written(tmp_path / "rows")
    options = Csr(path=str(tmp_path / "rows"), sparse=True)
    names = {options.open(None, 0).fingerprint}
    names.add(msgspec.structs.replace(options, heldout=0.5).open(None, 0).fingerprint)
    names.add(msgspec.structs.replace(options, positive=-1.0).open(None, 0).fingerprint)
    csr.write(tmp_path / "rows", rows, -y)
    names.add(options.open(None, 0).fingerprint)
    assert len(names) == 4


def _swapped(indptr: np.ndarray) -> np.ndarray:
    """The second row that has numbers ends before it begins."""
    i = int(np.flatnonzero(np.diff(indptr) > 0)[1])
    return np.r_[indptr[:i], indptr[i + 1], indptr[i], indptr[i + 2 :]]


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("labels", np.zeros(49), "50 rows but 49 labels"),
        ("labels", np.zeros((50, 1)), "labels holds float64 of shape"),
        ("labels", np.array(["a"] * 50), "labels holds <U1"),
        ("labels", np.array([np.nan] * 50), "labels holds NaN"),
        ("labels", np.array([{}] * 50), "cannot be read"),
        ("n_features", np.int64(3), "indices reach from"),
        ("indices", lambda own: own - 1, "indices reach from -1"),
        ("indices", lambda own: own.astype(np.int64), "indices holds int64"),
        ("indices", lambda own: own[1:], "does not fit"),
        ("values", lambda own: own[1:], "does not fit"),
        ("values", lambda own: own.astype(complex), "values holds complex128"),
        ("indptr", lambda own: own + 1, "does not fit"),
        ("indptr", lambda own: _swapped(own), "does not fit"),
        ("indptr", lambda own: own.astype(np.int32), "indptr holds int32"),
    ],
)
def test_a_folder_that_holds_no_rows_is_refused(
    tmp_path: Path, name: str, array: object, why: str
) -> None:
    rows, _ = _written(tmp_path)
    own = array(getattr(rows, name)) if callable(array) else array
    np.save(tmp_path / f"{name}.npy", own)
    path, rule, _ = _refused(Csr(path=str(tmp_path), sparse=True))
    assert path == "data.path"
    assert why in rule


def test_a_folder_that_lacks_a_file_is_seen_before_it_is_read(tmp_path: Path) -> None:
    _written(tmp_path / "rows")
    assert Csr(path=str(tmp_path / "rows")).check() == []
    (tmp_path / "other").mkdir()
    (found,) = Csr(path=str(tmp_path / "other")).check()
    assert str(tmp_path / "rows") in found.legal
    (tmp_path / "rows" / "labels.npy").unlink()
    (found,) = Csr(path=str(tmp_path / "rows")).check()
    assert "labels.npy" in found.rule


def test_a_share_that_holds_out_no_row_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, n=4)
    path, rule, _ = _refused(Csr(path=str(tmp_path), heldout=0.1))
    assert (path, rule) == ("data.heldout", "holds out none of 4 rows")


@pytest.mark.parametrize(
    ("features", "per_row"), [(1, 1), (5, 5), (6, 5), (64, 3), (1000, 30), (2**31 - 1, 40)]
)
def test_generated_rows_are_rows(features: int, per_row: int) -> None:
    seed = int(np.random.default_rng(24).integers(2**40))
    options = Generated(rows=400, features=features, per_row=per_row, seed=seed)
    if features < 10**6:
        rows, targets, w = generated.drawn(options)
        assert (len(w), set(targets.tolist())) == (features, {-1.0, 1.0})
        indices, values = rows.indices, rows.values
    else:
        indices, values = np.empty((400, per_row), np.int32), np.empty((400, per_row))
        generated._fill(np.uint64(seed), features, indices, values)
    indices = indices.reshape(400, per_row)
    assert (np.diff(indices) > 0).all()
    assert 0 <= indices.min() <= indices.max() < features
    np.testing.assert_allclose(np.linalg.norm(values.reshape(400, per_row), axis=1), 1)


def test_generated_rows_are_told_apart_by_their_seed_alone() -> None:
    options = Generated(rows=300, features=50, per_row=5, sparse=True)
    one, same = options.open(None, 0), options.open(None, 1)
    other = msgspec.structs.replace(options, seed=1).open(None, 0)
    np.testing.assert_array_equal(one.rows.values, same.rows.values)
    np.testing.assert_array_equal(one.targets, same.targets)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert not np.array_equal(one.rows.indices, other.rows.indices)
    # More rows do not change those before them.
    more = msgspec.structs.replace(options, rows=600, heldout=0.5).open(None, 0)
    np.testing.assert_array_equal(more.rows.values[: 270 * 5], one.rows.values)


def test_generated_features_come_by_a_power_law() -> None:
    rows, _, _ = generated.drawn(Generated(rows=20_000, features=2**14 - 1, per_row=1, seed=3))
    counts = np.bincount(rows.indices, minlength=2**14 - 1)
    octaves = [counts[2**k - 1 : 2 ** (k + 1) - 1].sum() for k in range(14)]
    expected = 20_000 / 14
    assert np.abs(np.array(octaves) - expected).max() < 6 * np.sqrt(expected)


def test_generated_labels_are_of_the_logistic_model() -> None:
    options = Generated(rows=60_000, features=300, per_row=10, noise=0.7, seed=5)
    rows, targets, w = generated.drawn(options)
    z = rows.scipy() @ w
    chance = 1 / (1 + np.exp(-z / (0.7 * np.sqrt(np.mean(z**2)))))
    for low in np.arange(0, 1, 0.1):
        bin_ = (chance >= low) & (chance < low + 0.1)
        n, expected = bin_.sum(), chance[bin_].sum()
        assert n > 100
        found = (targets[bin_] > 0).sum()
        assert abs(found - expected) < 5 * np.sqrt(n) / 2
    clear, signs, w = generated.drawn(msgspec.structs.replace(options, noise=0.0))
    assert (signs * (clear.scipy() @ w) >= 0).all()


def test_generated_samples_can_be_dense() -> None:
    options = Generated(rows=100, features=20, per_row=5)
    dense = options.open(None, 0)
    source = msgspec.structs.replace(options, sparse=True).open(None, 0)
    np.testing.assert_allclose(dense.train(np.arange(90))["features"], source.rows.dense(), 1e-6)
    assert dense.labels().tolist() == source.labels().tolist()
    path, rule, legal = _refused(Generated(features=4, per_row=5))
    assert (path, legal) == ("data.per_row", "1 to 4")
    assert "data.features = 4" in rule


@pytest.mark.skipif(DATA is None, reason="POLYREME_DATA is unset")
def test_a9a_and_three_classes_sparse() -> None:
    folder = Path(DATA, "libsvm")
    names = [f"{folder}/a9a.{part}.libsvm.gz" for part in ("train", "test")]
    source = Svmlight(path=names[0], heldout=names[1], sparse=True).open(None, 0)
    assert (source.n_train, source.n_heldout, source.sample.stored) == (32561, 16281, 14)
    assert source.baselines()["majority_accuracy"] == pytest.approx(0.7638, abs=1e-4)
    with np.load(folder / "a9a.npz") as packed:
        for part, rows in (("train", source.rows), ("test", source.heldout_rows)):
            np.testing.assert_array_equal(rows.indptr, packed[f"{part}_indptr"])
            np.testing.assert_array_equal(rows.indices, packed[f"{part}_indices"])
            np.testing.assert_array_equal(rows.values, packed[f"{part}_data"])
    three = f"{folder}/dna_3class.train.libsvm.gz"
    with pytest.raises(ConfigError, match=r"3 classes: 1, 2, 3 \(the third first at .*line \d+\)"):
        Svmlight(path=three, heldout=0, sparse=True).open(None, 0).signs()
    one = Svmlight(path=three, sparse=True, positive=3.0).open(None, 0)
    assert set(one.signs()[0].tolist()) == {-1.0, 1.0}
