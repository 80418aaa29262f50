"""Chains, solved to the optimum: labels over layers, pruned by bounds and by each other.

Source: resource-constrained shortest paths by label setting with Lagrangian pruning (Handler and
Zang 1980; Dumitrescu and Boland 2003), with the stage of UniAP's programme in the label.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .alpa import alpa
from .bounds import Bound, ascend
from .galvatron import galvatron
from .galvatron_bmw import galvatron_bmw
from .grid import grid
from .instance import Array, Assignment, Instance
from .mcmc import mcmc
from .pipedream import pipedream
from .piper import piper
from .segments import TooWide, is_apart, segments

TOLERANCE = 1e-9  # relative: labels, and objectives, that differ by less are equal
_QUICK = (galvatron_bmw, galvatron, piper, alpa, pipedream, mcmc, grid)  # asked without a proof
_QUICK_S = 5.0  # each
_WIDTHS = (300, 5_000, 100_000, 10**9)  # labels kept of each layer, pass by pass

Index = npt.NDArray[np.int64]


def exact(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """The optimum, on chains and with one tensor that passes layers by: the planner's solver.

    It is given if it takes less than `below`. Stages are solved one by one where strategies change
    nothing for other layers (`segments`), else by labels: passes keep more and more of each layer,
    those of the lowest bounds; one that had to drop none ends with a proof. After `deadline_s`
    seconds the best so far is given, or what another solver of seconds finds, if that is better.

    Source: label setting with Lagrangian pruning, Handler and Zang 1980; knapsacks of stages,
    Nemhauser and Ullmann 1969.

    Raises:
        ValueError: several tensors pass layers by.
    """
    if instance.is_hopeless:
        return Assignment(bound_s=below, proved=True)
    end_s = time.monotonic() + deadline_s
    if not instance.sides:
        return _chain(instance, below, end_s)
    if len(instance.sides) > 1:
        raise ValueError("only one tensor may pass layers by")
    (side,) = instance.sides
    best = Assignment(proved=True, bound_s=below)
    offered = np.flatnonzero(np.isfinite(instance.time[:, side.source]).any(axis=0))
    for strategy in offered:
        fixed = instance.with_side_fixed(side, int(strategy))
        found = _chain(fixed, min(below, best.objective_s), end_s)
        bound_s, proved = min(best.bound_s, found.bound_s), best.proved and found.proved
        better = found if found.objective_s < best.objective_s else best
        best = replace(better, bound_s=bound_s, proved=proved)
    return best


def _chain(instance: Instance, below: float, end_s: float) -> Assignment:
    best = _solved(instance, below, end_s)
    for quick in () if best.proved else _QUICK:
        found = quick(instance, below=min(below, best.objective_s), deadline_s=_QUICK_S)
        best = replace(found, bound_s=best.bound_s) if found.stages else best
    return best


def _solved(instance: Instance, below: float, end_s: float) -> Assignment:
    families = _families(instance)
    instance = _thinned(instance, families)
    if is_apart(families):
        with contextlib.suppress(TooWide):
            return segments(instance, below, end_s)
    bounds, fitting = ascend(instance, above=below)
    best = Assignment(bound_s=bounds[0].value)
    for bound in filter(None, (bounds[0], fitting)):
        value = instance.objective_s(bound.stages, bound.strategies)
        if value < below:
            below = value
            best = replace(
                best, stages=bound.stages, strategies=bound.strategies, objective_s=value
            )
    if bounds[0].value >= below * (1 - TOLERANCE):
        return replace(best, proved=True, bound_s=min(best.bound_s, below))
    for width in _WIDTHS:
        if width == _WIDTHS[1]:  # no quick case: the better what is known, the more is pruned
            found = galvatron_bmw(instance, below=below, deadline_s=_QUICK_S)
            if found.stages:
                best, below = replace(found, bound_s=best.bound_s), found.objective_s
        found, dropped = _pass(instance, families, bounds, below, width, end_s)
        if found.objective_s < below:
            best, below = replace(found, bound_s=best.bound_s), found.objective_s
        if dropped >= below * (1 - TOLERANCE):
            return replace(best, proved=True, bound_s=below)
        best = replace(best, bound_s=max(best.bound_s, dropped))
        if time.monotonic() > end_s:
            break
    return best


def _families(instance: Instance) -> Index:
    """Of each layer and strategy a number: the same where all tensors come and go alike."""
    ways = (instance.inside, instance.between)
    found = np.zeros(instance.time.shape[1:], dtype=np.int64)
    if all((each == each[:, :1, :1]).all() for each in ways):
        return found
    for u in range(instance.n_layers):
        coming = [each[u - 1].T for each in ways] if u else []
        going = [each[u] for each in ways] if u + 1 < instance.n_layers else []
        if coming or going:
            rows = np.hstack([*coming, *going])
            found[u] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return found


def _thinned(instance: Instance, families: Index) -> Instance:
    """Without strategies that another of the family is never worse than, on any stage."""
    time = instance.time.copy()
    for u in range(instance.n_layers):
        both = np.concatenate([instance.time[:, u], instance.memory[:, u]])  # (2 S, K)
        kin = families[u][:, None] == families[u][None, :]
        as_good = kin & (both[:, :, None] <= both[:, None, :]).all(axis=0)  # [k, j]: k for j
        better = as_good & (~as_good.T | np.triu(np.ones_like(as_good), 1))  # of equals the first
        time[:, u, better.any(axis=0)] = np.inf
    return replace(instance, time=time)


@dataclass
class _Labels:
    """Ways to have assigned the first layers: one row each.

    `total` is alpha times all time so far, `took` and `held` are time and bytes of the stage under
    way, `longest` the longest stage or border, it among them; `priced` (n_bounds, n) what each
    bound makes of it all.
    """

    stage: Index
    strategy: Index
    total: Array
    longest: Array
    took: Array
    held: Array
    priced: Array
    parent: Index

    def take(self, index: Index | npt.NDArray[np.bool_]) -> _Labels:
        return _Labels(
            self.stage[index],
            self.strategy[index],
            self.total[index],
            self.longest[index],
            self.took[index],
            self.held[index],
            self.priced[:, index],
            self.parent[index],
        )

    def __len__(self) -> int:
        return len(self.total)


def _joined(parts: list[_Labels]) -> _Labels:
    return _Labels(
        *(
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in _Labels.__dataclass_fields__
        )
    )


def _pass(
    instance: Instance,
    families: Index,
    bounds: list[Bound],
    below: float,
    width: int,
    end_s: float,
) -> tuple[Assignment, float]:
    """The best found with so many labels a layer, and the lowest bound of those dropped.

    After `end_s` nothing more is looked at: then nothing is found, and the bound is 0.
    """
    rests = np.stack([bound.rest for bound in bounds])
    owns = np.stack([_own(instance, bound) for bound in bounds])
    left = np.array([instance.beta - b.prices.stage.sum() - b.prices.border.sum() for b in bounds])
    left = np.maximum(left, 0.0)
    constants = np.array([bound.constant for bound in bounds])

    def bounded(labels: _Labels, layer: int) -> Array:
        at = (slice(None), labels.stage, labels.strategy)
        after = rests[:, layer][at] - owns[:, :, layer][at]
        found: Array = (
            labels.priced + after + constants[:, None] + left[:, None] * labels.longest
        ).max(0)
        return found

    n = instance.n_strategies
    dropped = np.inf
    first = np.arange(n)
    labels = _Labels(
        stage=np.zeros(n, np.int64),
        strategy=first,
        total=instance.alpha * instance.time[0, 0],
        longest=instance.time[0, 0].copy(),
        took=instance.time[0, 0].copy(),
        held=instance.memory[0, 0].copy(),
        priced=owns[:, 0, 0].copy(),
        parent=np.full(n, -1),
    )
    labels = labels.take(np.isfinite(labels.total) & (labels.held <= instance.capacity[0]))
    history = [labels]
    for layer in range(1, instance.n_layers):
        if time.monotonic() > end_s:
            return Assignment(), 0.0
        parts = [_stay(instance, bounds, owns, labels, layer)]
        if instance.n_stages > 1:
            parts.append(_go(instance, bounds, owns, labels, layer))
        labels = _joined(parts)
        lower = bounded(labels, layer)
        # NaN: infinite minus infinite, where no completion is.
        alive = lower < below * (1 - TOLERANCE)
        labels, lower = labels.take(alive), lower[alive]
        if not len(labels):
            return Assignment(), dropped
        chosen = np.argsort(lower, kind="stable")
        labels, lower = labels.take(chosen), lower[chosen]
        kept = _undominated(labels, families[layer])
        labels, lower = labels.take(kept), lower[kept]
        if len(labels) > width:
            dropped = min(dropped, float(lower[width]))
            labels = labels.take(np.arange(width))
        history.append(labels)
    value = labels.total + instance.beta * labels.longest
    return _read(history, int(value.argmin()), float(value.min())), dropped


def _read(history: list[_Labels], at: int, value: float) -> Assignment:
    stages, strategies = [], []
    for labels in reversed(history):
        stages.append(int(labels.stage[at]))
        strategies.append(int(labels.strategy[at]))
        at = int(labels.parent[at])
    return Assignment(
        stages=tuple(reversed(stages)), strategies=tuple(reversed(strategies)), objective_s=value
    )


def _own(instance: Instance, bound: Bound) -> Array:
    """What a bound makes of each stage, layer and strategy (S, L, K)."""
    factor = instance.alpha + bound.prices.stage
    byte = bound.prices.byte
    return factor[:, None, None] * instance.time + byte[:, None, None] * instance.memory


def _stay(
    instance: Instance, bounds: list[Bound], owns: Array, labels: _Labels, layer: int
) -> _Labels:
    """Each label with each strategy for the next layer, on the same stage."""
    stage, took = labels.stage[:, None], labels.took[:, None]
    moved = instance.inside[layer - 1][labels.strategy]
    more = moved + instance.time[labels.stage, layer]
    held = labels.held[:, None] + instance.memory[labels.stage, layer]
    fits = np.isfinite(more) & (held <= instance.capacity[stage])
    row, strategy = fits.nonzero()
    at = labels.stage[row]
    new = (took + more)[fits]
    factors = np.stack([instance.alpha + bound.prices.stage for bound in bounds])
    return _Labels(
        stage=at,
        strategy=strategy,
        total=labels.total[row] + instance.alpha * more[fits],
        longest=np.maximum(labels.longest[row], new),
        took=new,
        held=held[fits],
        priced=labels.priced[:, row] + factors[:, at] * moved[fits] + owns[:, at, layer, strategy],
        parent=row,
    )


def _go(
    instance: Instance, bounds: list[Bound], owns: Array, labels: _Labels, layer: int
) -> _Labels:
    """Each label with each strategy for the next layer, on the next stage."""
    rows = (labels.stage < instance.n_stages - 1).nonzero()[0]
    after = labels.stage[rows] + 1
    crossing = instance.between[layer - 1][labels.strategy[rows]]
    alone, held = instance.time[after, layer], instance.memory[after, layer]
    fits = np.isfinite(crossing + alone) & (held <= instance.capacity[after][:, None])
    row, strategy = fits.nonzero()
    before, at, over, new = rows[row], after[row], crossing[fits], alone[fits]
    factors = np.stack([instance.alpha + bound.prices.border for bound in bounds])
    return _Labels(
        stage=at,
        strategy=strategy,
        total=labels.total[before] + instance.alpha * (over + new),
        longest=np.maximum(np.maximum(labels.longest[before], over), new),
        took=new,
        held=held[fits],
        priced=labels.priced[:, before] + factors[:, at - 1] * over + owns[:, at, layer, strategy],
        parent=before,
    )


def _undominated(labels: _Labels, families: Index) -> Index:
    """Rows that no other row of the same stage and family is at least as good as in all.

    Rows come by their bounds, and stay so.
    """
    keys = np.stack([labels.total, labels.longest, labels.took, labels.held], axis=1)
    group = labels.stage * len(families) + families[labels.strategy]
    order = np.lexsort((keys[:, 0], group))
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    kept = [
        order[start:end][_front(keys[order[start:end]])]
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True)
    ]
    return np.sort(np.concatenate(kept))


def _front(keys: Array, chunk: int = 256) -> Index:
    """Rows of `keys` (by rising first column) that no row before them is at most in all columns."""
    slack = np.abs(keys[:, 1:]) * [TOLERANCE, TOLERANCE, 0.0]  # bytes are exact
    front = np.zeros((0, keys.shape[1] - 1))
    kept = []
    for start in range(0, len(keys), chunk):
        rows = keys[start : start + chunk, 1:]
        room = rows + slack[start : start + chunk]
        alive = ~(front[None] <= room[:, None]).all(2).any(1)
        index = alive.nonzero()[0]
        # Among themselves: a row before, alive or dominated by one that is, is as good.
        among = (rows[index][None] <= room[index][:, None]).all(2)
        alone = ~np.tril(among, -1).any(1)
        index = index[alone]
        front = np.concatenate([front, rows[index]])
        kept.append(index + start)
    return np.concatenate(kept)
