"""Trees of workers: sums and messages go up to the root and come down from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..effects import Program, Send
from ..packet import Message
from .passing import Vector, give, joined, parted, plus, receive, take


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The parent of each position; the root is its own."""

    parents: tuple[int, ...]

    def children(self, at: int) -> list[int]:
        """In order of positions."""
        return [p for p, parent in enumerate(self.parents) if parent == at != p]

    def below(self, at: int) -> list[int]:
        """The position and all under it, in order of positions."""
        return sorted([at, *(p for child in self.children(at) for p in self.below(child))])


def binomial(n: int) -> Tree:
    """The tree of halvings: a position without its lowest bit is its parent, 0 the root."""
    return Tree(parents=tuple(p & (p - 1) if p else 0 for p in range(n)))


def in_order(n: int) -> Tree:
    """A binary tree whose leaves are the odd positions; 0 is the root and has one child.

    Source: Sanders, Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", in the form with any number of positions.
    """
    parents = [0]
    for p in range(1, n):
        low = p & -p
        up = (p ^ low) | low << 1
        parents.append(up if up < n else p ^ low)
    return Tree(parents=tuple(parents))


def complementary(tree: Tree) -> Tree:
    """The same tree over other workers, so that inner ones become leaves.

    Mirrored where their number is even, moved by one where it is odd. No worker is the child of
    the same one in both (three, moved by one, would be), so that none takes one tree's message for
    the other's.
    """
    n = len(tree.parents)
    if n % 2 == 0 or n == 3:
        return Tree(parents=tuple(n - 1 - tree.parents[n - 1 - p] for p in range(n)))
    return Tree(parents=tuple((tree.parents[p - 1] + 1) % n for p in range(n)))


def sum_up(x: Vector, tree: Tree, ranks: Sequence[int], at: int) -> Program[Vector]:
    """The sum of one's own and all below, sent on to the parent; at the root that of all."""
    for child in tree.children(at):
        x = plus(x, (yield from take(ranks[child], x)))
    if tree.parents[at] != at:
        yield from give(ranks[tree.parents[at]], x)
    return x


def down(x: Vector, tree: Tree, ranks: Sequence[int], at: int) -> Program[Vector]:
    """What the root has; the last child's (in a binomial tree the largest) goes first."""
    if tree.parents[at] != at:
        x = yield from take(ranks[tree.parents[at]], x)
    for child in reversed(tree.children(at)):
        yield from give(ranks[child], x)
    return x


def tree_sum(x: Vector, tree: Tree, ranks: Sequence[int], rank: int) -> Program[Vector]:
    """The sum over a tree."""
    at = ranks.index(rank)
    x = yield from sum_up(x, tree, ranks, at)
    return (yield from down(x, tree, ranks, at))


def gather_up(
    own: Message, tree: Tree, ranks: Sequence[int], rank: int
) -> Program[dict[int, Message]]:
    """Messages by worker, of oneself and all below; at the root of all."""
    at = ranks.index(rank)
    held = {rank: own}
    for child in tree.children(at):
        below = tree.below(child)
        bundle = yield from receive(ranks[child], own.kinds * len(below))
        held |= zip((ranks[p] for p in below), parted(bundle, len(below)), strict=True)
    if tree.parents[at] != at:
        bundle = joined([held[ranks[p]] for p in tree.below(at)])
        yield Send(to=ranks[tree.parents[at]], message=bundle)
    return held


def gather_down(
    held: Mapping[int, Message], n: int, tree: Tree, ranks: Sequence[int], rank: int
) -> Program[dict[int, Message]]:
    """The messages of workers 0 to n - 1; each worker is sent those that it has not."""
    at, held = ranks.index(rank), dict(held)
    if tree.parents[at] != at:
        rest = [r for r in range(n) if r not in held]
        kinds = held[rank].kinds * len(rest)
        bundle = yield from receive(ranks[tree.parents[at]], kinds)
        held |= zip(rest, parted(bundle, len(rest)), strict=True)
    for child in reversed(tree.children(at)):
        has = {ranks[p] for p in tree.below(child)}
        bundle = joined([held[r] for r in range(n) if r not in has])
        yield Send(to=ranks[child], message=bundle)
    return held
