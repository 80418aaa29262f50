"""What a device has to get where layers next to each other are laid out unlike.

A microbatch's values are samples by tokens, and each device of a layout has a rectangle of them:
samples of its data rank, and tokens of its context and, where tokens are split, of its tensor part.
Samples and tokens lie in one order, whatever splits them. A device keeps what it has, and gets from
others what it lacks of what it is to have: nothing where that is a part of its own (it is cut), all
else where it has one of the parts (a gather), or some from each where the shares change places (an
exchange from all to all).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..draft import Strategy


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """What the device gets that lacks most: a `share` of the whole microbatch.

    From others of a group of `n_ranks` on `n_hosts`, both of the largest group.
    """

    share: float
    n_ranks: int
    n_hosts: int

    def gathered_bytes(self, n_bytes: int) -> int:
        """The full tensor of a gather over the group in which each device gets as many bytes.

        `n_bytes` are those of the microbatch.
        """
        return math.ceil(n_bytes * self.share * self.n_ranks / (self.n_ranks - 1))


def lack(had: Strategy, wanted: Strategy, pp: int, host_of: Sequence[int]) -> Lack | None:
    """What devices that are laid out as `wanted` lack of what those of `had` have, if anything.

    Rows of devices follow each other from the first of `host_of`, the host of each device. Where
    they have unlike numbers, each device has at first what the one at the same height of the other
    row has. Parts of a value are had from the nearest that hold them, who are taken to lie on as
    many hosts as there are between the ends of the group, but no more than one each.
    """
    n, n_had = wanted.n_devices, had.n_devices
    place = np.arange(n)
    at = place * n_had // n
    has, wants = _cell(had, at), _cell(wanted, place)
    whole = own = wanting = others = np.ones(n, np.int64)
    firsts, lasts = [], []
    for n_had_parts, n_wanted_parts, mine, theirs in zip(
        _parts(had), _parts(wanted), has, wants, strict=True
    ):
        length = math.lcm(n_had_parts, n_wanted_parts)
        step, wide = length // n_had_parts, length // n_wanted_parts
        start, end = theirs * wide, (theirs + 1) * wide
        both = np.minimum(end, (mine + 1) * step) - np.maximum(start, mine * step)
        firsts.append(start // step)
        lasts.append((end - 1) // step)
        whole, wanting = whole * length, wanting * wide
        own = own * np.maximum(both, 0)
        others = others * (lasts[-1] - firsts[-1] + 1)
    lacks = wanting - own
    if not lacks.any():
        return None
    n_ranks = np.where(lacks > 0, others + (own == 0), 1)
    nearest = (_nearest(had, samples, tokens, at) for samples, tokens in ((*firsts,), (*lasts,)))
    low, high = (each * n // n_had for each in nearest)
    rows = max(1, min(pp, len(host_of) // n))
    hosts = np.array(host_of[: rows * n]).reshape(rows, -1)
    low, high = np.minimum(low, place), np.maximum(high, place)
    between = (hosts[:, high] - hosts[:, low]).max(axis=0)
    return Lack(
        share=float(lacks.max() / whole[0]),
        n_ranks=int(n_ranks.max()),
        n_hosts=int(np.minimum(1 + between, n_ranks).max()),
    )


def _parts(layout: Strategy) -> tuple[int, int]:
    """Into how many parts samples and tokens are cut."""
    return layout.data, layout.cp * (layout.tp if layout.sp else 1)


def _cell(layout: Strategy, place: Any) -> tuple[Any, Any]:
    """Which part of the samples, and of the tokens, the devices at these places have."""
    samples, rest = np.divmod(place, layout.cp * layout.tp)
    return samples, rest if layout.sp else rest // layout.tp


def _nearest(layout: Strategy, samples: Any, tokens: Any, place: Any) -> Any:
    """Of the devices that have these parts, those nearest to these places."""
    copies = 1 if layout.sp else layout.tp
    first = samples * layout.cp * layout.tp + tokens * copies
    return np.clip(place, first, first + copies - 1)
