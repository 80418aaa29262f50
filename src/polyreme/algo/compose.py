"""The algorithm between replicas, as its parts: this is its configuration too."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .aggregate import Aggregator
from .aggregate.mean import Mean
from .compress import Compressor
from .compress.dense import Dense
from .feedback import Feedback
from .feedback.none import NoFeedback
from .rule import Rule
from .rule.adamw import AdamW
from .sync import EveryStep, Sync
from .topology import AllReduce, Topology


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule, and when, with whom and in what form replicas exchange.

    Attributes:
        rule: How a gradient becomes an update.
        sync: When replicas exchange.
        topology: With whom they exchange.
        compress: In what form.
        feedback: What becomes of what compression takes away.
        aggregate: How many vectors become one.
        local_clip_norm: Bound on the norm of the whole gradient that workers' bounds add up to:
            each worker's own is held to this over the root of the number of workers, before
            anything else. Source: Lin et al. 2018, section 3.2.
    """

    rule: Rule = AdamW()
    sync: Sync = EveryStep()
    topology: Topology = AllReduce()
    compress: Compressor = Dense()
    feedback: Feedback = NoFeedback()
    aggregate: Aggregator = Mean()
    local_clip_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether replicas take the dense mean of their gradients at every step, and no more."""
        return self == DataParallel(rule=self.rule)
