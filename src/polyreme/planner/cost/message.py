"""What a device exchanges in a step: messages by kind, size and who takes part, counted."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Over = Literal[
    "data", "shards", "replicas", "contexts", "parts", "experts", "holders", "stages", "all"
]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A collective over `n_ranks` devices whose full tensor has `n_bytes`, or a send to one.

    The full tensor of an exchange from all to all is what each device has before it.

    `over` says which devices these are: those that share the batch, the shards or the replicas of
    a parameter, those that share the tokens of samples, tensor parts, those to whom experts are
    dealt out, holders of the same parameters, neighbouring stages, or all. If `ep` is more than 1
    it is about experts dealt out to so many: data, shards and replicas are who hold the same ones.
    """

    operation: Operation
    over: Over
    n_ranks: int
    n_bytes: int
    ep: int = 1

    @property
    def sent_bytes(self) -> int:
        """What each device sends in a ring; an all-reduce goes round twice.

        >>> Message(operation="all_reduce", over="data", n_ranks=4, n_bytes=8).sent_bytes
        12
        """
        if self.operation == "send":
            return self.n_bytes
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.n_bytes * (self.n_ranks - 1) // self.n_ranks


Messages = Counter[Message]
