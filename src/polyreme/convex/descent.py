"""Coordinate descent on the parabola of a Newton step, over rows by feature.

Q(u) = z (u - w) + sum_i curves_i (x_i (u - w))^2 / 2 + R(u); what it is minimised over may be many
features, so only q = X (u - w) is kept.
Source: Yuan, Ho and Lin 2012, "An improved GLMNET for l1-regularized logistic regression".
"""

from __future__ import annotations

import numba
import numpy as np

from .conjugate import downhill
from .problem import Penalty
from .quadratic import in_use, least_of_one, prox_group

_Array = np.ndarray
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # starts [D + 1], rows and values by feature
_SWEEPS = 20  # before the smooth part is solved at once
_CONJUGATE = 100
_TURNS = 6


def minimum(
    columns: Columns, curves: _Array, z: _Array, w: _Array, penalty: Penalty, exact: float
) -> tuple[_Array, _Array]:
    """The u that minimises Q to `exact` of what Q falls by, and q [N]."""
    u, q = w.copy(), np.zeros(len(curves))
    steepest = diagonal(*columns, curves)
    blocks, whole = steepest, 0.0
    if penalty.group_l1:
        blocks = np.add.reduceat(steepest, np.arange(0, len(w), penalty.group_size))
    for _ in range(_TURNS):
        given = *columns, curves, z, u, q
        if penalty.group_l1:
            strengths = penalty.l1, penalty.l2, penalty.group_l1
            rest, whole = _group_sweeps(
                *given, blocks, steepest, *strengths, penalty.group_size, _SWEEPS, exact, whole
            )
        else:
            plain = penalty.l1, penalty.l2
            rest, whole = _sweeps(*given, steepest, *plain, _SWEEPS, exact, whole)
        if rest or not _step(columns, curves, z, w, u, q, steepest, penalty):
            break
    return u, q


def _step(
    columns: Columns,
    curves: _Array,
    z: _Array,
    w: _Array,
    u: _Array,
    q: _Array,
    steepest: _Array,
    penalty: Penalty,
) -> bool:
    """A Newton step among the entries of u that are not 0; those that it would turn become 0."""
    which, group, norms = in_use(u, penalty)
    if not len(which):
        return False
    mine = u[which]
    slope = z[which] + down(*columns, which, curves * q)
    slope += penalty.l2 * mine + penalty.l1 * np.sign(mine)
    own_ = steepest[which] + penalty.l2
    if penalty.group_l1:
        slope += penalty.group_l1 * mine / norms
        own_ = own_ + penalty.group_l1 / norms * (1.0 - (mine / norms) ** 2)

    def bent(v: _Array) -> _Array:
        found: _Array = down(*columns, which, curves * across(*columns, which, v, len(q)))
        found += penalty.l2 * v
        if penalty.group_l1:
            turned = np.bincount(group, mine * v)[group] * mine / norms**2
            found += penalty.group_l1 / norms * (v - turned)
        return found

    aim = mine + downhill(bent, own_, slope, rounds=_CONJUGATE)
    before = float(z @ (u - w)) + float(curves @ (q * q)) / 2 + penalty.value(u)
    for halves in range(10):
        new = mine + (aim - mine) / 2**halves
        if penalty.l1:
            new[new * mine < 0] = 0.0
        there = u.copy()
        there[which] = new
        moved = q + across(*columns, which, new - mine, len(q))
        after = float(z @ (there - w)) + float(curves @ (moved * moved)) / 2
        if after + penalty.value(there) < before:
            u[:], q[:] = there, moved
            return True
    if not penalty.l1:
        return False
    # Towards where the first of them becomes 0, Q falls in any case.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        until = np.where(mine * (aim - mine) < 0, -mine / (aim - mine), 1.0)
    first = int(until.argmin())
    new = mine + until[first] * (aim - mine)
    new[first] = 0.0 if until[first] < 1.0 else new[first]
    u[which] = new
    q += across(*columns, which, new - mine, len(q))
    return True


@numba.njit(cache=True, nogil=True)
def across(
    starts: _Array, rows: _Array, values: _Array, which: _Array, v: _Array, n_rows: int
) -> _Array:
    """The features `which` times their v [N]."""
    found = np.zeros(n_rows)
    for k in range(which.shape[0]):
        for at in range(np.uint64(starts[which[k]]), np.uint64(starts[which[k] + 1])):
            found[np.uint32(rows[at])] += v[k] * values[at]
    return found


@numba.njit(cache=True, nogil=True)
def down(starts: _Array, rows: _Array, values: _Array, which: _Array, slopes: _Array) -> _Array:
    """The features `which` times one number a row."""
    found = np.zeros(which.shape[0])
    for k in range(which.shape[0]):
        for at in range(np.uint64(starts[which[k]]), np.uint64(starts[which[k] + 1])):
            found[k] += values[at] * slopes[np.uint32(rows[at])]
    return found


