"""Samples with a class: digits, arrays, image folders, svmlight files, datasets folders."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split

from polyreme.data import shuffle, split
from polyreme.data.augment import augmented, drawn
from polyreme.data.options import Arrays, Augment, Datasets, Digits, Images, Svmlight, Text
from polyreme.errors import ConfigError, RunError


def _pixels(source: object) -> torch.Tensor:
    return source.train(np.arange(source.n_train))["pixel_values"]


def test_digits_are_split_as_scikit_learn_does() -> None:
    source = Digits().open(None, 5)
    assert (source.n_train, source.n_heldout) == (1437, 360)
    target = load_digits().target
    _, heldout = train_test_split(np.arange(1797), test_size=0.2, stratify=target, random_state=0)
    labels = source.heldout(np.arange(360))["labels"]
    assert labels.tolist() == target[np.sort(heldout)].tolist()
    assert source.fingerprint == Digits().open(None, 6).fingerprint


@pytest.mark.parametrize("channels", [1, 3])
def test_digits_are_32_by_32_between_minus_1_and_1(channels: int) -> None:
    images = _pixels(Digits(channels=channels).open(None, 0))
    assert images.shape == (1437, channels, 32, 32)
    assert (images.min(), images.max()) == (-1, 1)
    # Averaging each 4 x 4 block undoes the scaling up to a blur.
    small = torch.nn.functional.avg_pool2d(images[:, :1], 4).flatten(1)
    raw = load_digits().images / 8 - 1
    likeness = np.corrcoef(small.numpy().mean(0), raw.reshape(1797, 64).mean(0))[0, 1]
    assert likeness > 0.95


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    options = Digits(augment=Augment(shift=3, flip=True))
    source, plain = options.open(None, 1), Digits().open(None, 1)
    several = source.train(np.array([5, 9, 700]), 2)["pixel_values"]
    assert torch.equal(source.train(np.array([9]), 2)["pixel_values"][0], several[1])
    many = np.arange(50)
    assert not torch.equal(
        source.train(many, 2)["pixel_values"], source.train(many, 3)["pixel_values"]
    )
    other = options.open(None, 2)
    assert not torch.equal(
        source.train(many, 2)["pixel_values"], other.train(many, 2)["pixel_values"]
    )
    assert torch.equal(source.heldout(many)["pixel_values"], plain.heldout(many)["pixel_values"])


def test_shifts_reach_every_place_and_no_further() -> None:
    images = np.zeros((2000, 1, 9, 9), dtype=np.float32)
    images[:, 0, 4, 4] = 1
    moved = augmented(images, np.arange(2000), 0, 0, Augment(shift=2))
    places = {tuple(place) for place in np.argwhere(moved[:, 0])[:, 1:]}
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}


def test_half_of_the_images_are_mirrored_and_edges_repeat() -> None:
    images = np.tile(np.arange(4, dtype=np.float32), (1000, 1, 2, 1))
    flipped = augmented(images, np.arange(1000), 0, 0, Augment(flip=True))
    mirrored = (flipped == images[..., ::-1]).all(axis=(1, 2, 3))
    assert ((flipped == images).all(axis=(1, 2, 3)) ^ mirrored).all()
    assert 400 < mirrored.sum() < 600
    shifted = augmented(images, np.arange(1000), 0, 0, Augment(shift=1))
    rows = {tuple(row) for row in shifted[:, 0, 0].astype(int)}
    assert rows == {(0, 1, 2, 3), (0, 0, 1, 2), (1, 2, 3, 3)}


def _by_index(images: np.ndarray, down: int, right: int) -> np.ndarray:
    """[N, C, H, W] with edges repeated, each pixel looked up where it came from."""
    rows = np.clip(np.arange(images.shape[2]) - down, 0, images.shape[2] - 1)
    columns = np.clip(np.arange(images.shape[3]) - right, 0, images.shape[3] - 1)
    return images[:, :, rows][:, :, :, columns]


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 2, 3), (2, 1, 1)])
@pytest.mark.parametrize("shift", [0, 1, 9])
def test_changed_images_have_the_very_numbers_of_plain_ones(shape: tuple, shift: int) -> None:
    draw = np.random.default_rng()
    images = draw.normal(size=(150, *shape)).astype(np.float32)
    images[0, 0, 0, 0] = np.nan
    changed = augmented(images, np.arange(150), 3, 4, Augment(shift=shift, flip=True))
    assert changed.dtype == np.float32
    span = range(-shift, shift + 1)
    possible = [_by_index(images, down, right) for down in span for right in span]
    for at, image in enumerate(changed):
        assert any(
            image.tobytes() in (each[at].tobytes(), each[at, ..., ::-1].tobytes())
            for each in possible
        )


def test_changes_are_drawn_from_seed_epoch_and_index_for_ever() -> None:
    """An order of draws that differs would change every run that is resumed."""
    which, options = np.array([0, 1, 700, 2**40]), Augment(shift=3, flip=True)
    moves = drawn(which, 2, 9, options)
    words = shuffle.mix(which.astype(np.uint64) ^ np.uint64(shuffle.key(9, 2)))
    assert moves.down.tolist() == [int(word) % 7 - 3 for word in words]
    words = shuffle.mix(words)
    assert moves.right.tolist() == [int(word) % 7 - 3 for word in words]
    assert moves.mirrored.tolist() == [int(word) % 2 == 1 for word in shuffle.mix(words)]
    assert not drawn(which, 2, 9, Augment(shift=3)).mirrored.any()


def test_each_byte_of_an_image_is_scaled_to_the_bit(tmp_path: Path) -> None:
    draw = np.random.default_rng()
    bytes_NHWC = draw.permutation(256).astype(np.uint8).repeat(2 * 6).reshape(32, 8, 6, 2)
    path = _npz(tmp_path, x_train=bytes_NHWC, y_train=np.arange(32) % 2)
    expected = bytes_NHWC.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255) * 2 - 1
    source = Arrays(path=path, heldout=0).open(None, 0)
    some = np.array([31, 0, 7, 7])
    assert np.array_equal(source.train(some)["pixel_values"].numpy(), expected[some])
    first = Arrays(path=path, heldout=0, channels_first=True).open(None, 0)
    plain = bytes_NHWC.astype(np.float32) / np.float32(255) * 2 - 1
    assert np.array_equal(_pixels(first).numpy(), plain)
    assert source.train(np.arange(0))["pixel_values"].shape == (0, 2, 8, 6)
    with pytest.raises(IndexError):
        source.train(np.array([0, 32]))


def test_images_changed_in_several_parts_are_those_changed_at_once(tmp_path: Path) -> None:
    draw = np.random.default_rng()
    images = draw.integers(0, 256, (300, 3, 4, 3), dtype=np.uint8)
    path, options = _npz(tmp_path, x_train=images, y_train=np.arange(300) % 2), Augment(shift=2)
    source = Arrays(path=path, heldout=0, augment=options).open(None, 5)
    plain = Arrays(path=path, heldout=0).open(None, 5)
    which = draw.permutation(300)
    whole = augmented(plain.train(which)["pixel_values"].numpy(), which, 2, 5, options)
    assert np.array_equal(source.train(which, 2)["pixel_values"].numpy(), whole)


@pytest.mark.parametrize(
    "given",
    [[-1.0, 1.0, 1.0], [1, 3, 2], ["b", "a", "c"], [[0], [2], [1]], [True, False, True], [5, 5, 5]],
)
def test_labels_become_0_1_in_their_order(given: list) -> None:
    (found,), n_classes = split.numbered(np.array(given))
    flat = np.array(given).reshape(-1).tolist()
    assert found.tolist() == [sorted(set(flat)).index(label) for label in flat]
    assert n_classes == len(set(flat))


@pytest.mark.parametrize("given", [[0.5, 1.0], [float("nan"), 1.0], [[1, 0], [0, 1]]])
def test_labels_that_are_no_classes_are_refused(given: list) -> None:
    with pytest.raises(ConfigError, match="no classes"):
        split.numbered(np.array(given))


def test_a_stratified_share_has_each_class_in_proportion() -> None:
    labels = np.array([0] * 100 + [1] * 50 + [2] * 10)
    train, heldout = split.stratified(labels, 0.2)
    assert np.bincount(labels[heldout]).tolist() == [20, 10, 2]
    assert sorted([*train, *heldout]) == list(range(160))
    assert len(split.stratified(labels, 0)[1]) == 0
    with pytest.raises(ConfigError, match="holds out nothing"):
        split.stratified(np.arange(10), 0.1)


def _npz(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def test_arrays_of_each_shape(tmp_path: Path) -> None:
    y = np.arange(20) % 2
    bytes_NHWC = np.random.default_rng(0).integers(0, 256, (20, 4, 5, 3)).astype(np.uint8)
    path = _npz(tmp_path, x_train=bytes_NHWC, y_train=y)
    source = Arrays(path=path, heldout=0).open(None, 0)
    assert source.sample.fields["pixel_values"].shape == (3, 4, 5)
    expected = bytes_NHWC.transpose(0, 3, 1, 2) / 127.5 - 1
    np.testing.assert_allclose(_pixels(source), expected, atol=1e-6)
    flat = Arrays(path=path, heldout=0, flatten=True).open(None, 0)
    features = flat.train(np.arange(20))["features"]
    np.testing.assert_allclose(features, bytes_NHWC.reshape(20, 60) / 255, atol=1e-6)
    path = _npz(tmp_path, x_train=np.ones((20, 4, 5)) * 7, y_train=y)
    assert _pixels(Arrays(path=path, heldout=0).open(None, 0)).shape == (20, 1, 4, 5)
    path = _npz(tmp_path, x_train=np.ones((20, 3, 4, 5)) * 7, y_train=y)
    source = Arrays(path=path, heldout=0, channels_first=True).open(None, 0)
    assert source.sample.fields["pixel_values"].shape == (3, 4, 5)
    assert (_pixels(source) == 7).all()


def test_arrays_of_other_names_with_their_own_test_part(tmp_path: Path) -> None:
    path = _npz(
        tmp_path,
        a=np.zeros((4, 2)),
        b=np.array([1, 2, 1, 2]),
        c=np.ones((3, 2)),
        d=np.array([1, 3, 3]),
    )
    options = Arrays(path=path, x_train="a", y_train="b", x_test="c", y_test="d")
    source = options.open(None, 0)
    assert (source.n_train, source.n_heldout, source.sample.n_classes) == (4, 3, 3)
    assert source.heldout(np.arange(3))["labels"].tolist() == [0, 2, 2]
    assert source.baselines() == {"majority_accuracy": pytest.approx(1 / 3)}
    assert source.baselines(1) == {"majority_accuracy": 1.0}
    wrong = Arrays(path=path, x_train="a", y_train="b", x_test="e")
    assert [(v.path, v.value) for v in wrong.check()] == [
        ("data.x_test", "e"),
        ("data.y_test", "y_test"),
    ]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": np.zeros((4, 2)), "y_train": np.zeros(3)}, "4 in x_train but 3 in y_train"),
        ({"x_train": np.zeros(4), "y_train": np.zeros(4)}, "shape"),
        ({"x_train": np.zeros((0, 2)), "y_train": np.zeros(0)}, "no training sample"),
        ({"x_train": np.array([{}] * 4), "y_train": np.zeros(4)}, "cannot be read"),
        (
            {
                "x_train": np.zeros((4, 2)),
                "y_train": np.zeros(4),
                "x_test": np.zeros((4, 3)),
                "y_test": np.zeros(4),
            },
            "samples of",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arrays(path=_npz(tmp_path, **arrays), heldout=0).open(None, 0)


def test_a_file_that_is_no_npz(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    for path in ("a.npz", "missing.npz"):
        assert [v.path for v in Arrays(path=str(tmp_path / path)).check()] == ["data.path"]


def _images(folder: Path) -> Path:
    for label, colour in (("cat", 255), ("dog", 0)):
        (folder / label).mkdir(parents=True)
        Image.new("RGB", (40, 20), (colour, 0, 0)).save(folder / label / "wide.png")
        Image.new("L", (10, 30), colour).save(folder / label / "grey.jpg")
        Image.new("RGBA", (8, 8), (colour, 0, 0, 9)).save(folder / label / "clear.png")
        Image.new("P", (9, 9), 0).save(folder / label / "palette.gif")
    (folder / "cat" / "notes.txt").write_text("no image")
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_size_and_mode(tmp_path: Path, channels: int) -> None:
    options = Images(path=str(_images(tmp_path / "x")), size=16, channels=channels, heldout=0.25)
    source = options.open(None, 0)
    assert (source.n_train, source.n_heldout, source.sample.n_classes) == (6, 2, 2)
    assert source.labels().tolist() == [0, 0, 0, 1, 1, 1]
    images = _pixels(source)
    assert images.shape == (6, channels, 16, 16)
    assert images.dtype == torch.float32
    assert images.min() == -1
    assert 0 < images.max() <= 1
    assert source.heldout(np.arange(0))["pixel_values"].shape == (0, channels, 16, 16)


def test_the_middle_of_an_image_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x" / "a").mkdir(parents=True)
    picture = np.zeros((10, 30), dtype=np.uint8)
    picture[:, 10:20] = 255
    Image.fromarray(picture).save(tmp_path / "x" / "a" / "bars.png")
    source = Images(path=str(tmp_path / "x"), size=10, channels=1, heldout=0).open(None, 0)
    assert (_pixels(source)[0, 0, :, 1:-1] == 1).all()


def test_image_folders_that_are_wrong(tmp_path: Path) -> None:
    folder = _images(tmp_path / "x")
    (tmp_path / "y" / "cow").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cow.*no class"):
        Images(path=str(folder), heldout=str(tmp_path / "y")).open(None, 0)
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no image"):
        Images(path=str(folder)).open(None, 0)
    assert [v.path for v in Images(path=str(folder / "cat")).check()] == ["data.path"]


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    folder = _images(tmp_path / "x")
    (folder / "cat" / "wide.png").write_bytes(b"broken")
    source = Images(path=str(folder), heldout=0).open(None, 0)
    with pytest.raises(RunError, match=r"wide\.png"):
        _pixels(source)


@pytest.mark.parametrize("zero_based", [True, False])
def test_svmlight_gives_the_numbers_that_were_written(tmp_path: Path, zero_based: bool) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    dump_svmlight_file(x, 2 * y - 1, str(tmp_path / "a.txt"), zero_based=zero_based)
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    source = Svmlight(path=str(packed), heldout=0).open(None, 0)
    fields = source.train(np.arange(source.n_train))
    np.testing.assert_allclose(fields["features"], x, rtol=1e-6)
    assert fields["labels"].tolist() == y.tolist()
    assert fields["features"].dtype == torch.float32


def test_svmlight_test_files_have_the_width_of_all(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1 1:0.5 # a comment\n\n3 2:1\n")
    (tmp_path / "test.txt").write_text("2 5:1\n")
    options = Svmlight(path=f"{tmp_path}/train.txt", heldout=f"{tmp_path}/test.txt")
    source = options.open(None, 0)
    assert source.train(np.arange(2))["features"].tolist() == [[0.5, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert source.heldout(np.arange(1))["labels"].tolist() == [1]
    narrow = Svmlight(path=f"{tmp_path}/train.txt", heldout=f"{tmp_path}/test.txt", n_features=2)
    with pytest.raises(ConfigError, match="n_features"):
        narrow.open(None, 0)


@pytest.mark.parametrize("content", ["", "1 x:y\n", "0.5 1:1\n1 1:1\n"])
def test_svmlight_files_that_are_wrong(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ConfigError):
        Svmlight(path=str(tmp_path / "a.txt"), heldout=0).open(None, 0)


def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "x": [[float(n), 1.0] for n in range(10)],
        "y": [n % 2 for n in range(10)],
        "words": [f"row {n}." for n in range(10)],
        "picture": [Image.new("RGB", (5, 9), (25 * n, 0, 0)) for n in range(10)],
    }
    whole = datasets.Dataset.from_dict(rows)
    halves = whole.train_test_split(0.3, shuffle=False)
    halves.save_to_disk(str(tmp_path / "d"))
    path = str(tmp_path / "d")
    options = Datasets(path=path, columns={"features": "x", "labels": "y"}, heldout="test")
    source = options.open(None, 0)
    assert (source.n_train, source.n_heldout) == (7, 3)
    fields = source.heldout(np.array([2, 0]))
    assert fields["features"].tolist() == [[9.0, 1.0], [7.0, 1.0]]
    assert fields["labels"].tolist() == [1, 1]
    options = Datasets(
        path=path, columns={"pixel_values": "picture", "labels": "y"}, size=4, heldout=0.3
    )
    assert _pixels(options.open(None, 0)).shape[1:] == (3, 4, 4)
    options = Datasets(path=path, text="words", heldout="test", separator="|")
    assert options.needs_seq_len
    source = options.open(1, 0)
    assert source.n_train == len("|".join(rows["words"][:7])) - 1
    (tmp_path / "a.txt").write_text("|".join(rows["words"][:7]))
    same = Text(path=str(tmp_path / "a.txt"), heldout=0).open(1, 0)
    everything = np.arange(source.n_train)
    assert torch.equal(source.train(everything)["labels"], same.train(everything)["labels"])
    for wrong, message in (
        ({"text": "nothing"}, "x, y, words, picture"),
        ({"text": "words", "split": "dev"}, "train, test"),
        ({"columns": {"labels": "y"}}, "does not give"),
    ):
        with pytest.raises(ConfigError, match=message):
            Datasets(path=path, **wrong).open(1, 0)
    assert [v.path for v in Datasets(path=str(tmp_path)).check()] == ["data.path", "data.text"]


DATA = os.environ.get("POLYREME_DATA")


@pytest.mark.skipif(DATA is None, reason="POLYREME_DATA is unset")
def test_a9a_and_three_classes() -> None:
    folder = Path(DATA, "libsvm")
    options = Svmlight(path=f"{folder}/a9a.train.libsvm.gz", heldout=f"{folder}/a9a.test.libsvm.gz")
    source = options.open(None, 0)
    assert (source.n_train, source.n_heldout) == (32561, 16281)
    assert source.sample.fields["features"].shape == (123,)
    # 76.4 % of the test rows are negative.
    assert source.baselines()["majority_accuracy"] == pytest.approx(0.7638, abs=1e-4)
    with np.load(folder / "a9a.npz") as packed:
        start, stop = packed["train_indptr"][40:42]
        expected = np.zeros(123, dtype=np.float32)
        expected[packed["train_indices"][start:stop]] = packed["train_data"][start:stop]
    assert source.train(np.array([40]))["features"][0].tolist() == expected.tolist()
    three = Svmlight(path=f"{folder}/dna_3class.train.libsvm.gz", heldout=0).open(None, 0)
    assert np.unique(three.labels()).tolist() == [0, 1, 2]


@pytest.mark.skipif(DATA is None, reason="POLYREME_DATA is unset")
def test_mnist() -> None:
    source = Arrays(path=f"{DATA}/mnist/mnist.npz").open(None, 0)
    assert (source.n_train, source.n_heldout, source.sample.n_classes) == (60000, 10000, 10)
    fields = source.train(np.array([0]))
    assert fields["pixel_values"].shape == (1, 1, 28, 28)
    assert fields["labels"].tolist() == [5]
