"""Exact topologies: the same answer on all workers, at the cost that is stated."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from polyreme.algo.aggregate.kind import AggregatorKind
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, Cast, Dense, RandomK, TopK
from polyreme.algo.effects import Program, Received, Recv, Send
from polyreme.algo.exchange import dense
from polyreme.algo.packet import Message
from polyreme.algo.rule import SGD
from polyreme.algo.topology import (
    AllReduce,
    Auto,
    BinaryTree,
    DoubleBinaryTree,
    Hierarchical,
    ParameterServer,
    RecursiveDoubling,
    Ring,
    Torus2D,
)
from polyreme.algo.topology.kind import TopologyKind
from polyreme.algo.topology.tree import complementary, in_order
from polyreme.algo.vector import Layout
from workers import World, play, workers

torch.set_num_threads(1)

PROGRAMS = [
    Ring(),
    RecursiveDoubling(),
    BinaryTree(),
    DoubleBinaryTree(pieces=1),
    DoubleBinaryTree(pieces=4),
    Hierarchical(group=1),
    Hierarchical(group=2),
    Hierarchical(group=4),
    Hierarchical(group=8),
    Torus2D(),
    ParameterServer(),
    ParameterServer(servers=2),
    ParameterServer(servers=8),
    Auto(),
]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


def _fits(topology: TopologyKind, n: int) -> bool:
    return not topology.refused(n, DataParallel())


def _placed(topologies: Sequence[TopologyKind], counts: Sequence[int]) -> pytest.MarkDecorator:
    """Each topology with the numbers of workers that it is for."""
    rows = [(topology, n) for topology in topologies for n in counts if _fits(topology, n)]
    ids = [f"{topology}-{n}" for topology, n in rows]
    return pytest.mark.parametrize(("topology", "n"), rows, ids=ids)


class Clocked:
    """Plays programs over Send and Recv where sending takes alpha + beta times bytes."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta
        self.bytes: Counter[tuple[int, int]] = Counter()
        self.sent: Counter[int] = Counter()
        self.end_s = 0.0

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]:
        n = len(programs)
        free_s, inbox = [0.0] * n, [[] for _ in range(n)]
        wants: list[int | None] = [None] * n
        results: list[Any] = [None] * n
        events: list[tuple[float, int, int, Any]] = []
        order = itertools.count()

        def go(rank: int, now_s: float, answer: Any) -> None:
            while True:
                try:
                    effect = programs[rank].send(answer)
                except StopIteration as end:
                    results[rank], self.end_s = end.value, max(self.end_s, now_s)
                    return
                if isinstance(effect, Send):
                    n_bytes = effect.message.nbytes
                    self.bytes[rank, effect.to] += n_bytes
                    self.sent[rank] += 1
                    free_s[rank] = max(free_s[rank], now_s) + self.beta * n_bytes
                    received = Received(source=rank, message=effect.message)
                    at_s = free_s[rank] + self.alpha
                    heapq.heappush(events, (at_s, next(order), effect.to, received))
                    answer = None
                    continue
                assert isinstance(effect, Recv)
                wants[rank] = effect.source
                for index, received in enumerate(inbox[rank]):
                    if received.source == effect.source:
                        del inbox[rank][index]
                        wants[rank], answer = None, received
                        break
                else:
                    return

        for rank in range(n):
            go(rank, 0.0, None)
        while events:
            now_s, _, to, received = heapq.heappop(events)
            if wants[to] == received.source:
                wants[to] = None
                go(to, now_s, received)
            else:
                inbox[to].append(received)
        assert not any(inbox), "every message is received"
        assert wants == [None] * n, "no worker waits for ever"
        return results


def _rows(n: int, n_entries: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, n_entries, generator=torch.Generator().manual_seed(n)).to(dtype)


