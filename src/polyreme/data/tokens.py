"""Language-model samples out of one long sequence of tokens.

Axes: N samples, T tokens of a sample, L = T + 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, RunError, Violation
from ..sample import SampleSpec, TensorSpec
from . import bigram, files, fingerprint
from .joined import Joined

if TYPE_CHECKING:
    import torch

    from .text_options import Tokens


class TokenSource:
    """Sample i of T tokens: inputs tokens[iT : iT+T], labels tokens[iT+1 : iT+T+1].

    `heldout` is None if nothing is to be held out. Raises ConfigError if a part has no sample.
    """

    metric = "heldout_loss"

    def __init__(
        self, train: Joined, heldout: Joined | None, *, seq_len: int | None, vocab: int
    ) -> None:
        if seq_len is None:
            rule, legal = "must be given for text", "tokens per sample, such as 256"
            raise ConfigError([Violation(path="train.seq_len", value=None, rule=rule, legal=legal)])
        asked = heldout is not None
        heldout = Joined([]) if heldout is None else heldout
        self._train, self._heldout = train, heldout
        self._seq_len, self._vocab = seq_len, vocab
        self.n_train = max(0, len(train) - 1) // seq_len
        self.n_heldout = max(0, len(heldout) - 1) // seq_len
        short = [
            _too_short(name, len(tokens), seq_len)
            for name, tokens, n in (
                ("training", train, self.n_train),
                ("held-out", heldout, self.n_heldout or not asked),
            )
            if not n
        ]
        if short:
            raise ConfigError(short)
        field = TensorSpec((seq_len,), "int64")
        self.sample = SampleSpec(fields={"input_ids": field, "labels": field}, n_classes=vocab)
        self.fingerprint = fingerprint.of(
            seq_len, vocab, *train.arrays, "held out", *heldout.arrays
        )
        self._bigram_loss: dict[int, float] = {}

    def train(self, indices: np.ndarray, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Training samples by index."""
        return self._read(self._train, indices)

    def heldout(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Held-out samples by index."""
        return self._read(self._heldout, indices)

    def _read(self, tokens: Joined, indices: np.ndarray) -> dict[str, torch.Tensor]:
        import torch

        rows_NL = tokens.rows(np.asarray(indices) * self._seq_len, self._seq_len + 1)
        if rows_NL.size and not 0 <= rows_NL.min() <= rows_NL.max() < self._vocab:
            raise RunError(
                f"a sample holds token {rows_NL.max()}, and the vocabulary has {self._vocab}"
            )
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows_NL[:, :-1])),
            "labels": torch.from_numpy(np.ascontiguousarray(rows_NL[:, 1:])),
        }

    def labels(self) -> np.ndarray:
        """Raises ConfigError: text has no classes."""
        rule, legal = "deals samples by their class, and text has none", '"iid", or none'
        raise ConfigError([Violation(path="data.partition", value=None, rule=rule, legal=legal)])

    def baselines(self, n_heldout: int | None = None) -> dict[str, float]:
        """``bigram_loss`` on the labels of the first `n_heldout` samples; counted once."""
        n = self.n_heldout if n_heldout is None else min(n_heldout, self.n_heldout)
        if not n:
            return {}
        if n not in self._bigram_loss:
            n_train, n_asked = self.n_train * self._seq_len, n * self._seq_len
            self._bigram_loss[n] = bigram.loss(
                self._train, n_train, self._heldout, n_asked, self._vocab
            )
        return {"bigram_loss": self._bigram_loss[n]}


def _too_short(name: str, n_tokens: int, seq_len: int) -> Violation:
    return Violation(
        path="train.seq_len",
        value=seq_len,
        rule=f"needs {seq_len + 1} tokens, and the {name} part has {n_tokens}",
        legal=f"1 to {n_tokens - 1}" if n_tokens > 1 else "none with so little text",
    )


def open_tokens(options: Tokens, seq_len: int | None) -> TokenSource:
    """Map the files; the tail is held out, or files of their own."""
    if found := options.check():
        raise ConfigError(found)
    train = Joined([_mapped(path, options) for path in files.find(options.path)])
    heldout: Joined | None = None
    if isinstance(options.heldout, str):
        heldout = Joined([_mapped(path, options) for path in files.find(options.heldout)])
    elif options.heldout:
        train, heldout = train.cut(round(len(train) * (1 - options.heldout)))
    return TokenSource(train, heldout, seq_len=seq_len, vocab=options.vocab)


def _mapped(path: Path, options: Tokens) -> np.ndarray:
    if path.stat().st_size == options.header_bytes:  # nothing can be mapped
        return np.empty(0, dtype=options.dtype)
    return np.memmap(path, dtype=options.dtype, mode="r", offset=options.header_bytes)
