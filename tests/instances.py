"""Random instances for solvers of assignments, and the least that any assignment takes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from polyreme.planner.solve.instance import Instance, Side


def drawn(seed, n_layers, n_strategies, n_stages):
    """Unequal layers, memory that depends on the stage, tight or loose; a tensor passes some by."""
    rng = np.random.default_rng(seed)
    pairs = (max(n_layers - 1, 0), n_strategies, n_strategies)
    time = np.repeat(rng.uniform(1, 3, (1, n_layers, n_strategies)), n_stages, 0)
    later = 1 + 0.2 * np.arange(n_stages)[::-1, None, None]
    memory = rng.uniform(1, 3, (1, n_layers, n_strategies)) * later
    least, most = memory.min(2).sum(1) / n_stages, memory.max(2).sum(1) / n_stages
    sides = ()
    if seed % 3 == 0 and n_layers > 3:
        source = int(rng.integers(0, n_layers - 2))
        reads = {
            target: rng.uniform(0, 0.4, (n_strategies, n_strategies))
            for target in range(source + 2, n_layers)
        }
        sides = (Side(source=source, reads=reads, border=rng.uniform(0, 0.6, n_strategies)),)
    return Instance(
        time=time,
        memory=memory,
        capacity=least * 1.2 + (1.3 * most - least) * rng.uniform(),
        inside=rng.uniform(0, 0.5, pairs),
        between=rng.uniform(0, 1.5, pairs),
        sides=sides,
        beta=float(rng.integers(0, 8)),
    )


def sizes(seed, most_layers):
    rng = np.random.default_rng(10_000 + seed)
    n_layers = int(rng.integers(1, most_layers + 1))
    return n_layers, int(rng.integers(1, 4)), int(rng.integers(1, min(n_layers, 4) + 1))


def brute_force_s(instance):
    best = np.inf
    layers = range(instance.n_layers)
    for cuts in itertools.combinations(layers[1:], instance.n_stages - 1):
        stages = tuple(np.searchsorted(cuts, layers, side="right"))
        for strategies in itertools.product(range(instance.n_strategies), repeat=len(layers)):
            best = min(best, instance.objective_s(stages, strategies))
    return best


def apart(seed):
    """Some layers alike, ties, and tensors that come and go alike whatever the strategies."""
    rng = np.random.default_rng(20_000 + seed)
    n_layers, n_strategies, n_stages = sizes(seed, 6)
    plain = drawn(3 * seed + 1, n_layers, n_strategies, n_stages)
    kinds = rng.integers(0, max(1, n_layers // 2), n_layers)
    return dataclasses.replace(
        plain,
        time=np.round(plain.time[:, kinds], 1),
        memory=np.round(plain.memory[:, kinds], 1),
        inside=np.broadcast_to(plain.inside[:, :1, :1], plain.inside.shape),
        between=np.broadcast_to(plain.between[:, :1, :1], plain.between.shape),
    )


def laid_out(seed):
    """Several strategies of each layout: tensors move between layouts alone, there and back unlike.

    A layer makes more or less than another; some layers are alike, as blocks are.
    """
    rng = np.random.default_rng(50_000 + seed)
    n_layers, _, n_stages = sizes(seed, 5)
    n_strategies = int(rng.integers(2, 5))
    plain = drawn(3 * seed + 1, n_layers, n_strategies, n_stages)
    kinds = rng.integers(0, max(1, n_layers - 1), n_layers)
    layouts = rng.integers(0, int(rng.integers(2, n_strategies + 1)), n_strategies)
    there = rng.uniform(0, 1.5, (n_strategies, n_strategies)) * rng.integers(
        0, 2, (1, n_strategies)
    )
    np.fill_diagonal(there, 0.0)
    moved = there[layouts][:, layouts][None] * rng.uniform(0.2, 1.0, (max(n_layers - 1, 0), 1, 1))
    crossing = rng.uniform(0.1, 0.6, n_strategies)[layouts][None, :, None]
    return dataclasses.replace(
        plain,
        time=plain.time[:, kinds],
        memory=plain.memory[:, kinds],
        inside=moved,
        between=moved + crossing,
    )


def with_holes(instance, seed):
    """The same with strategies that layers lack, on all stages or on some, or with stages fixed."""
    rng = np.random.default_rng(40_000 + seed)
    n_stages, n_layers, n_strategies = instance.time.shape
    more = rng.integers(0, n_stages, n_layers - n_stages)
    stage_of = np.sort(np.concatenate([np.arange(n_stages), more]))
    lacking = (
        np.zeros((1, 1, 1)),
        rng.random((1, n_layers, n_strategies)) < 0.25,
        rng.random((n_stages, n_layers, n_strategies)) < 0.35,
        (stage_of != np.arange(n_stages)[:, None])[:, :, None],
    )[seed % 4]
    return dataclasses.replace(instance, time=np.where(lacking, np.inf, instance.time))


def in_a_row(times, memory, capacity, n_stages=1, beta=0.0):
    """Layers (L, K) whose tensors cost nothing on their way."""
    time, held = np.array(times, float), np.array(memory, float)
    pairs = (len(time) - 1, time.shape[1], time.shape[1])
    return Instance(
        time=np.repeat(time[None], n_stages, 0),
        memory=np.repeat(held[None], n_stages, 0),
        capacity=np.full(n_stages, float(capacity)),
        inside=np.zeros(pairs),
        between=np.zeros(pairs),
        beta=beta,
    )
