"""svmlight text against scikit-learn's reader, bit by bit, and what is wrong with it by line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file, load_svmlight_files

from polyreme.data import svmlight_text
from polyreme.errors import ConfigError

DATA = os.environ.get("POLYREME_DATA")
FILES = sorted(Path(DATA, "libsvm").glob("*.gz")) if DATA else []


def _same(found: tuple, matrix: object, targets: np.ndarray) -> None:
    rows, labels = found
    assert (len(rows), rows.n_features) == matrix.shape
    assert (rows.indptr.dtype, rows.indices.dtype) == (np.int64, np.int32)
    assert rows.values.dtype == labels.dtype == np.float64
    np.testing.assert_array_equal(rows.indptr, matrix.indptr)
    np.testing.assert_array_equal(rows.indices, matrix.indices)
    np.testing.assert_array_equal(rows.values.view(np.int64), matrix.data.view(np.int64))
    np.testing.assert_array_equal(labels.view(np.int64), targets.view(np.int64))


def _refusal(path: Path, text: str | bytes, n_features: int | None = None) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        svmlight_text.read([path], n_features)
    (violation,) = caught.value.violations
    assert violation.path == "data.path"
    return violation.rule


@pytest.mark.skipif(DATA is None, reason="POLYREME_DATA is unset")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_real_file_is_read_as_scikit_learn_reads_it(path: Path) -> None:
    (found,) = svmlight_text.read([path])
    _same(found, *load_svmlight_file(str(path)))


_number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-1e3, 1e3).map(lambda x: f"{x:.6g}"),
    st.floats(-1e3, 1e3).map(lambda x: f"{x:.16g}"),
    st.floats(-1e3, 1e3).map(lambda x: f"{x:.12e}"),
    st.integers(-(10**25), 10**25).map(str),
    st.tuples(st.integers(0, 10**18), st.integers(-40, 40)).map(lambda m: f"{m[0]}e{m[1]}"),
    st.from_regex(r"[+-]?[0-9]{1,19}\.[0-9]{0,19}([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(["+1", "-0", "0.", ".5", "+.5E+05", "1e30", "1e-320", "1_0", "0e999"]),
)
_blank = st.sampled_from([" ", " ", " ", "  ", "\t", " \t ", "\r", "\x0b", "\x0c"])


@st.composite
def _line(draw: st.DrawFn) -> str:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(["", "  ", "# 3 4:x", "\t#"]))
    parts = [draw(st.sampled_from(["", " "])), draw(_number)]
    if draw(st.integers(0, 9)) == 0:
        parts += [draw(_blank), "qid:3"]
    for index in sorted(draw(st.sets(st.integers(0, 3000), max_size=6))):
        parts += [draw(_blank), f"{index}:{draw(_number)}"]
    return "".join([*parts, draw(st.sampled_from(["", "", " ", "\t\r", "# c:#d", " # nan"]))])


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(_line(), max_size=8),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    chunk=st.sampled_from([2, 7, 64, 2**18]),
    piece=st.sampled_from([1, 3, 2**23]),
)
@example(lines=[], end="\n", last=False, chunk=64, piece=1)
@example(lines=["1", "-1"], end="\n", last=False, chunk=64, piece=1)
@example(lines=["1 0:9007199254740993 5:9007199254740995"], end="\n", last=True, chunk=2, piece=1)
def test_any_text_is_read_as_scikit_learn_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    last: bool,
    chunk: int,
    piece: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.svm"
    text = end.join(lines) + end * last
    path.write_bytes(text.encode())
    expected = load_svmlight_file(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svmlight_text, "_CHUNK_BYTES", chunk)
        patch.setattr(svmlight_text, "_PIECE", piece)
        (found,) = svmlight_text.read([path])
    _same(found, *expected)


def test_every_decimal_is_the_nearest_number(tmp_path: Path) -> None:
    random = np.random.default_rng(24)
    doubles = np.exp(random.uniform(-60, 60, 30_000)) * random.choice([-1, 1], 30_000)
    tokens = [f"{x:.{n}g}" for x, n in zip(doubles, random.integers(1, 19, 30_000), strict=True)]
    tokens += [
        f"{m}e{-e}"
        for m, e in zip(
            random.integers(2**53, 10**18, 30_000), random.integers(0, 23, 30_000), strict=True
        )
    ]
    # Halfway between two numbers, and one digit to each side.
    for bits in random.integers(2**52, 2**53, 5_000).tolist():
        for shift in (1, 2, 3, 4):
            half = (2 * bits + 1) * 5**shift  # (bits + 1/2) 2^(1 - shift), times 10^shift / 2
            tokens += [f"{half + d}e-{shift}" for d in (-1, 0, 1) if half + d < 10**18]
    expected = np.array([float(token) for token in tokens])
    path = tmp_path / "decimals.svm"
    path.write_text("\n".join(f"{token} 1:{token}" for token in tokens))
    ((rows, labels),) = svmlight_text.read([path])
    np.testing.assert_array_equal(rows.values.view(np.int64), expected.view(np.int64))
    np.testing.assert_array_equal(labels.view(np.int64), expected.view(np.int64))


def test_files_have_one_width_and_one_first_index(tmp_path: Path) -> None:
    one, zero, none = (tmp_path / name for name in ("one", "zero", "none"))
    one.write_text("1 1:1 4:2")
    zero.write_text("2 0:3\n2 2:4\n")
    none.write_text("3\n-3\n")
    found = svmlight_text.read([one], None, [zero])
    expected = load_svmlight_files([str(one), str(zero)])
    _same(found[0], *expected[:2])
    _same(found[1], *expected[2:])
    (rows, _), (other, labels) = svmlight_text.read([one, none])
    assert (rows.n_features, other.n_features) == (4, 4)
    assert rows.indices.tolist() == [0, 3]
    assert (labels.tolist(), other.n_stored) == ([3, -3], 0)
    assert svmlight_text.read([one], 9)[0][0].n_features == 9
    assert svmlight_text.read([one], 4)[0][0].n_features == 4


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_file_has_no_rows(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.gz" if packed else "a.svm")
    path.write_bytes(gzip.compress(b"") if packed else b"")
    ((rows, labels),) = svmlight_text.read([path])
    assert (len(rows), len(labels), rows.n_features, rows.indptr.tolist()) == (0, 0, 1, [0])


def test_a_line_longer_than_many_chunks(tmp_path: Path) -> None:
    indices = np.arange(1, 300_000)
    text = "1 " + " ".join(f"{i}:{i % 7}.25" for i in indices) + "\n-1 5:1 # end\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    ((rows, labels),) = svmlight_text.read([tmp_path / "a.gz"])
    assert labels.tolist() == [1, -1]
    np.testing.assert_array_equal(rows.values, [*(indices % 7 + 0.25), 1])
    np.testing.assert_array_equal(rows.indices, [*(indices - 1), 4])


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("1 2:x", 'value of index 2, "x" is not a number'),
        ("1 2:3:4", 'value of index 2, "3:4" is not a number'),
        ("1 2:1.5e", 'value of index 2, "1.5e" is not a number'),
        ("1 2:--1", 'value of index 2, "--1" is not a number'),
        ("1 2:0x1p3", 'value of index 2, "0x1p3" is not a number'),
        ("1 2:\xe4", 'value of index 2, "\\\\xc3\\\\xa4" is not a number'),
        ("1 2:NaN", 'value of index 2, "NaN" is NaN'),
        ("1 2:-inf 3:x", 'value of index 2, "-inf" is infinite'),
        ("1 2:1e999 1:1", 'value of index 2, "1e999" is infinite'),
        ("1 2: 3:4", "index 2 has no value"),
        ("1 2:#4", "index 2 has no value"),
        ("1 x:1", 'index "x" is not a whole number'),
        ("1 1.5:1", 'index "1.5" is not a whole number'),
        ("1 1e2:1", 'index "1e2" is not a whole number'),
        ("1 :1", 'index "" is not a whole number'),
        ("1 -3:1", "index -3 is negative"),
        ("1 3", '"3" is not index:value'),
        ("1 qid", '"qid" is not index:value'),
        ("1 2:1 qid:3", 'index "qid" is not a whole number'),
        ("1 1:1 5:1 4:1", "index 4 is out of order: it follows 5"),
        ("1 1:1 5:1 5:1", "index 5 is repeated in its row"),
        ("1 2147483648:1", "index 2147483648 is beyond 2147483647"),
        ("1 99999999999999999999999:1", "index 99999999999999999999999 is beyond 2147483647"),
        ("1:2 3:4", 'has no label before "1:2"'),
        ("qid:2 3:4", 'has no label before "qid:2"'),
        ("1,2 3:4", 'has several labels, "1,2", and only one is read'),
        ("x 3:4", 'label "x" is not a number'),
        ("nan 3:4", 'label "nan" is NaN'),
        ("inf", 'label "inf" is infinite'),
    ],
)
@pytest.mark.parametrize("chunk", [4, 2**18])
def test_what_is_wrong_is_said_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, rule: str, chunk: int
) -> None:
    monkeypatch.setattr(svmlight_text, "_CHUNK_BYTES", chunk)
    path = tmp_path / "x.svm"
    said = _refusal(path, f"# head\n1 1:1\n\n-1 1:1 2:1#\n{line} # c\n1 y:z\n")
    assert said == f"{path}, line 5: {rule}"


def test_the_first_of_two_faults_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.svm"
    assert "line 1: value of index 1" in _refusal(path, "1 1:nan\n1 x:1\n")
    assert "line 1: index" in _refusal(path, "1 x:1\n1 1:nan\n")


@pytest.mark.parametrize(
    ("text", "line", "index"),
    [("1 1:1\n1 2:1 6:1\n", 2, 6), ("1 1:1\n1 5:1\n1 0:1\n", 2, 5), ("#\n1\n1 0:1 5:1", 3, 5)],
)
def test_an_index_beyond_the_width_is_found_whatever_they_begin_at(
    tmp_path: Path, text: str, line: int, index: int
) -> None:
    path = tmp_path / "x.svm"
    said = _refusal(path, text, 5)
    assert said.startswith(f"{path}, line {line}: index {index} is beyond data.n_features = 5")


def test_a_fault_of_a_held_out_file_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1 1:1\n")
    (tmp_path / "b").write_text("1 1:1\n1 5:1\n")
    for n_features, text in ((2, "1 1:1\n1 5:1\n"), (None, "1 1:1\n1 1:x\n"), (2, "1\n1 0:1 2:1")):
        (tmp_path / "b").write_text(text)
        with pytest.raises(ConfigError) as caught:
            svmlight_text.read([tmp_path / "a"], n_features, [tmp_path / "b"])
        (violation,) = caught.value.violations
        assert violation.path == "data.heldout"
        assert f"{tmp_path / 'b'}, line 2: " in violation.rule


def test_a_damaged_gz_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"1 1:1\n" * 100_000)
    for text in (whole[:-50], b"no gz", whole[:40] + b"\0\0\0" + whole[43:]):
        assert "cannot be read" in _refusal(tmp_path / "a.gz", text)


def test_where_a_third_class_comes(tmp_path: Path) -> None:
    for name, text in (("a", "1 1:1\n\n1\n-1 # x\n"), ("b", "# c\n+1\n7 1:1\n")):
        (tmp_path / name).write_text(text)
    paths = [tmp_path / "a", tmp_path / "b"]
    assert svmlight_text.third_class(paths) == f"{tmp_path / 'b'}, line 3"
    assert svmlight_text.third_class(paths[:1]) is None
