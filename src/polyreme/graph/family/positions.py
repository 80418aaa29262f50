"""Learned positions end somewhere."""

from __future__ import annotations

from typing import Any

from ...errors import Violation
from ...sample import SampleSpec


def check_positions(config: Any, sample: SampleSpec) -> list[Violation]:
    """A sequence must not be longer than the model has positions."""
    n_tokens = sample.fields["input_ids"].shape[0]
    held = config.max_position_embeddings
    if n_tokens <= held:
        return []
    return [
        Violation(
            path="model.config.max_position_embeddings",
            value=held,
            rule=f"is less than the {n_tokens} tokens of a sample",
            legal=f">= {n_tokens}, or train.seq_len <= {held}",
        )
    ]
