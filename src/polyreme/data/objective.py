"""What a model is to learn from text: how a row of tokens becomes inputs and labels.

Axes: N samples, T tokens of a sample, L tokens that a sample is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, Violation
from ..sample import Objective, SampleSpec, TensorSpec
from . import shuffle
from .shuffle import Words

START_TOKEN = 0  # T5's own: what its decoder reads before its first token
_NO_LOSS = -100
_CHOSEN, _MASKED, _REPLACED = 0.15, 0.8, 0.1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_HELD_OUT = shuffle.key(0)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How text is read: in samples of `seq_len` tokens; what is random is drawn from `seed`."""

    objective: Objective
    seq_len: int
    seed: int

    @property
    def ahead(self) -> int:
        """How many tokens the labels lie ahead of the inputs."""
        return {"next": 1, "masked": 0, "continuation": self.seq_len}[self.objective]

    def key(self, epoch: int | None) -> int:
        """What the masks of an epoch are drawn from; those of held-out samples (None) are fixed."""
        return _HELD_OUT if epoch is None else shuffle.key(self.seed, epoch)

    def longest(self, n_tokens: int) -> int:
        """The largest `seq_len` with which so many tokens make a sample."""
        return {"next": n_tokens - 1, "masked": n_tokens, "continuation": n_tokens // 2}[
            self.objective
        ]


def reading(objective: Objective | None, seq_len: int | None, seed: int) -> Reading:
    """How text is read. Raises ConfigError where the length of samples is left open."""
    if seq_len is None:
        rule, legal = "must be given for text", "256 (or any number of tokens per sample)"
        raise ConfigError([Violation(path="train.seq_len", value=None, rule=rule, legal=legal)])
    return Reading(objective=objective or "next", seq_len=seq_len, seed=seed)


def sample(objective: Objective, seq_len: int, n_classes: int) -> SampleSpec:
    """What a sample of text looks like."""
    decoder = ["decoder_input_ids"] if objective == "continuation" else []
    field = TensorSpec((seq_len,), "int64")
    fields = dict.fromkeys(["input_ids", *decoder, "labels"], field)
    return SampleSpec(fields=fields, n_classes=n_classes)


def shifted(rows_NL: np.ndarray, ask: Reading) -> dict[str, np.ndarray]:
    """Inputs and labels of rows whose labels lie ahead: of ``next`` and ``continuation``."""
    labels_NT = rows_NL[:, ask.ahead :]
    fields = {"input_ids": rows_NL[:, : ask.seq_len], "labels": labels_NT}
    if ask.objective == "continuation":
        start_N1 = np.full((len(labels_NT), 1), START_TOKEN)
        fields["decoder_input_ids"] = np.concatenate([start_N1, labels_NT[:, :-1]], axis=1)
    return fields


def masked(
    tokens_NT: np.ndarray, indices: np.ndarray, key: int, *, vocab: int, mask: int
) -> dict[str, np.ndarray]:
    """Rows with 15 % of the positions (at least one) to be told; the others carry no loss.

    Of the chosen, 80 % show `mask`, 10 % a token drawn from `vocab`, 10 % what they are: a
    function of (key, index, position). Source: Devlin et al. 2019, section 3.1 and appendix A.1.
    Differs: exactly 15 % of a sample (rounded), so that samples weigh alike.
    """
    n_tokens = tokens_NT.shape[1]
    n_chosen = max(1, round(_CHOSEN * n_tokens))
    words_NT = _words(indices, n_tokens, key)
    # Within a row no two words are equal, so which are the smallest is never a tie.
    chosen_NC = np.argpartition(words_NT, n_chosen - 1, axis=1)[:, :n_chosen]
    told_NC = np.take_along_axis(tokens_NT, chosen_NC, axis=1)
    words_NC = shuffle.mix(np.take_along_axis(words_NT, chosen_NC, axis=1) + _STEP)
    share_NC = words_NC / 2.0**64
    drawn_NC = (shuffle.mix(words_NC + _STEP) % np.uint64(vocab)).astype(np.int64)
    shown_NC = np.where(share_NC < _MASKED + _REPLACED, drawn_NC, told_NC)
    shown_NC = np.where(share_NC < _MASKED, mask, shown_NC)
    inputs_NT, labels_NT = tokens_NT.copy(), np.full_like(tokens_NT, _NO_LOSS)
    np.put_along_axis(inputs_NT, chosen_NC, shown_NC, axis=1)
    np.put_along_axis(labels_NT, chosen_NC, told_NC, axis=1)
    return {"input_ids": inputs_NT, "labels": labels_NT}


def _words(indices: np.ndarray, n_tokens: int, key: int) -> Words:
    """A random word [N, T] for each position of each sample."""
    words_N1 = shuffle.mix(indices.astype(np.uint64) ^ np.uint64(key))[:, None]
    return shuffle.mix(words_N1 + np.arange(n_tokens, dtype=np.uint64) * _STEP)
