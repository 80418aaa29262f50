"""What a device exchanges in a step: messages by kind, size and who takes part, counted."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
Over = Literal["data", "shards", "replicas", "parts", "holders", "stages", "all"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A collective over `n_ranks` devices whose full tensor has `n_bytes`, or a send to one.

    `over` says which devices these are: those that share the batch, the shards or the replicas of
    a parameter, tensor parts, holders of the same parameters, neighbouring stages, or all.
    """

    operation: Operation
    over: Over
    n_ranks: int
    n_bytes: int


Messages = Counter[Message]
