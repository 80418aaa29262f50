"""Matrix factorisation as a finite sum: gradients, and variance-reduced steps on pairs.

P(U, V) = 1/n sum_(i, j) (u_i v_j - r_ij)^2 / 2 + l2/2 (|U|^2 + |V|^2). A model w [D] is U [n_users,
rank], then V [n_items, rank]. A step on a pair touches its two vectors; those of others follow
u <- (1 - q) u - r b, which is made up for when they are read (see `steps`).

Source: Koren, Bell and Volinsky 2009, "Matrix factorization techniques for recommender systems",
equation 2 (the objective); Zhao et al. 2018, "Proximal SCOPE", section 6 (skipped steps).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from .steps import powers

_Array = np.ndarray


@numba.njit(cache=True, nogil=True)
def gradient(
    users: _Array, items: _Array, y: _Array, u: _Array, v: _Array
) -> tuple[_Array, _Array, _Array, float]:
    """Gradients of the summed loss by U and V, each pair's slope [N], the summed loss."""
    du, dv, slopes, total = np.zeros_like(u), np.zeros_like(v), np.empty(len(y)), 0.0
    for at in range(len(y)):
        i, j = users[at], items[at]
        s = -y[at]
        for k in range(u.shape[1]):
            s += u[i, k] * v[j, k]
        slopes[at] = s
        total += s * s / 2
        for k in range(u.shape[1]):
            du[i, k] += s * v[j, k]
            dv[j, k] += s * u[i, k]
    return du, dv, slopes, total


@numba.njit(cache=True, nogil=True)
def losses(users: _Array, items: _Array, y: _Array, u: _Array, v: _Array) -> float:
    """The summed loss."""
    total = 0.0
    for at in range(len(y)):
        s = -y[at]
        for k in range(u.shape[1]):
            s += u[users[at], k] * v[items[at], k]
        total += s * s / 2
    return total


@numba.njit(cache=True, nogil=True)
def curvature(users: _Array, items: _Array, y: _Array, u: _Array, v: _Array) -> float:
    """A bound on the largest second derivative of a pair's loss: |u|^2 + |v|^2 + |slope|."""
    found = 0.0
    for at in range(len(y)):
        s, norms = -y[at], 0.0
        for k in range(u.shape[1]):
            a, b = u[users[at], k], v[items[at], k]
            s += a * b
            norms += a * a + b * b
        found = max(found, norms + abs(s))
    return found


@numba.njit(cache=True, nogil=True)
def _caught_up(
    row: _Array, b: _Array, m: int, q: float, r: float, sums: _Array, mean: bool
) -> None:
    """What comes of m times row <- (1 - q) row - r b."""
    power, first, second = powers(m, q)
    for k in range(len(row)):
        if mean:
            sums[k] += row[k] * (1.0 - q) * first - r * b[k] * second
        row[k] = power * row[k] - r * b[k] * first


@numba.njit(cache=True, nogil=True)
def lazy(
    users: _Array,
    items: _Array,
    y: _Array,
    start: tuple[_Array, _Array],
    anchor: tuple[_Array, _Array],
    slopes: _Array,
    b: tuple[_Array, _Array],
    order: _Array,
    eta: float,
    mu: float,
    l2: float,
    mean: bool,
) -> tuple[_Array, _Array]:
    """U and V after steps on the pairs of `order`, or the mean of what they were after each.

    `slopes` [N] are of each pair at the anchor; the prox is that of l2.
    """
    u, v = start[0].copy(), start[1].copy()
    n_steps, rank = len(order), u.shape[1]
    sum_u, sum_v = np.zeros_like(u[: len(u) if mean else 1]), np.zeros_like(v)
    last_u, last_v = np.zeros(len(u), np.int64), np.zeros(len(v), np.int64)
    scale = 1.0 / (1.0 + eta * l2)
    q, r = (eta * mu + eta * l2) * scale, eta * scale
    for step in range(n_steps):
        at = order[step]
        i, j = users[at], items[at]
        if last_u[i] < step:
            _caught_up(u[i], b[0][i], step - last_u[i], q, r, sum_u[i if mean else 0], mean)
        if last_v[j] < step:
            _caught_up(v[j], b[1][j], step - last_v[j], q, r, sum_v[j], mean)
        s = -y[at]
        for k in range(rank):
            s += u[i, k] * v[j, k]
        t = slopes[at]
        for k in range(rank):
            to_u = s * v[j, k] - t * anchor[1][j, k]
            to_v = s * u[i, k] - t * anchor[0][i, k]
            u[i, k] = (1.0 - q) * u[i, k] - r * (b[0][i, k] + to_u)
            v[j, k] = (1.0 - q) * v[j, k] - r * (b[1][j, k] + to_v)
            if mean:
                sum_u[i, k] += u[i, k]
                sum_v[j, k] += v[j, k]
        last_u[i] = last_v[j] = step + 1
    for i in range(len(u)):
        if last_u[i] < n_steps:
            _caught_up(u[i], b[0][i], n_steps - last_u[i], q, r, sum_u[i if mean else 0], mean)
    for j in range(len(v)):
        if last_v[j] < n_steps:
            _caught_up(v[j], b[1][j], n_steps - last_v[j], q, r, sum_v[j], mean)
    if mean:
        return sum_u / max(1, n_steps), sum_v / max(1, n_steps)
    return u, v


@dataclass(frozen=True, kw_only=True)
class Block:
    """Pairs of users and items (int64 [N]) with their values (float64 [N])."""

    users: np.ndarray
    items: np.ndarray
    y: np.ndarray
    n_users: int
    rank: int

    def __len__(self) -> int:
        return len(self.y)

    def take(self, which: np.ndarray) -> Block:
        """The pairs of these numbers."""
        return Block(
            users=self.users[which],
            items=self.items[which],
            y=self.y[which],
            n_users=self.n_users,
            rank=self.rank,
        )

    def busiest(self, n: int) -> Block:
        """Up to so many of the pairs: those whose user and item have most."""
        if len(self) <= n:
            return self
        often = np.bincount(self.users)[self.users] * np.bincount(self.items)[self.items]
        return self.take(np.sort(np.argsort(-often, kind="stable")[:n]))

    @property
    def given(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What every kernel begins with."""
        return self.users, self.items, self.y

    def parts(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """U and V of a model, as views."""
        cut = self.n_users * self.rank
        return w[:cut].reshape(-1, self.rank), w[cut:].reshape(-1, self.rank)

    def walked(
        self,
        start: np.ndarray,
        anchor: np.ndarray,
        slopes: np.ndarray,
        b: np.ndarray,
        order: np.ndarray,
        eta: float,
        *,
        mu: float = 0.0,
        l2: float = 0.0,
        mean: bool = False,
    ) -> np.ndarray:
        """The model after steps on the pairs of `order`, with the prox of l2; see `lazy`."""
        first, base, pull = self.parts(start), self.parts(anchor), self.parts(b)
        return joined(lazy(*self.given, first, base, slopes, pull, order, eta, mu, l2, mean))


def joined(parts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The model of U and V."""
    return np.concatenate([part.reshape(-1) for part in parts])
