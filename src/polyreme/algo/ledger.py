"""Bytes that workers sent each other, by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Ledger:
    """Counts messages by (sender, receiver), the same way on both clocks."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self.messages: Counter[tuple[int, int]] = Counter()

    def sent(self, source: int, to: int, n_bytes: int) -> None:
        """One message."""
        self.bytes[source, to] += n_bytes
        self.messages[source, to] += 1

    def summed(self, share_bytes: int, n: int, of: int | None = None) -> None:
        """All workers summed a share each and have the shares of all.

        As in a ring: each worker passes n - 1 partial sums on to the next, then n - 1 sums. With
        `of` only what that worker sent is counted.
        """
        senders = range(n) if of is None else (of,)
        for rank in senders if n > 1 else ():
            to = (rank + 1) % n
            self.bytes[rank, to] += 2 * (n - 1) * share_bytes
            self.messages[rank, to] += 2 * (n - 1)

    def gathered(self, sizes: Sequence[int], of: int | None = None) -> None:
        """All workers gave a message of that size and have all of them.

        As in a ring: each worker passes on to the next its own and n - 2 others. With `of` only
        what that worker sent is counted.
        """
        n, total = len(sizes), sum(sizes)
        senders = range(n) if of is None else (of,)
        for rank in senders if n > 1 else ():
            to = (rank + 1) % n
            self.bytes[rank, to] += total - sizes[to]
            self.messages[rank, to] += n - 1
