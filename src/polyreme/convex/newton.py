"""Proximal Newton steps on one core: a linear model to the last digits, with its certificate.

Each step minimises a parabola of the loss plus the penalty itself, then goes as far towards the
minimum as the objective falls.
Source: Lee, Sun and Saunders 2014, "Proximal Newton-type methods for minimizing composite
functions"; Yuan, Ho and Lin 2012, "An improved GLMNET for l1-regularized logistic regression".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..data.rows import Rows
from . import conjugate, descent, passes, quadratic
from .below import Below
from .problem import Certificate, Penalty, certificate
from .shard import Shard

_WHOLE = 2500  # features up to which second derivatives are held in a matrix
_FEW = 512  # features up to which all are looked at in every step
_SAMPLE = 2000  # rows that are worth solving alone, to begin with
_SHARE = 8
_ROUGH = 0.01  # how near its optimum, of the objective at 0
_BLOCK = 4096  # rows that are filled with their zeros at once


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A model [D], its predictions [N], how good it is, and in how many Newton steps.

    `slopes` [N] are the dual point of its certificate.
    """

    w: np.ndarray
    p: np.ndarray
    certificate: Certificate
    rounds: int
    slopes: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Here:
    """At a model: slopes and curves [N] of the loss, the mean loss's gradient [D], how good."""

    slopes: np.ndarray
    curves: np.ndarray
    z: np.ndarray
    certificate: Certificate


def here(shard: Shard, w: np.ndarray, p: np.ndarray, mu: float) -> Here:
    """Slopes, curves and the certificate of the slopes."""
    n, objective, penalty = len(shard), shard.objective, shard.objective.penalty
    slopes, curves = np.empty(n), np.empty(n)
    total, along = passes.point(objective.code, objective.gamma, p, shard.y, mu, slopes, curves)
    z = passes.spread(*_parts(shard.rows), slopes, len(w)) / n
    c = penalty.shrink(z)
    # A conjugate at a slope is p slope - loss.
    conjugates = along - total if c == 1.0 else shard.conjugates(slopes, c)
    found = certificate(objective, w, z, total / n, conjugates / n)
    return Here(slopes=slopes, curves=curves, z=z, certificate=found)


def done(penalty: Penalty, found: Certificate, tol: float) -> bool:
    """Whether it is good enough; without a penalty the gradient's largest entry says so."""
    return (found.gap if penalty.bounds else found.gradient) <= tol


def newton(shard: Shard, w: np.ndarray, p: np.ndarray, *, tol: float, max_rounds: int) -> Solved:
    """From a model [D] and its predictions [N] to a gap of `tol`, or until nothing falls."""
    n, objective, penalty = len(shard), shard.objective, shard.objective.penalty
    rows, whole = _parts(shard.rows), len(w) <= _WHOLE
    sparse = bool(penalty.l1 or penalty.group_l1)
    by_feature = None if whole or not sparse else passes.columns(*rows, len(w))
    # A rounded hinge has no second derivative far from where it is rounded.
    least = 1e-6 if objective.loss in ("hinge", "squared_hinge") else 0.0
    mu = least if objective.loss != "hinge" else 0.05 if w.any() else 1.0
    rest, exact, best = 0, 0.01, math.inf
    rounds, below = 0, Below()
    promised: np.ndarray | None = None
    while True:
        at = here(shard, w, p, mu)
        below = below.after(at.certificate, at.slopes)
        if sparse and not penalty.l2 and not done(penalty, below.of(at.certificate), tol):
            below = below.beside(shard, promised)
        told = below.of(at.certificate)
        if done(penalty, told, tol) or rounds >= max_rounds or rest == 2:
            return Solved(w=w, p=p, certificate=told, rounds=rounds, slopes=below.slopes)
        rounds += 1
        curves = at.curves / n
        if by_feature is not None:
            u, q = descent.minimum(by_feature, curves, at.z, w, penalty, max(exact, 1e-6))
        else:
            if whole:
                u = quadratic.minimum(hessian(shard.rows, curves), at.z, w, penalty, exact)
            else:
                u = w + conjugate.step(shard.rows, curves, at.z + penalty.l2 * w, penalty.l2)
            q = passes.predictions(*rows, u - w)
        # The parabola's own slopes at its minimum are inside of the penalty, or nearly so.
        promised = at.slopes + at.curves * q
        slope = float(at.z @ (u - w)) + penalty.value(u) - penalty.value(w)
        length = _length(shard, w, p, u, q, slope, at.certificate.objective)
        if length == 1.0:
            w, p = u, p + q
            mu = max(least, mu / 4 if mu > 1e-3 else 0.0)
        else:
            w, p = w + length * (u - w), p + length * q
            mu = min(1.0, max(4 * mu, 0.05))
        share = -slope / max(abs(at.certificate.objective), 1e-300)
        exact = min(0.01, max(1e-12, share / 100))
        # Below what rounding leaves of the objective, steps only sharpen the certificate.
        still = share <= 1e-15 or length == 0.0
        better = told.gap < best / 2
        best = min(best, told.gap)
        rest = rest + 1 if still and not better else 0


