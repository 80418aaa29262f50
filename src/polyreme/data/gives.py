"""What data offer a model, as far as their options tell without reading them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..sample import Form


class Gives(msgspec.Struct, frozen=True, kw_only=True):
    """What samples are; None where that is known only when the data are read.

    `n_classes` is the vocabulary for text; an image is `n_channels` of `size` x `size` pixels.
    """

    form: Form | None
    n_classes: int | None = None
    n_channels: int | None = None
    size: int | None = None


def vocabulary(tokenizer: str) -> int | None:
    """Size of a vocabulary: 256 for "bytes"; a file's largest token + 1, None if it says none."""
    if tokenizer == "bytes":
        return 256
    try:
        document = msgspec.json.decode(Path(tokenizer).expanduser().read_bytes())
        model, added = document["model"]["vocab"], document.get("added_tokens") or ()
        largest = max(model.values()) if isinstance(model, dict) else len(model) - 1
        return int(max([largest, *(token["id"] for token in added)])) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
