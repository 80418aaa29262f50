"""Language-model samples out of one long sequence of tokens.

Axes: N samples, T tokens of a sample, L tokens that a sample is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, RunError, Violation
from . import bigram, files, fingerprint, objective, unigram
from .joined import Joined
from .objective import Reading

if TYPE_CHECKING:
    import torch

    from .text_options import Tokens


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How many tokens there are, and which of them stands for a masked one, if any does."""

    size: int
    mask: int | None = None


class TokenSource:
    """Sample i of T tokens: inputs tokens[iT : iT+T], labels as far ahead as is asked.

    `heldout` is None if nothing is to be held out. Raises ConfigError if a part has no sample.
    """

    metric = "heldout_loss"

    def __init__(
        self, train: Joined, heldout: Joined | None, *, vocab: Vocabulary, ask: Reading
    ) -> None:
        asked = heldout is not None
        heldout = Joined([]) if heldout is None else heldout
        self._train, self._heldout = train, heldout
        self._vocab, self._ask = vocab.size, ask
        self._mask = vocab.size if vocab.mask is None else vocab.mask
        self.n_train = max(0, len(train) - ask.ahead) // ask.seq_len
        self.n_heldout = max(0, len(heldout) - ask.ahead) // ask.seq_len
        short = [
            _too_short(name, len(tokens), ask)
            for name, tokens, n in (
                ("training", train, self.n_train),
                ("held-out", heldout, self.n_heldout or not asked),
            )
            if not n
        ]
        if short:
            raise ConfigError(short)
        is_masked = ask.objective == "masked"
        n_classes = vocab.size + (is_masked and vocab.mask is None)
        self.sample = objective.sample(ask.objective, ask.seq_len, n_classes)
        marks = (ask.seq_len, vocab.size, ask.objective, *((self._mask, ask.seed) * is_masked))
        self.fingerprint = fingerprint.of(*marks, *train.arrays, "held out", *heldout.arrays)
        self._baselines: dict[int, dict[str, float]] = {}

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Training samples by index; masks are drawn from (seed, epoch, index)."""
        return self._tensors(self._train, indices, self._ask.key(epoch))

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Held-out samples by index; their masks are always the same."""
        return self._tensors(self._heldout, indices, self._ask.key(None))

    def _tensors(self, tokens: Joined, indices: np.ndarray, key: int) -> dict[str, torch.Tensor]:
        import torch

        fields = self._read(tokens, np.asarray(indices), key)
        return {name: torch.from_numpy(np.ascontiguousarray(fields[name])) for name in fields}

    def _read(self, tokens: Joined, indices: np.ndarray, key: int) -> dict[str, np.ndarray]:
        ask = self._ask
        rows_NL = tokens.rows(indices * ask.seq_len, ask.seq_len + ask.ahead)
        if rows_NL.size and not 0 <= rows_NL.min() <= rows_NL.max() < self._vocab:
            raise RunError(
                f"a sample holds token {rows_NL.max()}, and the vocabulary has {self._vocab}"
            )
        if ask.objective == "masked":
            return objective.masked(rows_NL, indices, key, vocab=self._vocab, mask=self._mask)
        return objective.shifted(rows_NL, ask)

    def labels(self) -> np.ndarray:
        """Raises ConfigError: text has no classes."""
        rule, legal = "deals samples by their class, and text has none", '"iid", or none'
        raise ConfigError([Violation(path="data.partition", value=None, rule=rule, legal=legal)])

    def baselines(self, n_heldout: int | None = None) -> dict[str, float]:
        """``bigram_loss`` on the labels of the first `n_heldout` samples; counted once.

        Where tokens are masked it is ``unigram_loss``.
        """
        n = self.n_heldout if n_heldout is None else min(n_heldout, self.n_heldout)
        if not n:
            return {}
        if n not in self._baselines:
            self._baselines[n] = self._counted(n)
        return self._baselines[n]

    def _counted(self, n: int) -> dict[str, float]:
        ask, n_train = self._ask, self.n_train * self._ask.seq_len
        if ask.objective == "masked":
            return {"unigram_loss": unigram.loss(self._train, n_train, self._told(n), self._vocab)}
        # The token before the first label is the last that is read for it.
        train, heldout = (tokens.cut(ask.ahead - 1)[1] for tokens in (self._train, self._heldout))
        found = bigram.loss(train, n_train, heldout, n * ask.seq_len, self._vocab)
        return {"bigram_loss": found}

    def _told(self, n: int, chunk: int = 256) -> Iterator[np.ndarray]:
        """The masked tokens of the first `n` held-out samples."""
        for first in range(0, n, chunk):
            indices = np.arange(first, min(first + chunk, n))
            labels = self._read(self._heldout, indices, self._ask.key(None))["labels"]
            yield labels[labels >= 0]


def _too_short(name: str, n_tokens: int, ask: Reading) -> Violation:
    longest = ask.longest(n_tokens)
    return Violation(
        path="train.seq_len",
        value=ask.seq_len,
        rule=f"needs {ask.seq_len + ask.ahead} tokens, and the {name} part has {n_tokens}",
        legal=f"1 to {longest}" if longest > 0 else "none with so little text",
    )


def open_tokens(options: Tokens, ask: Reading) -> TokenSource:
    """Map the files; the tail is held out, or files of their own."""
    if found := options.check():
        raise ConfigError(found)
    train = Joined([_mapped(path, options) for path in files.find(options.path)])
    heldout: Joined | None = None
    if isinstance(options.heldout, str):
        heldout = Joined([_mapped(path, options) for path in files.find(options.heldout)])
    elif options.heldout:
        train, heldout = train.cut(round(len(train) * (1 - options.heldout)))
    vocab = Vocabulary(size=options.vocab, mask=options.mask)
    return TokenSource(train, heldout, vocab=vocab, ask=ask)


def _mapped(path: Path, options: Tokens) -> np.ndarray:
    if path.stat().st_size == options.header_bytes:  # nothing can be mapped
        return np.empty(0, dtype=options.dtype)
    return np.memmap(path, dtype=options.dtype, mode="r", offset=options.header_bytes)
