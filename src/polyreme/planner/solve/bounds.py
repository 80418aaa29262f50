"""Lower bounds of an instance on a chain: memory and the longest stage priced by multipliers.

Source: Lagrangian relaxation (Held and Karp 1971; Fisher 1981) of the memory of each stage and of
``max(p_i, o_j) <= x``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .instance import Array, Instance


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Prices: `stage` (S) and `border` (S - 1), together beta at most, `byte` (S) of memory."""

    stage: Array
    border: Array
    byte: Array


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What multipliers make of an instance.

    `rest[u, i, k]` is the least priced cost of layers from u on, if layer u is on stage i with
    strategy k; `value` the least of all, no more than any step takes.
    """

    prices: Multipliers
    rest: Array
    constant: float
    value: float
    stages: tuple[int, ...]
    strategies: tuple[int, ...]


def priced(instance: Instance, prices: Multipliers) -> Bound:
    """The bound that multipliers give, by dynamic programming from the last layer."""
    n_stages, n_layers, n_strategies = instance.time.shape
    inside, between = instance.inside, instance.between
    factor = instance.alpha + prices.stage
    own = factor[:, None, None] * instance.time + prices.byte[:, None, None] * instance.memory
    own = np.where(np.isfinite(instance.time), own, np.inf)
    crossing = instance.alpha + prices.border
    rest = np.full((n_layers, n_stages, n_strategies), np.inf)
    rest[-1, -1] = own[-1, -1]
    stays = np.zeros((n_layers, n_stages, n_strategies), dtype=np.int64)
    goes = np.zeros_like(stays)
    moves = np.zeros((n_layers, n_stages, n_strategies), dtype=bool)
    for u in range(n_layers - 2, -1, -1):
        ahead = factor[:, None, None] * inside[u][None] + rest[u + 1][:, None, :]
        stays[u] = ahead.argmin(2)
        best = ahead.min(2)
        if n_stages > 1:
            over = crossing[:, None, None] * between[u][None] + rest[u + 1][1:, None, :]
            goes[u, :-1] = over.argmin(2)
            leaving = over.min(2)
            moves[u, :-1] = leaving < best[:-1]
            best[:-1] = np.minimum(best[:-1], leaving)
        rest[u] = own[:, u] + best
    constant = -float(prices.byte @ instance.capacity)
    at, k = 0, int(rest[0, 0].argmin())
    stages, strategies = [0], [k]
    for u in range(n_layers - 1):
        if moves[u, at, k]:
            at, k = at + 1, int(goes[u, at, k])
        else:
            k = int(stays[u, at, k])
        stages.append(at)
        strategies.append(k)
    return Bound(
        prices=prices,
        rest=rest,
        constant=constant,
        value=float(rest[0, 0].min()) + constant,
        stages=tuple(stages),
        strategies=tuple(strategies),
    )


def ascend(
    instance: Instance, *, above: float, rounds: int = 120
) -> tuple[list[Bound], Bound | None]:
    """Bounds of better and better multipliers by the subgradient method; the best one first.

    And the one whose assignment fits and takes least, if any fits.

    Ends when one reaches `above`. The others are of the same memory prices with a part of those
    of the longest stage (half, none): stronger for labels whose stage is known to be long.
    """
    n = instance.n_stages
    prices = Multipliers(
        stage=np.full(n, instance.beta / n),
        border=np.zeros(n - 1),
        byte=np.zeros(n),
    )
    best = priced(instance, prices)
    if not np.isfinite(best.value):
        return [best], None
    step, stalled = 1.0, 0
    now, fitting, least_s = best, None, np.inf
    for _ in range(rounds):
        if best.value >= above:
            break
        took, crossing, held = instance.stage_times(now.stages, now.strategies)
        if (held <= instance.capacity).all():
            value = instance.total_s(took, crossing)
            if value < least_s:
                fitting, least_s = now, value
        up_s = np.concatenate([took, crossing])
        over = held / instance.capacity - 1
        goal = above if np.isfinite(above) else abs(now.value) * 1.05
        gap = max(goal - now.value, 1e-12)
        # Memory in shares of the capacity, time in shares of the longest: comparable units.
        longest = max(up_s.max(), 1e-30)
        behind = (up_s - longest) / longest if instance.beta else up_s * 0
        norm = float(over @ over + behind @ behind)
        if norm < 1e-18:
            break
        length = step * gap / norm
        mu = np.concatenate([now.prices.stage, now.prices.border])
        if instance.beta:
            mu = _on_simplex(mu + length * behind / longest, instance.beta)
        byte = np.maximum(now.prices.byte * instance.capacity + length * over, 0.0)
        now = priced(
            instance,
            Multipliers(stage=mu[:n], border=mu[n:], byte=byte / instance.capacity),
        )
        if now.value > best.value + 1e-9 * abs(best.value):
            best, stalled = now, 0
        else:
            stalled += 1
            if stalled % 6 == 0:
                step, now = step / 2, best
                if step < 1e-3:
                    break
    found = [best]
    if instance.beta and n > 1:
        for part in (0.5, 0.0):
            less = Multipliers(
                stage=best.prices.stage * part,
                border=best.prices.border * part,
                byte=best.prices.byte,
            )
            found.append(priced(instance, less))
    return found, fitting


def _on_simplex(values: Array, total: float) -> Array:
    """The nearest point with entries of at least 0 that add up to `total`."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - total) / np.arange(1, len(values) + 1)
    found: Array = np.maximum(values - excess[np.nonzero(ordered > excess)[0][-1]], 0.0)
    return found
