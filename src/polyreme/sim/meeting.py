"""What all workers ask at once: the answer, its seconds and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..algo.effects import Agree, Seen, Sum
from ..algo.ledger import Ledger
from ..algo.packet import Message, total
from ..algo.topology.passing import share_of, vector
from . import stuck
from .network import Network


def answered(met: Sequence[tuple[int, Any]], network: Network, ledger: Ledger) -> tuple[Any, float]:
    """The answer to what all workers, by their numbers, ask at once, and how long it takes.

    Raises:
        RunError: They ask for different things.
    """
    effects = [effect for _, effect in met]
    first = effects[0]
    if any(type(each) is not type(first) for each in effects):
        raise stuck.apart(met)
    if isinstance(first, Agree):
        if len({len(each.batches) for each in effects}) > 1:
            raise stuck.apart(met)
        told = [each.batches for each in effects]
        sizes = [8 * sum(map(len, each)) for each in told]
        return Seen.of(told), _gathering_s(sizes, network, ledger)
    messages = [each.message for each in effects]
    if any(each.kinds != messages[0].kinds for each in messages):
        raise stuck.apart(met)
    if isinstance(first, Sum):
        return total(messages), _summing_s(messages[0], len(met), network, ledger)
    sizes = [each.nbytes for each in messages]
    return first.function(messages), _gathering_s(sizes, network, ledger)


def _gathering_s(sizes: Sequence[int], network: Network, ledger: Ledger) -> float:
    """Count what all workers give to all; the seconds that takes."""
    ledger.gathered(sizes)
    return network.gathering_s(sizes)


def _summing_s(message: Message, n: int, network: Network, ledger: Ledger) -> float:
    """Count the shares that go round twice, type by type; the seconds that takes."""
    seconds = 0.0
    for part in vector(message):
        share_bytes = share_of(part.numel(), n) * part.element_size()
        ledger.summed(share_bytes, n)
        seconds += 2 * network.gathering_s([share_bytes] * n)
    return seconds
