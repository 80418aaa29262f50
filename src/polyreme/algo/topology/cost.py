"""What a program over messages costs, in closed form."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Of one program of n workers, where sending takes alpha + beta times bytes.

    A worker's messages leave one after another, and no time passes but on the wire. `rounds` and
    `path_bytes` are the factors of alpha and beta until the last worker has the result; exact at
    powers of two, at most so elsewhere. `n_messages` are sent by the busiest worker, `link_bytes`
    pass the busiest link in one direction.
    """

    rounds: int = 0
    path_bytes: float = 0.0
    n_messages: int = 0
    link_bytes: float = 0.0

    def seconds(self, latency_s: float, bytes_per_s: float) -> float:
        """Time on such links."""
        return self.rounds * latency_s + self.path_bytes / bytes_per_s


def log2_floor(n: int) -> int:
    """Doublings that stay within n."""
    return n.bit_length() - 1


def log2_ceil(n: int) -> int:
    """Doublings that reach n."""
    return (n - 1).bit_length()
