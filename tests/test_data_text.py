"""Text and tokens: samples, what is held out, and the bigram loss."""

from __future__ import annotations

import gzip
import itertools
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from polyreme.data import bigram
from polyreme.data.joined import Joined
from polyreme.data.options import Dirichlet, PythonSource, Text, Tokens
from polyreme.errors import ConfigError, RunError


def _all(source: object) -> tuple[list[int], list[int]]:
    """Every training and held-out token, from the labels and the first input."""
    found = []
    for n, read in ((source.n_train, source.train), (source.n_heldout, source.heldout)):
        fields = read(np.arange(n))
        flat = fields["labels"].reshape(-1).tolist()
        found.append([int(fields["input_ids"][0, 0]), *flat] if n else [])
    return found[0], found[1]


def test_labels_are_the_next_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    source = Text(path=str(tmp_path / "a.txt"), heldout=0).open(9, 0)
    assert (source.n_train, source.n_heldout) == (11, 0)
    fields = source.train(np.array([0, 10, 3]))
    assert fields["input_ids"].tolist() == [list(range(f, f + 9)) for f in (0, 90, 27)]
    assert fields["labels"].tolist() == [list(range(f, f + 9)) for f in (1, 91, 28)]
    assert fields["labels"].dtype == fields["input_ids"].dtype == torch.int64
    assert source.baselines() == {}


def test_one_token_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcd")
    source = Text(path=str(tmp_path / "a.txt"), heldout=0).open(1, 0)
    assert source.n_train == 3
    assert source.train(np.array([2]))["labels"].tolist() == [[ord("d")]]


def test_no_indices_give_no_rows(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        np.arange(50, dtype=np.uint16).tofile(tmp_path / name)
    source = Tokens(path=str(tmp_path), vocab=50, heldout=0).open(4, 0)
    assert source.train(np.arange(0))["input_ids"].shape == (0, 4)


@pytest.mark.parametrize("content", [b"", b"a", b"\xef\xbb\xbf", b"abcd"])
def test_too_little_text_is_refused_with_its_length(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"train\.seq_len: 8 needs 9 tokens"):
        Text(path=str(tmp_path / "a.txt"), heldout=0).open(8, 0)


def test_a_held_out_part_without_a_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="the held-out part has 10"):
        Text(path=str(tmp_path / "a.txt"), heldout=0.1).open(10, 0)
    with pytest.raises(ConfigError, match="the held-out part has 0"):
        Text(path=str(tmp_path / "a.txt"), heldout=1e-6).open(10, 0)


def test_text_needs_a_sequence_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"train\.seq_len"):
        Text(path=str(tmp_path / "a.txt")).open(None, 0)


def test_the_tail_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    train, heldout = _all(Text(path=str(tmp_path / "a.txt"), heldout=0.25).open(1, 0))
    assert train == list(range(150))
    assert heldout == list(range(150, 200))


def test_whole_files_are_held_out_and_no_byte_is_in_both(tmp_path: Path) -> None:
    texts = {f"{letter}.txt": letter.encode() * 30 for letter in "abcdefghij"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"?" * 99)
    source = Text(path=str(tmp_path), heldout=0.3, separator="").open(1, 0)
    train, heldout = _all(source)
    assert sorted(bytes(train + heldout)) == sorted(b"".join(texts.values()))
    assert not set(train) & set(heldout)
    assert len(heldout) == 90
    again = Text(path=f"{tmp_path}/*.txt", heldout=0.3, separator="").open(1, 7)
    assert _all(again) == (train, heldout)
    assert again.fingerprint == source.fingerprint


def test_a_separator_stands_between_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"AA")
    (tmp_path / "b.txt").write_bytes(b"BB")
    source = Text(path=str(tmp_path), heldout=0, separator="|").open(1, 0)
    assert bytes(_all(source)[0]) == b"AA|BB"


def test_marks_line_ends_and_gzip(tmp_path: Path) -> None:
    text = "naïve\r\nline\n"
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    source = Text(path=str(tmp_path / "a.txt.gz"), heldout=0).open(1, 0)
    assert bytes(_all(source)[0]) == text.encode()


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(2000))[:-900])
    with pytest.raises(ConfigError, match=r"a\.txt\.gz"):
        Text(path=str(tmp_path / "a.txt.gz")).open(1, 0)


def test_held_out_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 10)
    (tmp_path / "b.txt").write_bytes(b"b" * 10)
    options = Text(path=str(tmp_path / "a.txt"), heldout=str(tmp_path / "b.txt"))
    assert [bytes(part) for part in _all(options.open(1, 0))] == [b"a" * 10, b"b" * 10]
    both = Text(path=str(tmp_path), heldout=str(tmp_path / "b.txt"))
    with pytest.raises(ConfigError, match=r"trains on too: b\.txt"):
        both.open(1, 0)


