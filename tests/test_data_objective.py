"""What text is read for: masked tokens and continuations, up to models that learn them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from polyreme.algo.rule import AdamW
from polyreme.data import bigram, objective
from polyreme.data.joined import Joined
from polyreme.data.options import Text, Tokens
from polyreme.data.source import Source
from polyreme.errors import ConfigError
from polyreme.graph.options import Transformers
from test_runtime import _train
from tiny import Case

MASK = 256
BERT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def _text(folder: Path, content: bytes) -> str:
    (folder / "a.txt").write_bytes(content)
    return str(folder / "a.txt")


def _letters(folder: Path, n: int) -> str:
    random = np.random.default_rng(0)
    return _text(folder, (97 + random.pareto(1.0, n).astype(np.int64) % 5).astype(np.uint8))


def _masked(path: str, seq_len: int, seed: int = 0, heldout: float = 0) -> Source:
    return Text(path=path, heldout=heldout, objective="masked").open(seq_len, seed)


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_decoder_writes_on_from_where_the_encoder_stopped(tmp_path: Path) -> None:
    path = _text(tmp_path, bytes(range(100)))
    source = Text(path=path, heldout=0, objective="continuation").open(9, 0)
    assert source.n_train == 10  # 91 tokens come after the first nine
    fields = source.train(np.array([0, 9]))
    assert set(fields) == set(source.sample.fields)
    assert fields["input_ids"].tolist() == [list(range(f, f + 9)) for f in (0, 81)]
    assert fields["labels"].tolist() == [list(range(f, f + 9)) for f in (9, 90)]
    assert fields["decoder_input_ids"].tolist() == [[0, *range(f, f + 8)] for f in (9, 90)]
    assert {field.dtype for field in fields.values()} == {torch.int64}


def test_the_decoder_reads_what_transformers_shifts() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    # The start is that of every T5 that was published; the library has no default.
    config = T5Config(vocab_size=64, decoder_start_token_id=0, **T5)
    model = T5ForConditionalGeneration(config)
    labels = torch.tensor([[5, 6, 7]])
    ask = objective.reading("continuation", 3, 0)
    found = objective.shifted(np.array([[1, 2, 3, 5, 6, 7]]), ask)["decoder_input_ids"]
    assert found.tolist() == model.prepare_decoder_input_ids_from_labels(labels).tolist()


@pytest.mark.parametrize(
    ("asked", "content", "longest"),
    [("masked", b"", 0), ("masked", b"abcd", 4), ("continuation", b"abcde", 2)],
)
def test_too_little_text_is_refused_with_what_would_do(
    tmp_path: Path, asked: Any, content: bytes, longest: int
) -> None:
    options = Text(path=_text(tmp_path, content), heldout=0, objective=asked)
    with pytest.raises(ConfigError) as caught:
        options.open(longest + 1, 0)
    (violation,) = caught.value.violations
    if longest:
        assert violation.legal == f"1 to {longest}"
        assert options.open(longest, 0).n_train == 1


@pytest.mark.parametrize("asked", ["masked", "continuation"])
def test_no_indices_give_no_rows(tmp_path: Path, asked: Any) -> None:
    source = Text(path=_letters(tmp_path, 99), heldout=0, objective=asked).open(4, 0)
    assert {field.shape for field in source.train(np.arange(0)).values()} == {(0, 4)}


@pytest.mark.parametrize(("seq_len", "n_told"), [(1, 1), (2, 1), (9, 1), (10, 2), (64, 10)])
def test_only_what_is_told_is_hidden(tmp_path: Path, seq_len: int, n_told: int) -> None:
    path = _letters(tmp_path, 640)
    source = _masked(path, seq_len)
    assert source.n_train == 640 // seq_len
    fields = source.train(np.arange(source.n_train))
    tokens = torch.tensor(list(Path(path).read_bytes()))[: source.n_train * seq_len]
    labels, inputs = fields["labels"].reshape(-1), fields["input_ids"].reshape(-1)
    told = labels != -100
    assert set((fields["labels"] != -100).sum(1).tolist()) == {n_told}
    assert torch.equal(labels[told], tokens[told])
    assert torch.equal(inputs[~told], tokens[~told])
    assert source.sample.n_classes == 257


def test_the_chosen_are_masked_replaced_and_kept_in_the_paper_s_shares() -> None:
    n, n_tokens, vocab = 2000, 100, 50
    tokens = np.full((n, n_tokens), 49)
    fields = objective.masked(tokens, np.arange(n), 7, vocab=vocab, mask=vocab)
    told = fields["labels"] >= 0
    shown = Counter(fields["input_ids"][told].tolist())
    n_told = n * 15
    assert sum(shown.values()) == n_told

    def near(found: int, share: float) -> bool:
        return abs(found - share * n_told) < 5 * math.sqrt(n_told * share * (1 - share))

    assert near(shown[vocab], 0.8)
    assert near(shown[49], 0.1 + 0.1 / vocab)
    for token in range(49):
        assert near(shown[token], 0.1 / vocab)
    places = told.sum(axis=0)  # every position is as likely as every other
    assert np.abs(places - 0.15 * n).max() < 5 * math.sqrt(n * 0.15 * 0.85)


def test_masks_follow_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    path = _letters(tmp_path, 4000)
    source, few = _masked(path, 32), np.array([7, 3])
    first = source.train(np.arange(20), 1)
    assert _equal(source.train(few, 1), {name: field[few] for name, field in first.items()})
    assert _equal(_masked(path, 32).train(few, 1), source.train(few, 1))
    assert not _equal(source.train(few, 2), source.train(few, 1))
    assert not _equal(_masked(path, 32, seed=1).train(few, 1), source.train(few, 1))
    told = [tuple(row.nonzero()[:, 0].tolist()) for row in first["labels"] != -100]
    assert len(set(told)) == len(told)


def test_held_out_masks_are_the_same_in_every_run(tmp_path: Path) -> None:
    path = _letters(tmp_path, 1000)
    a, b = (_masked(path, 32, seed, heldout=0.5) for seed in (0, 1))
    assert _equal(a.heldout(np.arange(9)), b.heldout(np.arange(9)))
    assert a.baselines() == b.baselines()
    assert a.fingerprint != b.fingerprint  # the training masks differ


def test_a_tokenizer_s_own_mask_is_used(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "[MASK]": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = _text(tmp_path, b"a b " * 500)
    options = Text(path=path, tokenizer=f"{tmp_path}/tokenizer.json", heldout=0, objective="masked")
    source = options.open(20, 0)
    assert source.sample.n_classes == options.gives.n_masked == 4
    assert 2 in source.train(np.arange(5))["input_ids"]


def test_the_mask_of_token_files_is_the_one_named(tmp_path: Path) -> None:
    np.full(400, 5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    options = Tokens(path=str(tmp_path), vocab=9, mask=3, heldout=0, objective="masked")
    source = options.open(100, 0)
    inputs = source.train(np.arange(4))["input_ids"]
    assert (inputs == 3).sum() > 30
    assert source.sample.n_classes == 9
    other = Tokens(path=str(tmp_path), vocab=9, mask=9, heldout=0)
    assert [violation.path for violation in other.check()] == ["data.mask"]


def test_the_unigram_loss_is_that_of_a_plain_count(tmp_path: Path) -> None:
    path = _letters(tmp_path, 20_000)
    source = _masked(path, 16, heldout=0.4)
    text = Path(path).read_bytes()
    known, n = Counter(text[: source.n_train * 16]), source.n_train * 16
    labels = source.heldout(np.arange(source.n_heldout))["labels"]

    def mean(rows: torch.Tensor) -> float:
        told = rows[rows >= 0].tolist()
        return -sum(math.log((known[token] + 1) / (n + 256)) for token in told) / len(told)

    assert source.n_heldout > 256  # more than are counted at a time
    assert source.baselines() == {"unigram_loss": pytest.approx(mean(labels), rel=1e-12)}
    assert source.baselines(3) == {"unigram_loss": pytest.approx(mean(labels[:3]), rel=1e-12)}


def test_the_bigram_loss_of_a_continuation_is_on_its_labels(tmp_path: Path) -> None:
    path = _letters(tmp_path, 1000)
    source = Text(path=path, heldout=0.3, objective="continuation").open(16, 0)
    parts = []
    for n, read in ((source.n_train, source.train), (source.n_heldout, source.heldout)):
        fields = read(np.arange(n))
        labels = fields["labels"].reshape(-1)
        # The token before the first label is the encoder's last.
        parts.append(torch.cat([fields["input_ids"][0, -1:], labels]).numpy())
    known, asked = (Joined([part]) for part in parts)
    expected = bigram.loss(known, len(known) - 1, asked, len(asked) - 1, 256)
    assert source.baselines() == {"bigram_loss": pytest.approx(expected, rel=1e-12)}


def test_objectives_do_not_share_a_fingerprint(tmp_path: Path) -> None:
    path = _letters(tmp_path, 200)
    found = {
        Text(path=path, heldout=0, objective=asked).open(4, 0).fingerprint
        for asked in ("next", "masked", "continuation")
    }
    assert len(found) == 3
    assert Text(path=path, heldout=0).open(4, 0).fingerprint in found


@dataclass(frozen=True)
class Learner:
    """A model and the text that it learns from; sent to the processes in place of the graph."""

    kind: str
    path: str

    def source(self) -> Source:
        asked: Any = "masked" if self.kind == "bert" else "continuation"
        options = Tokens(path=self.path, vocab=9, heldout=0.2, objective=asked)
        return options.open(16, 0)

    def graph(self):
        config = BERT if self.kind == "bert" else T5
        return Transformers(model_type=self.kind, config=config).graph(self.source().sample)


@dataclass(frozen=True)
class TextCase(Case):
    def job(self):
        return replace(super().job(), source=self.model.source())


@pytest.mark.parametrize("layout", [{"replica": 2}, {"shard": 2, "level": "params"}], ids=str)
@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.long
def test_models_learn_what_their_text_is_read_for(pool, tmp_path, kind, layout):
    # Each token but every fourth follows from its neighbours.
    cycle = np.arange(4000) % 8
    cycle[::4] = np.random.default_rng(0).integers(0, 9, 1000)
    cycle.astype(np.uint16).tofile(tmp_path / "a.bin")
    case = TextCase(
        model=Learner(kind=kind, path=str(tmp_path)),
        plan=layout | {"precision": "fp32"},
        rule=AdamW(lr=0.02),
        steps=60,
        global_batch=16,
    )
    _, steps, metrics, skipped = pool(2).run(_train, case)[0]
    assert skipped == 0
    baseline = metrics["unigram_loss" if kind == "bert" else "bigram_loss"]
    assert math.log(9) * 0.8 < steps[0].loss
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert metrics["heldout_loss"] < baseline
