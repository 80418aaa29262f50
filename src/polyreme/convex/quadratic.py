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
_MOST_HALVES = 60


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
    which, group, norms = in_use(u, penalty)
    if not len(which):
        return True
    part, mine = h[np.ix_(which, which)], u[which]
    above = part
    down = -(r[which] + penalty.l2 * mine + penalty.l1 * np.sign(mine))
    if penalty.group_l1:
        down -= penalty.group_l1 * mine / norms
        part[np.diag_indices_from(part)] += penalty.group_l1 / norms
        above = part.copy()
        turn = np.outer(mine / norms, penalty.group_l1 / norms * mine / norms)
        turn[group[:, None] != group[None, :]] = 0.0
        part -= turn
    move = _solved(part, down, penalty.l2)
    first, step = 0, 1.0
    if penalty.l1:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            until = np.where(mine * move < 0, -mine / move, np.inf)
        first = int(until.argmin())
        step = min(1.0, float(until[first]))
        move *= step
    if penalty.group_l1:
        halves = _halves(h, r, u, which, move, penalty)
        move *= 0.5**halves
        if halves:
            step = 1.0
            if not penalty.l1:  # a parabola that lies above Q: no step to its minimum is too long
                move = _solved(above, down, penalty.l2)
    if step < 1.0:
        move[first] = -mine[first]
    u[which] = mine + move
    r += move @ h[which]
    return step == 1.0


def in_use(u: _Array, penalty: Penalty) -> tuple[_Array, _Array, _Array]:
    """Entries about which R is smooth; the group of each, and that group's norm."""
    if not penalty.group_l1:
        which = np.flatnonzero(u)
        return which, which, u[which]
    size = penalty.group_size
    norms = np.repeat(np.sqrt(np.add.reduceat(u * u, np.arange(0, len(u), size))), size)
    which = np.flatnonzero((norms[: len(u)] > 1e-140) & ((u != 0.0) | (penalty.l1 == 0.0)))
    return which, which // size, norms[which]


def _halves(h: _Array, r: _Array, u: _Array, which: _Array, move: _Array, penalty: Penalty) -> int:
    """How often the move is halved until Q does not grow."""
    slope, bend, here = float(r[which] @ move), move @ h[np.ix_(which, which)] @ move, u.copy()
    for halves in range(_MOST_HALVES):
        length = 0.5**halves
        here[which] = u[which] + length * move
        grown = penalty.value(here) - penalty.value(u)
        if length * slope + length**2 * bend / 2 + grown <= 0.0:
            return halves
    return _MOST_HALVES


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
    """As `_sweeps`, by groups: one that stays 0 is left, others go an entry at a time.

    Source: Friedman, Hastie and Tibshirani 2010, "A note on the group lasso and a sparse group
    lasso".
    """
    m = u.shape[0]
    new = np.empty(group_size)
    for _ in range(n_sweeps):
        fell, steep = 0.0, 0.0
        for g in range(steepest.shape[0]):
            start, stop = g * group_size, min(m, (g + 1) * group_size)
            if steepest[g] <= 0.0:
                continue
            norm, squares = 0.0, 0.0
            for j in range(start, stop):
                aim = -r[j]
                for k in range(start, stop):
                    aim += h[j, k] * u[k]
                norm += max(0.0, abs(aim) - l1) ** 2
                squares += u[j] * u[j]
            at_rest = math.sqrt(norm) <= group_l1
            if at_rest:
                new[:] = 0.0
            elif squares == 0.0:
                prox_group(r, u, start, stop, steepest[g], l1, l2, group_l1, new)
            for j in range(start, stop):
                sharp = h[j, j] + l2
                if at_rest or squares == 0.0:
                    aim = new[j - start]
                else:
                    others = 0.0
                    for k in range(start, stop):
                        others += u[k] * u[k] if k != j else 0.0
                    aim = least_of_one(sharp, h[j, j] * u[j] - r[j], l1, group_l1, others)
                move = aim - u[j]
                if move != 0.0:
                    fell += sharp * move * move / 2
                    steep = max(steep, sharp * abs(move))
                    u[j] = aim
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


@numba.njit(cache=True, nogil=True, inline="always")
def least_of_one(sharp: float, aim: float, l1: float, group_l1: float, others: float) -> float:
    """The t at the minimum of sharp t^2 / 2 - aim t + l1 |t| + group_l1 (others + t^2)^(1/2)."""
    size = abs(aim) - l1
    if size <= 0.0:
        return 0.0
    # The slope is concave in t > 0, so that Newton's method climbs to its root from below.
    t = max(0.0, size - group_l1) / sharp
    if others > 0.0:
        t = max(t, size / (sharp + group_l1 / math.sqrt(others)))
        for _ in range(50):
            norm = math.sqrt(others + t * t)
            short = size - sharp * t - group_l1 * t / norm
            step = short / (sharp + group_l1 * others / norm**3)
            t += step
            if abs(step) <= 1e-15 * t:
                break
    return math.copysign(t, aim)