def _tokenizer(folder: Path) -> str:
    words = ["[UNK]", "the", "cat", "sat", "[CLS]"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_tokenizers_file_without_its_truncation_and_padding(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("the cat sat")
    (tmp_path / "2.txt").write_text("the dog")
    options = Text(
        path=f"{tmp_path}/*.txt", heldout=0, tokenizer=_tokenizer(tmp_path), separator="<|end|>"
    )
    source = options.open(1, 0)
    assert _all(source)[0] == [1, 2, 3, 5, 1, 0]
    assert source.sample.n_classes == 6


def test_bytes_that_are_no_text_are_refused_by_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"the \xff cat")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Text(path=f"{tmp_path}/1.txt", tokenizer=_tokenizer(tmp_path)).open(1, 0)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        Text(path=f"{tmp_path}/1.txt", tokenizer=f"{tmp_path}/bad.json").open(1, 0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_token_files_are_one_sequence_and_stay_on_disk(tmp_path: Path, dtype: str) -> None:
    whole = np.random.default_rng(0).integers(0, 300, 1000).astype(dtype)
    for number, piece in enumerate(np.split(whole, [0, 3, 500])):
        (tmp_path / f"{number}.bin").write_bytes(b"head" * 2 + piece.tobytes())
    options = Tokens(path=str(tmp_path), vocab=300, dtype=dtype, header_bytes=8, heldout=0.2)
    source = options.open(7, 0)
    assert all(isinstance(array, np.memmap) for array in source._train.arrays)
    assert source.n_train == 799 // 7
    train, heldout = _all(source)
    assert train == whole[:799].tolist()
    assert heldout == whole[800 : 800 + source.n_heldout * 7 + 1].tolist()


def test_a_token_beyond_the_vocabulary_stops_the_run(tmp_path: Path) -> None:
    np.array([1, 2, 9, 1], dtype=np.uint16).tofile(tmp_path / "a.bin")
    source = Tokens(path=str(tmp_path / "a.bin"), vocab=9, heldout=0).open(1, 0)
    source.train(np.array([0]))
    with pytest.raises(RunError, match="token 9"):
        source.train(np.array([1]))


def test_a_cut_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="3 bytes after the header"):
        Tokens(path=str(tmp_path / "a.bin"), vocab=9).open(1, 0)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="has 0"):
        Tokens(path=str(tmp_path / "a.bin"), vocab=9).open(1, 0)


def _naive(train: list[int], heldout: list[int], vocab: int) -> float:
    pairs = Counter(itertools.pairwise(train))
    heads = Counter(train[:-1])
    tails = Counter(train[1:])
    total = 0.0
    for head, tail in itertools.pairwise(heldout):
        if vocab <= 256:
            chance = (pairs[head, tail] + 1) / (heads[head] + vocab)
        else:
            unigram = (tails[tail] + 1) / (len(train) - 1 + vocab)
            chance = (pairs[head, tail] + 100 * unigram) / (heads[head] + 100)
        total -= math.log(chance)
    return total / (len(heldout) - 1)


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 70_000])
def test_the_bigram_loss_is_that_of_a_plain_count(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    train = (random.pareto(1.0, 3000).astype(np.int64) % vocab).tolist()
    heldout = (random.pareto(0.8, 700).astype(np.int64) % vocab).tolist()
    arrays = Joined([np.array(train[:1000]), np.array(train[1000:])]), Joined([np.array(heldout)])
    found = bigram.loss(arrays[0], 2999, arrays[1], 699, vocab)
    assert found == pytest.approx(_naive(train, heldout, vocab), rel=1e-12)


def test_chunks_of_the_count_lose_no_pair() -> None:
    tokens = Joined([np.arange(5), np.arange(5, 12)])
    whole = [
        (int(a), int(b)) for x, y in tokens.pairs(11, chunk=4) for a, b in zip(x, y, strict=True)
    ]
    assert whole == [(n, n + 1) for n in range(11)]


def test_the_bigram_loss_covers_exactly_the_evaluated_labels(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "a.txt").write_bytes(random.integers(97, 102, 1000).astype(np.uint8).tobytes())
    source = Text(path=str(tmp_path / "a.txt"), heldout=0.3).open(16, 0)
    train, heldout = _all(source)
    assert source.baselines()["bigram_loss"] == pytest.approx(_naive(train, heldout, 256))
    first = source.baselines(3)["bigram_loss"]
    assert first == pytest.approx(_naive(train, heldout[:49], 256))
    assert source.baselines(10**9) == source.baselines()


def test_text_has_no_classes_to_deal_by(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")
    options = Text(path=str(tmp_path / "a.txt"), partition=Dirichlet(alpha=1.0), heldout=0)
    assert [violation.path for violation in options.check()] == ["data.partition"]
    with pytest.raises(ConfigError, match="has none"):
        Text(path=str(tmp_path / "a.txt"), heldout=0).open(1, 0).labels()


def test_the_fingerprint_follows_the_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"

    def fingerprint(content: bytes, seq_len: int = 2) -> str:
        file.write_bytes(content)
        return Text(path=str(file), heldout=0).open(seq_len, 0).fingerprint

    first = fingerprint(b"abcdefgh")
    assert first == fingerprint(b"abcdefgh")
    assert len({first, fingerprint(b"abcdefgH"), fingerprint(b"abcdefgh", 3)}) == 3


def test_the_standard_library_without_tests_or_site_packages() -> None:
    source = PythonSource().open(256, 0)
    assert source.n_train * 256 > 4e6
    assert 0.02 < source.n_heldout / (source.n_train + source.n_heldout) <= 0.05
    assert 1.5 < source.baselines(100)["bigram_loss"] < 3.5
    text = bytes(source._train.arrays[0]) + bytes(source._heldout.arrays[0])
    assert b"class ArgumentParser(" in text  # argparse.py
    assert b"class Regrtest" not in text  # test/libregrtest
    assert source.fingerprint == PythonSource().open(256, 1).fingerprint


@pytest.mark.skipif("POLYREME_DATA" not in os.environ, reason="POLYREME_DATA is unset")
def test_tiny_shakespeare() -> None:
    path = Path(os.environ["POLYREME_DATA"], "text", "tinyshakespeare.txt")
    source = Text(path=str(path)).open(1, 0)
    assert source.n_train + source.n_heldout + 2 == 1_115_394
    assert 2.4 < source.baselines()["bigram_loss"] < 2.6
