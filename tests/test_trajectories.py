"""Whole runs of small problems against plain loops in float64 that share no code with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.feedback import DGC, DIANA, ECQ, EF21, GMC, ErrorFeedback, OneBitAdam
from polyreme.algo.rule import SGD
from polyreme.algo.sync import (
    CSER,
    LAG,
    AdaptivePeriod,
    EveryStep,
    FedAvg,
    GrowingBatch,
    LocalSteps,
    ThreePoint,
)
from polyreme.algo.topology import AllReduce, Gossip, Hierarchical, ParameterServer, Ring
from polyreme.algo.topology.graph import Exponential, RingGraph, TorusGraph
from polyreme.algo.topology.method import DCD, ECD
from workers import play, workers

torch.set_num_threads(1)

N, SIZE = 5, 12
Rate = Callable[[int], float]


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start() -> torch.Tensor:
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def _zeros(n: int = N) -> list[torch.Tensor]:
    return [torch.zeros(SIZE, dtype=torch.float64) for _ in range(n)]


def _mean(rows: list[torch.Tensor]) -> torch.Tensor:
    return sum(rows[1:], rows[0]) / len(rows)


def _top(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest by magnitude, found by sorting."""
    order = sorted(range(x.numel()), key=lambda i: -abs(float(x[i])))[:k]
    out = torch.zeros_like(x)
    for i in order:
        out[i] = x[i]
    return out


def _rate(step: int) -> float:
    return 0.05 / (1 + step % 4)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def _played(algorithm: DataParallel, rounds: int, **more: Any) -> torch.Tensor:
    """Models of worker 0 after each round; all workers have the same."""
    played = play(algorithm, _gradient, _start(), N, rounds, **more)
    assert (played.params == played.params[:, :1]).all()
    return played.params[1:, 0]


# local steps -----------------------------------------------------------------------------------


def _local(periods: list[int], beta: float, lr: Rate, *, kept: bool) -> list[torch.Tensor]:
    w, m, step, seen = _start(), _zeros(), 0, []
    for period in periods:
        ends = []
        for rank in range(N):
            x = w
            if not kept:
                m[rank] = torch.zeros_like(w)
            for number in range(step, step + period):
                m[rank] = beta * m[rank] + _gradient(rank, number, x)
                x = x - lr(number) * m[rank]
            ends.append(x)
        w, step = _mean(ends), step + period
        seen.append(w)
    return seen


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("topology", [AllReduce(), ParameterServer(servers=2)], ids=str)
def test_local_steps_are_their_loop(kept: bool, topology) -> None:
    """Post-local at first, momentum of each worker's own, a rate that changes, a short end."""
    sync = LocalSteps(every=4, after=3, keep_momentum=kept)
    algorithm = DataParallel(rule=SGD(momentum=0.7), sync=sync, topology=topology)
    expected = _local([1, 1, 1, 4, 4, 2], 0.7, _rate, kept=kept)
    _close(_played(algorithm, 6, lr=_rate, n_steps=13), torch.stack(expected))


def test_an_adaptive_period_takes_the_steps_that_it_says() -> None:
    losses = [9.0] * 6 + [4.0] * 6 + [1.0] * 99
    periods, last = [], 6
    for _ in range(5):
        periods.append(last)
        seen = losses[sum(periods[:-1]) : sum(periods)]
        last = math.ceil(math.sqrt(sum(seen) / len(seen) / 9.0) * 6)
    algorithm = DataParallel(rule=SGD(), sync=AdaptivePeriod(every=6, interval=1))
    found = _played(algorithm, 5, lr=_rate, loss=lambda _rank, batch: losses[batch])
    assert periods[0] == 6
    assert periods[-1] == 2
    _close(found, torch.stack(_local(periods, 0.0, _rate, kept=True)))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_federated_averaging_weighs_the_sampled_by_their_samples(fraction: float) -> None:
    samples, sync = (3, 8, 0, 5, 2), FedAvg(fraction=fraction, epochs=2)
    algorithm = DataParallel(rule=SGD(momentum=0.5), sync=sync)
    found = _played(algorithm, 5, lr=_rate, samples=samples, batch_samples=2)
    w, taken, me = _start(), [0] * N, workers(N, None)[0]  # type: ignore[arg-type]
    counts = set()
    for number in range(5):
        sampled = sync.sampled([float(n) for n in samples], number, me)
        counts.add(len(sampled))
        total = torch.zeros_like(w)
        for rank in sampled:
            x, m = w, torch.zeros_like(w)
            for _ in range(math.ceil(2 * samples[rank] / 2)):
                m = 0.5 * m + _gradient(rank, taken[rank], x)
                x, taken[rank] = x - _rate(number) * m, taken[rank] + 1
            total = total + samples[rank] * x
        w = total / sum(samples[rank] for rank in sampled)
        _close(found[number], w)
    assert counts == {4 if fraction == 1.0 else 2}