def _summed(topology: TopologyKind, rows: torch.Tensor, world: Any) -> list[torch.Tensor]:
    team = workers(len(rows), Layout.of({"w": tuple(rows.shape[1:])}))
    programs = [topology.sum(dense([row]), me) for row, me in zip(rows, team, strict=True)]
    return [message.packets[0].decode() for message in world.run(programs)]


@_placed([AllReduce(), *PROGRAMS], COUNTS)
@pytest.mark.parametrize("n_entries", [0, 3, 50])
def test_all_workers_have_the_same_sum(topology: TopologyKind, n: int, n_entries: int) -> None:
    rows = _rows(n, n_entries)
    sums = _summed(topology, rows, World(n=n))
    torch.testing.assert_close(sums[0], rows.sum(0), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(each, sums[0]) for each in sums)
    again = _summed(topology, rows, World(n=n))
    assert torch.equal(again[0], sums[0])


@_placed([AllReduce(), *PROGRAMS], COUNTS)
def test_functions_see_messages_in_order_of_workers(topology: TopologyKind, n: int) -> None:
    def function(messages: Sequence[Message]) -> list[float]:
        return [float(each.packets[1].decode()[0]) for each in messages]

    team = workers(n, Layout.of({"w": (1,)}))
    said = [dense([torch.ones(2), torch.full((3,), float(me.rank))]) for me in team]
    programs = [topology.combine(each, function, me) for each, me in zip(said, team, strict=True)]
    assert World(n=n).run(programs) == [[float(rank) for rank in range(n)]] * n


@pytest.mark.parametrize("topology", [AllReduce(), *PROGRAMS], ids=str)
def test_types_are_summed_apart_and_one_worker_s_nan_reaches_all(topology: TopologyKind) -> None:
    n = 3 if _fits(topology, 3) else 8
    team = workers(n, Layout.of({"w": (1,)}))
    said = [dense([torch.full((5,), 1e-9).double() + 1, torch.ones(2, 2)]) for _ in team]
    said[1].packets[1].buffers[0][3] = float("nan")
    programs = [topology.sum(each, me) for each, me in zip(said, team, strict=True)]
    for message in World(n=n).run(programs):
        first, second = (packet.decode() for packet in message.packets)
        assert first.dtype == torch.float64
        assert torch.equal(first, said[0].packets[0].decode() * n)
        assert second.isnan().tolist() == [[False, False], [False, True]]


def _costs(topology: TopologyKind, n: int, adds: bool) -> tuple[Any, tuple[float, ...]]:
    """As stated, and as played: rounds, path, messages, link."""
    n_entries = 5040 if adds else 6
    rows = _rows(n, n_entries)
    played = []
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0)):
        world = Clocked(alpha, beta)
        if adds:
            _summed(topology, rows, world)
        else:
            team = workers(n, Layout.of({"w": (n_entries,)}))
            pairs = zip(rows, team, strict=True)
            world.run([topology.combine(dense([row]), len, me) for row, me in pairs])
        played.append(world.end_s)
    sent, link = max(world.sent.values(), default=0), max(world.bytes.values(), default=0)
    return topology.cost(n, 4 * n_entries, adds=adds), (*played, sent, link)


@pytest.mark.parametrize("adds", [True, False])
@_placed(PROGRAMS, COUNTS)
def test_costs_are_what_programs_send(topology: TopologyKind, n: int, adds: bool) -> None:
    stated, played = _costs(topology, n, adds)
    assert stated.n_messages == played[2]
    assert stated.link_bytes == pytest.approx(played[3], rel=2e-3)
    assert played[0] <= stated.rounds
    assert played[1] <= stated.path_bytes * (1 + 2e-3)
    if n & (n - 1) == 0:
        assert played[0] == stated.rounds
        if adds or not isinstance(topology, DoubleBinaryTree):
            assert played[1] == pytest.approx(stated.path_bytes, rel=2e-3)


