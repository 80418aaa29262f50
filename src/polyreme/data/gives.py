"""What data offer a model, as far as their options tell without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..sample import Form, Objective

_MASKS = ("[MASK]", "<mask>")


class Gives(msgspec.Struct, frozen=True, kw_only=True):
    """What samples are; None where that is known only when the data are read.

    `n_classes` is the vocabulary for text, `n_masked` the same with a mask token. `objective` is
    None where text is read as the model wants it. An image is `n_channels` of `size` x `size`
    pixels.
    """

    form: Form | None
    objective: Objective | None = None
    n_classes: int | None = None
    n_masked: int | None = None
    n_channels: int | None = None
    size: int | None = None

    def classes_for(self, objective: Objective) -> int | None:
        """How many classes a label or an input can be of, when text is read for `objective`."""
        return self.n_masked if objective == "masked" else self.n_classes


def text(tokenizer: str, objective: Objective | None) -> Gives:
    """What text is through a tokenizer: "bytes", or a file, which may not say what it holds."""
    if tokenizer == "bytes":
        return Gives(form="text", objective=objective, n_classes=256, n_masked=257)
    try:
        document = msgspec.json.decode(Path(tokenizer).expanduser().read_bytes())
        model, added = document["model"]["vocab"], document.get("added_tokens") or ()
        listed = not isinstance(model, dict)
        tokens = {each[0]: at for at, each in enumerate(model)} if listed else dict(model)
        tokens |= {token["content"]: token["id"] for token in added}
        vocab = int(max(tokens.values())) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Gives(form="text", objective=objective)
    n_masked = vocab + (mask_of(tokens) is None)
    return Gives(form="text", objective=objective, n_classes=vocab, n_masked=n_masked)


def mask_of(tokens: Mapping[str, int]) -> int | None:
    """A vocabulary's own mask token, by the names that BERT and RoBERTa gave it."""
    return next((tokens[name] for name in _MASKS if name in tokens), None)
