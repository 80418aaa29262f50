"""What one training sample looks like: stated by a data set, read by a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Form = Literal["text", "images", "features", "texts with classes", "ratings"]
Objective = Literal["next", "masked", "continuation"]


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape of one sample (no batch dimension) and dtype name (``float32``, ``int64``).

    The dtype ``compute`` follows the run's precision.
    """

    shape: tuple[int, ...]
    dtype: str = "compute"


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a sample by name, and how many classes a label can take.

    Fields: ``input_ids`` [T] int64, ``decoder_input_ids``, ``pixel_values`` [C, H, W] float32,
    ``features`` [D] float32, ``labels`` (scalar or [T]) int64, already shifted for language
    models; -100 carries no loss. `n_classes` is the vocabulary for text.

    Where samples are sparse, `stored` is K, the numbers of the longest row: in the place of
    ``features`` come ``indices`` [K] int64 and ``values`` [K], and ``labels`` is float64.
    Ratings have ``users`` and ``items``, scalar int64, of which there are so many as `numbered`
    says; their ``labels`` are float64.
    """

    fields: Mapping[str, TensorSpec]
    n_classes: int
    stored: int | None = None
    numbered: Mapping[str, int] = {}