def test_published_costs_are_played() -> None:
    """Survey arXiv 2003.06307, table 6: factors of alpha and of beta N, log to base 2."""
    log = {2: 1, 4: 2, 8: 3, 16: 4}
    for n in log:
        published = {
            BinaryTree(): (2 * log[n], 2 * log[n]),
            RecursiveDoubling(): (log[n], log[n]),
            Ring(): (2 * (n - 1), 2 * (n - 1) / n),
        }
        for topology, (rounds, times) in published.items():
            stated, played = _costs(topology, n, adds=True)
            assert stated[:2] == pytest.approx((rounds, times * 4 * 5040))
            assert played[:2] == pytest.approx((rounds, times * 4 * 5040))


@pytest.mark.parametrize("n", range(2, 40))
def test_inner_workers_of_one_tree_are_leaves_of_the_other(n: int) -> None:
    first = in_order(n)
    second = complementary(first)
    for tree in (first, second):
        root = next(p for p, parent in enumerate(tree.parents) if parent == p)
        assert tree.below(root) == list(range(n))
        assert max(len(tree.children(p)) for p in range(n)) <= 2
    inner = [{p for p in range(n) if len(t.children(p)) == 2} for t in (first, second)]
    assert not inner[0] & inner[1]
    assert all(a != b for a, b in zip(first.parents, second.parents, strict=True))
    rows = _rows(n, 11)
    sums = _summed(DoubleBinaryTree(pieces=3), rows, World(n=n))
    torch.testing.assert_close(sums[0], rows.sum(0), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_pieces_bring_two_trees_near_the_least_bytes() -> None:
    fine, coarse = (_costs(DoubleBinaryTree(pieces=p), 16, True)[1][1] for p in (64, 1))
    assert fine < 2.2 * 4 * 5040 < coarse


def test_auto_takes_what_costs_least() -> None:
    auto = Auto(latency_s=1e-3, bytes_per_s=1e6)
    assert isinstance(auto.chosen(16, 4), RecursiveDoubling)
    assert isinstance(auto.chosen(5, 10**9), Ring)
    for n in (1, 2, 7, 16):
        for n_bytes in (0, 100, 10**5, 10**8):
            seconds = [p.cost(n, n_bytes).seconds(1e-3, 1e6) for p in (Ring(), BinaryTree())]
            assert auto.cost(n, n_bytes).seconds(1e-3, 1e6) <= min(seconds)


def test_auto_s_choice_does_not_depend_on_one_worker_s_packet() -> None:
    """Packets of unequal length would let workers choose different programs."""
    auto, n = Auto(latency_s=1e-6, bytes_per_s=1e6), 4
    algorithm = DataParallel(
        rule=SGD(lr=0.1), topology=auto, compress=QSGD(levels=4, coding="elias")
    )
    rows = torch.zeros(n, 3000)
    rows[0] = torch.randn(3000)
    played = play(algorithm, lambda rank, _batch, _x: rows[rank], torch.zeros(3000), n, 1)
    assert all(torch.equal(played.params[-1, 0], each) for each in played.params[-1])


@pytest.mark.slice(12)
@pytest.mark.parametrize("compress", [Dense(), Cast(), TopK(ratio=0.3), RandomK(ratio=0.3)])
@_placed(PROGRAMS, [1, 2, 5, 8])
def test_training_does_not_depend_on_the_topology(
    topology: TopologyKind, compress: Any, n: int
) -> None:
    shapes = {"a": (4, 3), "b": (5,), "c": (1,)}
    targets = _rows(n, 18)

    def end(via: TopologyKind) -> torch.Tensor:
        algorithm = DataParallel(rule=SGD(lr=0.1), topology=via, compress=compress)
        start = torch.zeros(18)
        played = play(
            algorithm, lambda rank, _batch, x: x - targets[rank], start, n, 3, shapes=shapes
        )
        assert all(torch.equal(played.params[-1, 0], each) for each in played.params[-1])
        return played.params[-1, 0]

    torch.testing.assert_close(end(topology), end(AllReduce()), rtol=1e-5, atol=1e-6)


SERVED = {"a": (4, 3), "b": (50,), "c": (7,)}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_only_servers_remember_what_the_way_back_lost(servers: int) -> None:
    n, targets = 4, _rows(4, 69)
    via = ParameterServer(servers=servers, back=TopK(ratio=0.2, dense_below=10))
    algorithm = DataParallel(rule=SGD(lr=0.1), topology=via)
    played = play(
        algorithm, lambda rank, _batch, x: x - targets[rank], torch.zeros(69), n, 200, shapes=SERVED
    )
    assert all(torch.equal(played.params[-1, 0], each) for each in played.params[-1])
    torch.testing.assert_close(played.params[-1, 0], targets.mean(0), rtol=0, atol=2e-2)
    errors = [s["exchange"]["topology"]["error"] for s in played.states[-1]]
    assert sorted(key for error in errors for key in error) == ["0", "1"]
    assert all(not error for error in errors[servers:])


def test_a_server_s_memory_is_what_the_others_have_not_seen() -> None:
    """DoubleSqueeze: sum of answers plus memory is the sum of means."""
    n, n_steps, rows = 3, 4, _rows(3, 20)
    via = ParameterServer(back=TopK(ratio=0.2))
    algorithm = DataParallel(rule=SGD(lr=1.0), topology=via)
    played = play(
        algorithm, lambda rank, _batch, _x: rows[rank], torch.zeros(20), n, n_steps, lr=1.0
    )
    memory = played.states[-1][0]["exchange"]["topology"]["error"]["0"]
    expected = n_steps * rows.mean(0)
    torch.testing.assert_close(memory - played.params[-1, 1], expected, rtol=1e-5, atol=1e-5)
    assert (played.params[1, 0] != 0).sum() == 4


def test_without_feedback_servers_forget() -> None:
    rows = _rows(3, 20)
    via = ParameterServer(back=TopK(ratio=0.2), feedback=False)
    algorithm = DataParallel(rule=SGD(lr=1.0), topology=via)
    played = play(algorithm, lambda rank, _batch, _x: rows[rank], torch.zeros(20), 3, 4, lr=1.0)
    assert (played.params[-1, 0] != 0).sum() == 4
    assert played.states[-1][0]["exchange"]["topology"]["error"] == {}


def test_the_way_back_has_the_bytes_of_its_packets() -> None:
    n, n_entries = 3, 100
    algorithm = DataParallel(rule=SGD(lr=1.0), topology=ParameterServer(back=TopK(ratio=0.1)))
    rows = _rows(n, n_entries)
    played = play(algorithm, lambda rank, _batch, _x: rows[rank], torch.zeros(n_entries), n, 1)
    back = TopK(ratio=0.1)
    form = back.form(dense([rows[0]]).packets[0].like)
    packet = sum(getattr(torch, b.dtype).itemsize * b.length for b in form)
    assert played.nbytes == [2 * packet, 4 * n_entries, 4 * n_entries]


def test_refusals_of_topologies_say_what_is_legal() -> None:
    class Whole(AggregatorKind, frozen=True, kw_only=True):
        """Wants whole rows."""

    found = Torus2D(rows=4).refused(6, DataParallel())
    assert str(found[0]) == (
        "data_parallel.topology.rows: 4 does not divide the 6 workers. Legal: 1, 2, 3, 6."
    )
    assert not Torus2D(rows=3).refused(6, DataParallel())
    found = ParameterServer(servers=3).refused(2, DataParallel())
    assert "any integer up to 2" in str(found[0])

    class Robust:
        aggregate = Whole()

    assert "wants whole" in str(ParameterServer(servers=2).refused(2, Robust())[0])  # type: ignore[arg-type]
    assert not ParameterServer().refused(2, Robust())  # type: ignore[arg-type]