def _parts(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rows.indptr, rows.indices, rows.values


def hessian(rows: Rows, curves: np.ndarray) -> np.ndarray:
    """X^T diag(curves) X [D, D]: number by number, or by blocks with their zeros if that is less.

    A product of blocks makes some 16 additions in the time of one to a place in memory.
    """
    given, d = _parts(rows), rows.n_features
    if passes.pairs(rows.indptr) <= len(rows) * d * (d / 2 + 8) / 16:
        return passes.products(*given, curves, d)
    found = np.zeros((d, d))
    for start in range(0, len(rows), _BLOCK):
        part = rows.between(start, min(len(rows), start + _BLOCK))
        block = passes.filled(*_parts(part), curves[start : start + _BLOCK], d)
        found += block.T @ block
    return found


def _length(
    shard: Shard,
    w: np.ndarray,
    p: np.ndarray,
    u: np.ndarray,
    q: np.ndarray,
    slope: float,
    before: float,
) -> float:
    """The largest 2^-k by which the objective falls as it should; 0 if none does."""
    penalty, code, gamma = shard.objective.penalty, shard.given[0], shard.given[1]
    # Sums of a million losses are so exact; a step that gains less is not judged by them.
    length, rounding = 1.0, (1e-12 if -slope <= 1e-12 * abs(before) else 1e-14) * abs(before)
    for _ in range(40):
        there = w + length * (u - w) if length < 1.0 else u
        after = passes.moved(code, gamma, p, shard.y, q, length) / len(shard)
        after += penalty.value(there)
        if after <= before + 1e-4 * length * min(slope, 0.0) + rounding:
            return length
        length /= 2
    return 0.0


def solve(
    shard: Shard, *, tol: float, max_rounds: int = 1000, start: np.ndarray | None = None
) -> Solved:
    """The model at which the objective is within `tol` of its optimum, by its duality gap.

    `max_rounds` counts Newton steps. Where rounding allows no gap of `tol`, the certificate says
    what was reached.
    """
    given = shard
    penalty = shard.objective.penalty
    if penalty.group_l1 and penalty.group_size == 1:
        penalty = replace(penalty, l1=penalty.l1 + penalty.group_l1, group_l1=0.0)
        shard = replace(shard, objective=replace(shard.objective, penalty=penalty))
    w = _begun(shard, max_rounds) if start is None else start.astype(float)
    found = _sharpened(shard, _minimum(shard, w, tol, max_rounds), tol, max_rounds)
    # Predictions were added up step by step: what that lost is in no certificate.
    p = passes.predictions(*_parts(shard.rows), found.w)
    if shard is given and np.abs(p - found.p).max() <= 1e-13 * (1.0 + np.abs(p).max()):
        return found
    # Bounds from below are of slopes alone, whatever model these were taken at.
    kept = Below().after(found.certificate, found.p)
    return replace(found, p=p, certificate=kept.of(given.certificate(found.w)))


def _minimum(shard: Shard, w: np.ndarray, tol: float, max_rounds: int) -> Solved:
    penalty = shard.objective.penalty
    p = passes.predictions(*_parts(shard.rows), w)
    if not (penalty.l1 or penalty.group_l1) or len(w) <= _FEW:
        return newton(shard, w, p, tol=tol, max_rounds=max_rounds)
    return _widening(shard, w, p, tol, max_rounds)


def _sharpened(shard: Shard, found: Solved, tol: float, max_rounds: int) -> Solved:
    """After one more step, if a gap is small only by slopes at another model.

    Gradients may then be of the size of the gap's root, which the step squares.
    """
    left, own = max_rounds - found.rounds, here(shard, found.w, found.p, 0.0).certificate
    penalty = shard.objective.penalty
    if left <= 0 or done(penalty, own, tol) or not done(penalty, found.certificate, tol):
        return found
    after = _minimum(shard, found.w, tol, left)
    if after.certificate.objective > found.certificate.objective:
        return found
    kept = Below().after(found.certificate, found.p)
    return replace(
        after, certificate=kept.of(after.certificate), rounds=found.rounds + after.rounds
    )


def _begun(shard: Shard, max_rounds: int) -> np.ndarray:
    """Where to begin: near the optimum of every eighth row, which is had in an eighth of the time.

    Source: Byrd et al. 2012, "Sample size selection in optimization methods for machine learning"
    (as many rows as the model's error asks for).
    """
    zeros = np.zeros(shard.rows.n_features)
    objective, n = shard.objective, len(shard)
    if n < _SHARE * _SAMPLE or not objective.penalty.bounds:
        return zeros
    which = np.arange(0, n, _SHARE)
    part = Shard(objective=objective, rows=shard.rows.take(which), y=shard.y[which])
    nothing = passes.moved(objective.code, objective.gamma, np.zeros(n), shard.y, np.zeros(n), 0.0)
    found = _minimum(part, zeros, _ROUGH * nothing / n, min(max_rounds, 10))
    better = shard.loss(found.w) / n + objective.penalty.value(found.w) < nothing / n
    return found.w if better else zeros


def _widening(shard: Shard, w: np.ndarray, p: np.ndarray, tol: float, max_rounds: int) -> Solved:
    """Among a few features at a time: those in use, and those that most want to be.

    Source: Johnson and Guestrin 2015, "Blitz: a principled meta-algorithm for scaling sparse
    optimization"; Massias et al. 2018, "Celer: a fast solver for the lasso with dual
    extrapolation" (twice as many as are in use).
    """
    penalty, rounds = shard.objective.penalty, 0
    rows, rest, before = shard.rows, 0, math.inf
    below, own = Below(), None
    while True:
        at = here(shard, w, p, 0.0)
        below = below.after(at.certificate, at.slopes)
        if not done(penalty, below.of(at.certificate), tol):
            below = below.beside(shard, own)
        told = below.of(at.certificate)
        gap = told.gap
        if done(penalty, told, tol) or rounds >= max_rounds or rest == 3:
            return Solved(w=w, p=p, certificate=told, rounds=rounds, slopes=below.slopes)
        chosen = _chosen(penalty, w, at.z)
        place = np.full(len(w), -1, np.int32)
        place[chosen] = np.arange(len(chosen), dtype=np.int32)
        indptr, indices, values = passes.kept(*_parts(rows), place)
        few = Rows(indptr=indptr, indices=indices, values=values, n_features=len(chosen))
        part = Shard(objective=shard.objective, rows=few, y=shard.y)
        found = newton(
            part,
            w[chosen],
            p,
            tol=max(tol / 2, gap / 20),
            max_rounds=min(30, max_rounds - rounds),
        )
        w = w.copy()
        w[chosen] = found.w
        p, rounds, own = found.p, rounds + max(1, found.rounds), found.slopes
        rest = rest + 1 if gap >= 0.999 * before else 0
        before = min(before, gap)


def _chosen(penalty: Penalty, w: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Numbers of the features, ascending, whole groups of them."""
    size = penalty.group_size if penalty.group_l1 else 1
    urge = np.maximum(np.abs(z) - penalty.l1, 0.0) if penalty.group_l1 else np.abs(z)
    used = w != 0.0
    if size > 1:
        starts = np.arange(0, len(w), size)
        urge = np.sqrt(np.add.reduceat(urge * urge, starts))
        used = np.logical_or.reduceat(used, starts)
    least = 0.9 * (penalty.group_l1 or penalty.l1)
    wanted = np.flatnonzero((urge > least) & ~used)
    count = max(256 // size, 2 * int(used.sum()))
    if len(wanted) > count:
        wanted = wanted[np.argpartition(urge[wanted], len(wanted) - count)[-count:]]
    groups = np.sort(np.concatenate([np.flatnonzero(used), wanted]))
    if size == 1:
        return groups
    every = (groups[:, None] * size + np.arange(size)).ravel()
    return every[every < len(w)]
