"""The minimum of a parabola in few dimensions plus a penalty.

Q(u) = r (u - w) + (u - w) H (u - w) / 2 + R(u), with H [M, M] stored whole.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from scipy import linalg

from .problem import Penalty

_Array = np.ndarray
_SWEEPS = 60  # before the smooth part is solved at once
_TURNS = 30
_CROSSINGS = 20


def minimum(h: _Array, r: _Array, w: _Array, penalty: Penalty, exact: float) -> _Array:
    """The u that minimises Q, to `exact` of what Q falls by, and of the first sweep's steepest.

    Coordinates (or groups) in turn, and Newton steps on those that are not 0, between which
    no entry changes its sign.
    Source: Friedman et al. 2010, "Regularization paths for generalized linear models via
    coordinate descent" (turns, and those that are not 0 more often).
    """
    if not (penalty.l1 or penalty.group_l1):
        found: _Array = w + _solved(h, -(r + penalty.l2 * w), penalty.l2)
        return found
    u, r = w.copy(), r.copy()
    given = penalty.l1, penalty.l2, penalty.group_l1, penalty.group_size
    steepest = _steepest(h, penalty.group_size) if penalty.group_l1 else np.diag(h).copy()
    fell, first = 0.0, 0.0
    for _ in range(_TURNS):
        if penalty.group_l1:
            rest, fell, first = _group_sweeps(
                h, r, u, steepest, *given, _SWEEPS, exact, fell, first
            )
        else:
            rest, fell, first = _sweeps(h, r, u, *given[:2], _SWEEPS, exact, fell, first)
        if rest:
            break
        for _ in range(_CROSSINGS):
            if _step(h, r, u, penalty):
                break
    return u


def _step(h: _Array, r: _Array, u: _Array, penalty: Penalty) -> bool:
    """A Newton step of Q among the entries of u that are not 0; whether it went all the way.

    Otherwise it ended where the first of them became 0.
    """
    which = np.flatnonzero(u)
    if not len(which):
        return True
    part, mine = h[np.ix_(which, which)], u[which]
    down = -(r[which] + penalty.l2 * mine + penalty.l1 * np.sign(mine))
    if penalty.group_l1:
        group = which // penalty.group_size
        norms = np.sqrt(np.bincount(group, mine * mine))[group]
        down -= penalty.group_l1 * mine / norms
        same = group[:, None] == group[None, :]
        turn = -np.outer(mine / norms, mine / norms) * same
        turn[np.diag_indices_from(turn)] += 1.0
        part += penalty.group_l1 / norms[:, None] * turn
    move = _solved(part, down, penalty.l2)
    with np.errstate(divide="ignore", invalid="ignore"):
        until = np.where(mine * move < 0, -mine / move, np.inf)
    first, step = int(until.argmin()), 1.0
    if until[first] <= 1.0:
        step = float(until[first])
    move *= step
    if penalty.group_l1:
        move = _shorter(h, r, u, which, move, penalty)
        u[which] += move
    else:
        u[which] += move
        if step < 1.0:
            move[first] = -mine[first]
            u[which[first]] = 0.0
    r += move @ h[which]
    return step == 1.0


def _shorter(
    h: _Array, r: _Array, u: _Array, which: _Array, move: _Array, penalty: Penalty
) -> _Array:
    """The move, halved until Q does not grow."""
    across = h[np.ix_(which, which)] @ move
    here = penalty.value(u)
    for _ in range(30):
        there = u.copy()
        there[which] += move
        if r[which] @ move + across @ move / 2 + penalty.value(there) - here <= 0.0:
            return move
        move, across = move / 2, across / 2
    return np.zeros_like(move)


def _solved(h: _Array, b: _Array, l2: float) -> _Array:
    """(H + l2)^-1 b, to rounding; where H has no inverse, of one a little larger."""
    diagonal = np.diag(h) + l2
    scale = np.where(diagonal > 0, 1.0 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0)), 0.0)
    own = h * scale * scale[:, None]
    own[np.diag_indices_from(own)] = 1.0
    ridge = 1e-14 * max(1, len(b))
    while True:
        held = own.copy()
        held[np.diag_indices_from(held)] += ridge
        try:
            factor = linalg.cho_factor(held, lower=True, overwrite_a=True, check_finite=False)
        except linalg.LinAlgError:
            ridge *= 100
            continue
        found: _Array = scale * linalg.cho_solve(factor, scale * b, check_finite=False)
        return found


@numba.njit(cache=True, nogil=True)
def _steepest(h: _Array, group_size: int) -> _Array:
    """Of each group, a bound on the largest eigenvalue of its block: its Frobenius norm."""
    n_groups = (h.shape[0] + group_size - 1) // group_size
    found = np.zeros(n_groups)
    for g in range(n_groups):
        start, stop = g * group_size, min(h.shape[0], (g + 1) * group_size)
        largest, total = 0.0, 0.0
        for a in range(start, stop):
            largest = max(largest, h[a, a])
        if largest > 0.0:
            for a in range(start, stop):
                for b in range(start, stop):
                    total += (h[a, b] / largest) ** 2
            found[g] = largest * math.sqrt(total)
    return found


@numba.njit(cache=True, nogil=True)
def _sweeps(
    h: _Array,
    r: _Array,
    u: _Array,
    l1: float,
    l2: float,
    n_sweeps: int,
    exact: float,
    whole: float,
    first: float,
) -> tuple[bool, float, float]:
    """Whether it came to rest, what Q fell by so far, the steepest entry met in the first sweep.

    r becomes the slope at u.
    """
    m, every = u.shape[0], True
    for _ in range(n_sweeps):
        fell, steep = 0.0, 0.0
        for j in range(m):
            old, sharp = u[j], h[j, j] + l2
            if old == 0.0 and (not every or abs(r[j]) <= l1):
                continue
            if sharp <= 0.0:
                new = 0.0 if abs(r[j]) <= l1 else old
            else:
                aim = h[j, j] * old - r[j]
                new = (aim - l1) / sharp if aim > l1 else (aim + l1) / sharp if aim < -l1 else 0.0
            if new != old:
                move = new - old
                fell += sharp * move * move / 2
                steep = max(steep, sharp * abs(move))
                u[j] = new
                row = h[j]
                for k in range(m):
                    r[k] += move * row[k]
        whole += fell
        first = steep if first == 0.0 else first
        if fell <= exact * whole and steep <= exact * first:
            if every:
                return True, whole, first
            every = True
        else:
            every = False
    return False, whole, first


@numba.njit(cache=True, nogil=True)
def _group_sweeps(
    h: _Array,
    r: _Array,
    u: _Array,
    steepest: _Array,
    l1: float,
    l2: float,
    group_l1: float,
    group_size: int,
    n_sweeps: int,
    exact: float,
    whole: float,
    first: float,
) -> tuple[bool, float, float]:
    """As `_sweeps`, a group at a time, by its proximal gradient step."""
    m = u.shape[0]
    new = np.empty(group_size)
    for _ in range(n_sweeps):
        fell, steep = 0.0, 0.0
        for g in range(steepest.shape[0]):
            start, stop = g * group_size, min(m, (g + 1) * group_size)
            sharp = steepest[g]
            if sharp <= 0.0:
                continue
            if not prox_group(r, u, start, stop, sharp, l1, l2, group_l1, new):
                continue
            for j in range(start, stop):
                move = new[j - start] - u[j]
                if move != 0.0:
                    fell += (sharp + l2) * move * move / 2
                    steep = max(steep, (sharp + l2) * abs(move))
                    u[j] = new[j - start]
                    row = h[j]
                    for k in range(m):
                        r[k] += move * row[k]
        whole += fell
        first = steep if first == 0.0 else first
        if fell <= exact * whole and steep <= exact * first:
            return True, whole, first
    return False, whole, first


@numba.njit(cache=True, nogil=True, inline="always")
def prox_group(
    r: _Array,
    u: _Array,
    start: int,
    stop: int,
    sharp: float,
    l1: float,
    l2: float,
    group_l1: float,
    new: _Array,
) -> bool:
    """Fills `new` with prox of u - r / sharp, for entries start to stop; whether any changes."""
    norm = 0.0
    for j in range(start, stop):
        aim = sharp * u[j] - r[j]
        aim = aim - l1 if aim > l1 else aim + l1 if aim < -l1 else 0.0
        new[j - start] = aim
        norm += aim * aim
    norm = math.sqrt(norm)
    left = max(0.0, 1.0 - group_l1 / norm) if norm > 0.0 else 0.0
    changes = False
    for j in range(start, stop):
        new[j - start] *= left / (sharp + l2)
        changes = changes or new[j - start] != u[j]
    return changes