# labels ----------------------------------------------------------------------------------------


def _labels(rank: int, batch: int) -> float:
    return float((3 * rank + 2 * batch) % 5)


def _over_all_labels(batches: Callable[[int], list[int]], rounds: int, momentum: float) -> Any:
    w, m, seen = _start(), torch.zeros(SIZE, dtype=torch.float64), []
    for step in range(rounds):
        total, labels = torch.zeros_like(w), 0.0
        for rank in range(N):
            for batch in batches(step):
                total = total + _labels(rank, batch) * _gradient(rank, batch, w)
                labels += _labels(rank, batch)
        m = momentum * m + total / labels
        w = w - 0.05 * m
        seen.append(w)
    return torch.stack(seen)


@pytest.mark.parametrize("topology", [AllReduce(), Ring(), Hierarchical(group=2)], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"feedback": ErrorFeedback()},
        {"feedback": ErrorFeedback(rate="outside")},
        {"feedback": ECQ()},
        {"feedback": EF21()},
        {"feedback": DIANA()},
        {"feedback": GMC(momentum=0.6)},
        {"feedback": DGC(momentum=0.6, masking=False)},
        {"sync": LAG(xi=0.0)},
        {"sync": ThreePoint(zeta=0.0)},
        {"sync": CSER(every=2)},
        {"sync": GrowingBatch(growth=1.0)},
    ],
    ids=str,
)
def test_steps_are_along_the_mean_over_all_labels_not_over_workers(more, topology) -> None:
    """Workers have unequal numbers of labels, some of them none at some steps."""
    owns = getattr(more.get("feedback"), "owns_momentum", False)
    rule = SGD(momentum=0.0 if owns else 0.6)
    algorithm = DataParallel(**{"rule": rule, "topology": topology, **more})
    found = _played(algorithm, 7, lr=0.05, weight=_labels)
    _close(found, _over_all_labels(lambda step: [step], 7, 0.6))


def test_growing_batches_are_means_over_the_labels_of_all() -> None:
    sync = GrowingBatch(first=2, growth=1.5, at_most=5)
    starts, sizes = [0, 2, 5, 9, 14], [2, 3, 4, 5, 5]
    found = _played(DataParallel(rule=SGD(), sync=sync), 5, lr=0.05, weight=_labels)
    expected = _over_all_labels(lambda t: list(range(starts[t], starts[t] + sizes[t])), 5, 0.0)
    _close(found, expected)


# feedbacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["inside", "outside"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_error_feedback_is_its_loop_as_the_rate_changes(rate, momentum: float) -> None:
    algorithm = DataParallel(
        rule=SGD(momentum=momentum), compress=TopK(ratio=0.25), feedback=ErrorFeedback(rate=rate)
    )
    found = _played(algorithm, 12, lr=_rate)
    w, e, m = _start(), _zeros(), _zeros(1)[0]
    for step in range(12):
        lr = _rate(step)
        p = [e[r] + (lr if rate == "inside" else 1) * _gradient(r, step, w) for r in range(N)]
        sent = [_top(each, 3) for each in p]
        e = [a - b for a, b in zip(p, sent, strict=True)]
        m = momentum * m + _mean(sent) / (lr if rate == "inside" else 1)
        w = w - lr * m
        _close(found[step], w)