@numba.njit(cache=True, nogil=True)
def diagonal(starts: _Array, rows: _Array, values: _Array, curves: _Array) -> _Array:
    """Second derivatives of Q's smooth part [D]."""
    found = np.zeros(starts.shape[0] - 1)
    for j in range(found.shape[0]):
        total = 0.0
        for at in range(np.uint64(starts[j]), np.uint64(starts[j + 1])):
            v = float(values[at])
            total += curves[np.uint32(rows[at])] * v * v
        found[j] = total
    return found


@numba.njit(inline="always", cache=True, nogil=True)
def _along(
    starts: _Array, rows: _Array, values: _Array, curves: _Array, q: _Array, j: int
) -> float:
    total = 0.0
    for at in range(np.uint64(starts[j]), np.uint64(starts[j + 1])):
        i = np.uint32(rows[at])
        total += values[at] * curves[i] * q[i]
    return total


@numba.njit(cache=True, nogil=True)
def _sweeps(
    starts: _Array,
    rows: _Array,
    values: _Array,
    curves: _Array,
    z: _Array,
    u: _Array,
    q: _Array,
    steepest: _Array,
    l1: float,
    l2: float,
    n_sweeps: int,
    exact: float,
    whole: float,
) -> tuple[bool, float]:
    """Whether it came to rest, and what Q fell by so far; q follows u."""
    order = np.arange(u.shape[0])
    left = order.shape[0]
    bound, every = np.inf, True
    for _ in range(n_sweeps):
        fell, worst, kept = 0.0, 0.0, 0
        for k in range(left):
            j = order[k]
            r = z[j] + _along(starts, rows, values, curves, q, j)
            old = u[j]
            if old == 0.0 and abs(r) <= l1:
                # Far from leaving 0: not looked at again until the others have come to rest.
                if abs(r) < l1 - bound:
                    continue
                order[k], order[kept] = order[kept], j
                kept += 1
                continue
            order[k], order[kept] = order[kept], j
            kept += 1
            sharp = steepest[j] + l2
            if sharp <= 0.0:
                continue
            aim = steepest[j] * old - r
            new = (aim - l1) / sharp if aim > l1 else (aim + l1) / sharp if aim < -l1 else 0.0
            move = new - old
            if move != 0.0:
                worst = max(worst, abs(move) * sharp)
                fell += sharp * move * move / 2
                u[j] = new
                for at in range(np.uint64(starts[j]), np.uint64(starts[j + 1])):
                    q[np.uint32(rows[at])] += move * values[at]
        whole += fell
        bound = worst
        if fell <= exact * whole:
            if every or left == u.shape[0]:
                return True, whole
            every, left, bound = True, u.shape[0], np.inf
        else:
            every, left = False, kept
    return False, whole


@numba.njit(cache=True, nogil=True)
def _group_sweeps(
    starts: _Array,
    rows: _Array,
    values: _Array,
    curves: _Array,
    z: _Array,
    u: _Array,
    q: _Array,
    steepest: _Array,
    own_: _Array,
    l1: float,
    l2: float,
    group_l1: float,
    group_size: int,
    n_sweeps: int,
    exact: float,
    whole: float,
) -> tuple[bool, float]:
    """As `_sweeps`, a group at a time, by its proximal gradient step."""
    m = u.shape[0]
    r, new = z.copy(), np.empty(group_size)
    for _ in range(n_sweeps):
        fell = 0.0
        for g in range(steepest.shape[0]):
            start, stop, sharp = g * group_size, min(m, (g + 1) * group_size), steepest[g]
            if sharp <= 0.0:
                continue
            for j in range(start, stop):
                r[j] = z[j] + _along(starts, rows, values, curves, q, j)
            prox_group(r, u, start, stop, sharp, l1, l2, group_l1, new)
            for j in range(start, stop):
                move = new[j - start] - u[j]
                if move != 0.0:
                    fell += (sharp + l2) * move * move / 2
                    u[j] = new[j - start]
                    for at in range(np.uint64(starts[j]), np.uint64(starts[j + 1])):
                        q[np.uint32(rows[at])] += move * values[at]
            norm = 0.0
            for j in range(start, stop):
                norm += u[j] * u[j]
            if norm == 0.0:
                continue
            for j in range(start, stop):
                old, own = u[j], own_[j]
                others = max(0.0, norm - old * old)
                aim = own * old - z[j] - _along(starts, rows, values, curves, q, j)
                move = least_of_one(own + l2, aim, l1, group_l1, others) - old
                if move != 0.0:
                    fell += (own + l2) * move * move / 2
                    u[j] += move
                    norm = others + u[j] * u[j]
                    for at in range(np.uint64(starts[j]), np.uint64(starts[j + 1])):
                        q[np.uint32(rows[at])] += move * values[at]
        whole += fell
        if fell <= exact * whole:
            return True, whole
    return False, whole
