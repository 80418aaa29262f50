"""The algorithm between replicas, as its parts: this is its configuration too."""

from __future__ import annotations

import msgspec

from .rule import Rule
from .rule.adamw import AdamW
from .sync import EveryStep, Sync
from .topology import AllReduce, Topology


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule, and when and with whom replicas exchange.

    Attributes:
        rule: How a gradient becomes an update.
        sync: When replicas exchange.
        topology: With whom they exchange.
    """

    rule: Rule = AdamW()
    sync: Sync = EveryStep()
    topology: Topology = AllReduce()