@pytest.mark.parametrize(
    ("feedback", "alpha"), [(EF21(), 1.0), (DIANA(alpha=0.3), 0.3)], ids=["EF21", "DIANA"]
)
def test_what_is_known_of_each_worker_is_its_loop(feedback, alpha: float) -> None:
    algorithm = DataParallel(rule=SGD(), compress=TopK(ratio=0.25), feedback=feedback)
    found = _played(algorithm, 12, lr=_rate)
    w, h = _start(), _zeros()
    for step in range(12):
        sent = [_top(_gradient(rank, step, w) - h[rank], 3) for rank in range(N)]
        w = w - _rate(step) * _mean([a + b for a, b in zip(h, sent, strict=True)])
        h = [a + alpha * b for a, b in zip(h, sent, strict=True)]
        _close(found[step], w)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_dgc_is_its_loop_with_clipping_decay_and_warm_up(masking: bool, nesterov: bool) -> None:
    clip, beta, decay = 4.0, 0.6, 0.1
    algorithm = DataParallel(
        rule=SGD(weight_decay=decay),
        compress=TopK(ratio=1 / 12, warmup_epochs=2, epoch_steps=3),
        feedback=DGC(momentum=beta, masking=masking, nesterov=nesterov),
        local_clip_norm=clip,
    )
    found = _played(algorithm, 10, lr=_rate)
    w, u, v, clipped = _start(), _zeros(), _zeros(), 0
    for step in range(10):
        # ratios (1 / 12)^(1/3) and (1 / 12)^(2/3) of 12 entries, then one entry
        k, sent = [5, 2, 1, 1][step // 3], []
        for rank in range(N):
            g = _gradient(rank, step, w) + decay * w
            length = math.sqrt(sum(float(x) ** 2 for x in g))
            if length > clip / math.sqrt(N):
                g, clipped = g * (clip / math.sqrt(N) / (length + 1e-6)), clipped + 1
            u[rank] = beta * (u[rank] + g) if nesterov else beta * u[rank] + g
            v[rank] = v[rank] + u[rank] + (g if nesterov else 0)
            out = _top(v[rank], k)
            v[rank] = torch.where(out != 0, 0.0, v[rank])
            u[rank] = torch.where(out != 0, 0.0, u[rank]) if masking else u[rank]
            sent.append(out)
        w = w - _rate(step) * _mean(sent)
        _close(found[step], w)
    assert clipped


def test_gmc_is_its_loop_at_a_constant_rate() -> None:
    """With the term as the paper has it, of the last two models."""
    lr, beta = 0.05, 0.8
    algorithm = DataParallel(
        rule=SGD(), compress=TopK(ratio=0.25), feedback=GMC(momentum=beta), topology=Ring()
    )
    found = _played(algorithm, 12, lr=lr)
    w, last, e = _start(), _start(), _zeros()
    for step in range(12):
        p = [e[r] + _gradient(r, step, w) - beta / lr * (w - last) for r in range(N)]
        sent = [_top(each, 3) for each in p]
        e = [a - b for a, b in zip(p, sent, strict=True)]
        w, last = w - lr * _mean(sent), w
        _close(found[step], w)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("remembers", [True, False])
def test_two_ways_of_compression_are_double_squeeze(servers: int, remembers: bool) -> None:
    """Workers and servers each keep what their own packets lack."""
    shapes = {"a": (2, 3), "b": (6,)}
    via = ParameterServer(servers=servers, back=TopK(ratio=0.5), feedback=remembers)
    algorithm = DataParallel(
        rule=SGD(),
        compress=TopK(ratio=1 / 3),
        feedback=ErrorFeedback(rate="outside"),
        topology=via,
    )
    found = _played(algorithm, 10, lr=_rate, shapes=shapes)
    w, e, server = _start(), _zeros(), _zeros(1)[0]
    for step in range(10):
        p = [e[rank] + _gradient(rank, step, w) for rank in range(N)]
        sent = [torch.cat([_top(each[:6], 2), _top(each[6:], 2)]) for each in p]
        e = [a - b for a, b in zip(p, sent, strict=True)]
        q = _mean(sent) + (server if remembers else 0)
        back = torch.cat([_top(q[:6], 3), _top(q[6:], 3)])
        server, w = q - back, w - _rate(step) * back
        _close(found[step], w)


def test_one_bit_adam_through_a_server_is_its_algorithm() -> None:
    """Adam at first; then momentum of each worker with its error, and the server's own."""
    warmup, lr = 3, 0.01
    algorithm = DataParallel(
        rule=SGD(),
        compress=TopK(ratio=0.5),
        feedback=OneBitAdam(warmup=warmup),
        topology=ParameterServer(back=TopK(ratio=0.25)),
    )
    found = _played(algorithm, 9, lr=lr)
    w, e = _start(), _zeros()
    m, v, server = _zeros(3)
    for step in range(9):
        g = [_gradient(rank, step, w) for rank in range(N)]
        if step < warmup:
            m, v = 0.9 * m + 0.1 * _mean(g), 0.999 * v + 0.001 * _mean(g) ** 2
        else:
            p = [0.9 * m + 0.1 * g[rank] + e[rank] for rank in range(N)]
            sent = [_top(each, 6) for each in p]
            e = [a - b for a, b in zip(p, sent, strict=True)]
            q = _mean(sent) + server
            m = _top(q, 3)
            server = q - m
        w = w - lr * m / (v.sqrt() + 1e-8)
        _close(found[step], w)


# gossip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [DCD(), ECD()], ids=str)
@pytest.mark.parametrize(
    ("graph", "n"),
    [(RingGraph(), 2), (RingGraph(), 5), (TorusGraph(), 6), (Exponential(peers="one"), 5)],
    ids=str,
)
def test_dcd_and_ecd_are_their_loops_through_a_lossy_compressor(method, graph, n: int) -> None:
    lr, k, rounds = 0.05, 9, 8
    algorithm = DataParallel(
        rule=SGD(), compress=TopK(ratio=k / SIZE), topology=Gossip(graph=graph, method=method)
    )
    played = play(algorithm, _gradient, _start(), n, rounds, lr=lr)
    x, copies = [_start()] * n, [_start()] * n
    for step in range(rounds):
        t, matrix = step + 1, graph.weights(n, step)
        g = [_gradient(rank, step, x[rank]) for rank in range(n)]
        mixed = []
        for i in range(n):
            total = torch.zeros_like(x[0])
            for j in range(n):
                total = total + float(matrix[i, j]) * copies[j]
            mixed.append(total - lr * g[i])
        if isinstance(method, DCD):
            copies = [c + _top(a - c, k) for a, c in zip(mixed, copies, strict=True)]
            x = copies
        else:
            ahead = [(1 - t / 2) * b + t / 2 * a for a, b in zip(mixed, x, strict=True)]
            copies = [
                (1 - 2 / t) * c + 2 / t * _top(z, k) for c, z in zip(copies, ahead, strict=True)
            ]
            x = mixed
        _close(played.params[step + 1], torch.stack(x))


@pytest.mark.parametrize("sync", [EveryStep(), LocalSteps(every=3)], ids=str)
def test_under_gossip_steps_are_each_worker_s_own_then_models_are_mixed(sync) -> None:
    algorithm = DataParallel(rule=SGD(momentum=0.6), sync=sync, topology=Gossip(), compress=Dense())
    played = play(algorithm, _gradient, _start(), N, 4, lr=_rate)
    x, m, step = [_start()] * N, _zeros(), 0
    for number in range(4):
        period = 3 if isinstance(sync, LocalSteps) else 1
        for t in range(step, step + period):
            m = [0.6 * m[r] + _gradient(r, t, x[r]) for r in range(N)]
            x = [x[r] - _rate(t) * m[r] for r in range(N)]
        step += period
        x = [(x[r - 1] + x[r] + x[(r + 1) % N]) / 3 for r in range(N)]
        _close(played.params[number + 1], torch.stack(x))
