"""Where the virtual seconds went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Spent:
    """Virtual seconds of one worker; together they are all that passed.

    `compute_s` went into gradients. `comm_s` it was blocked while messages that it needed were
    under way or queued for a link. `wait_s` it was blocked before they were sent, waited for others
    to come to a collective, slept, had done its steps, or was not there.
    """

    compute_s: float = 0.0
    comm_s: float = 0.0
    wait_s: float = 0.0
