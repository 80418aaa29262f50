"""Local steps, federated averaging and growing batches: identities and the odd cases."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import PowerSGD, Sign, TopK
from polyreme.algo.feedback import EF21, GMC, ErrorFeedback, WorkerMomentum
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import AdaptivePeriod, DiLoCo, EveryStep, FedAvg, GrowingBatch, LocalSteps
from polyreme.algo.topology import Gossip, ParameterServer, Ring
from workers import play, workers

torch.set_num_threads(1)

N = 3


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "sync", [LocalSteps(every=1), LocalSteps(every=5, after=9), AdaptivePeriod(every=1)]
)
@pytest.mark.parametrize("topology", [Ring(), ParameterServer(servers=2)])
def test_one_local_step_of_sgd_a_round_is_an_exchange_at_every_step(sync, topology) -> None:
    ours = play(_of(sync, topology=topology), _gradient, _start(), N, 5)
    theirs = play(_of(EveryStep(), topology=topology), _gradient, _start(), N, 5)
    _close(ours.params, theirs.params)


def test_diloco_is_nesterov_along_the_mean_way() -> None:
    sync = DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.9)
    ours = play(_of(sync), _gradient, _start(), N, 3).params[:, 0]
    w, m = _start(), torch.zeros(12).double()
    for number in range(3):
        ends = []
        for rank in range(N):
            x = w
            for batch in (2 * number, 2 * number + 1):
                x = x - 0.1 * _gradient(rank, batch, x)
            ends.append(x)
        way = w - torch.stack(ends).mean(0)
        m = 0.9 * m + way
        w = w - 0.5 * (way + 0.9 * m)
        _close(ours[number + 1], w)


def test_rounds_end_where_the_run_does() -> None:
    played = play(_of(LocalSteps(every=4)), _gradient, _start(), 1, 2, n_steps=6)
    assert [states[0]["step"] for states in played.states] == [0, 4, 6]
    assert [record.step for record in played.records] == [1, 2, 3, 4, 5, 6]


def test_the_rule_starts_anew_only_if_told() -> None:
    rule = SGD(momentum=0.9)
    kept, anew = (
        play(_of(LocalSteps(every=2, keep_momentum=k), rule=rule), _gradient, _start(), N, 2)
        for k in (True, False)
    )
    assert kept.states[-1][0]["rule"]["momentum_buffer"].any()
    assert not anew.states[-1][0]["rule"]["momentum_buffer"].any()
    assert (kept.params[-1] - anew.params[-1]).abs().max() > 1e-3


# not finite, no data ---------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Ring(), Gossip()])
def test_a_step_that_is_not_finite_is_skipped_by_its_worker_alone(topology) -> None:
    def bad(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        return g * math.nan if (rank, batch) == (1, 2) else g

    def zero(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        return g * 0 if (rank, batch) == (1, 2) else g

    algorithm = _of(LocalSteps(every=3), topology=topology)
    ours = play(algorithm, bad, _start(), N, 2)
    assert torch.equal(ours.params, play(algorithm, zero, _start(), N, 2).params)
    steps = {record.step: record.seen.bad for record in ours.records}
    assert steps == {1: (), 2: (), 3: (1,), 4: (), 5: (), 6: ()}
    assert all(record.seen.loss is not None for record in ours.records)  # the others took it


@pytest.mark.parametrize(("sync", "skipped"), [(LocalSteps(every=2), {1}), (FedAvg(batches=2), ())])
def test_a_step_is_skipped_only_where_nobody_took_one(sync, skipped) -> None:
    """A run with a bad sample among its clients' ended as if it had learnt nothing."""

    def bad(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        return g * math.nan if batch == 0 else g  # on every worker

    played = play(_of(sync), bad, _start(), N, 2)
    assert {r.step for r in played.records if r.seen.skipped} == set(skipped)
    assert played.records[0].seen.bad == tuple(range(N))
    assert not torch.equal(played.params[1], played.params[0])


@pytest.mark.parametrize(
    "sync", [LocalSteps(every=2), AdaptivePeriod(every=2), DiLoCo(every=2), FedAvg(batches=2)]
)
@pytest.mark.parametrize("topology", [Ring(), Gossip()])
def test_a_way_that_overflows_has_all_throw_the_round_away(sync, topology) -> None:
    def huge(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        return torch.full_like(w, 3e38) if (rank, batch) == (1, 3) else g

    algorithm = _of(sync, topology=topology, feedback=ErrorFeedback(), compress=TopK(ratio=0.5))
    played = play(algorithm, huge, _start().float(), N, 3, lr=10.0)
    for start, thrown in zip(played.states[1], played.states[2], strict=True):
        assert thrown["step"] > start["step"]
        for key in ("params", "rule", "outer", "exchange"):
            assert key not in start or _same(start[key], thrown[key]), key
    assert not torch.equal(played.params[2], played.params[3])
    skipped = {record.step for record in played.records if record.seen.bad == (1,)}
    assert skipped == ({2} if isinstance(sync, FedAvg) else {3, 4})
    assert skipped == {record.step for record in played.records if record.seen.skipped}


def _same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


@pytest.mark.parametrize("sync", [LocalSteps(every=2), FedAvg(batches=2)])
@pytest.mark.parametrize("compress", [TopK(ratio=1.0), Sign(scale="mean"), PowerSGD()])
def test_a_worker_without_labels_leaves_the_mean_to_the_others(sync, compress) -> None:
    algorithm, shapes = _of(sync, compress=compress), {"w": (4, 3)}

    def weight(rank: int, _batch: int) -> float:
        return float(rank < 2)

    three = play(algorithm, _gradient, _start(), 3, 2, shapes=shapes, weight=weight)
    two = play(algorithm, _gradient, _start(), 2, 2, shapes=shapes)
    _close(three.params[:, 0], two.params[:, 0])
    assert (three.params == three.params[:, :1]).all()


@pytest.mark.parametrize("sync", [LocalSteps(every=2), FedAvg(batches=2), EveryStep()])
def test_where_nobody_has_labels_nothing_moves(sync) -> None:
    algorithm = _of(sync, rule=AdamW(weight_decay=0.1))
    played = play(algorithm, _gradient, _start(), 2, 1, weight=lambda _rank, _batch: 0.0)
    assert torch.equal(played.params[0], played.params[1])


# the adaptive period ---------------------------------------------------------------------------


def test_the_period_is_the_root_of_how_far_the_loss_has_fallen() -> None:
    losses = [4.0] * 8 + [3.0] * 8 + [1.0] * 100  # at first 8 steps a round

    def loss(rank: int, batch: int) -> float:
        return losses[batch] * (0.5 + 0.5 * rank)  # over three workers the mean is losses[batch]

    algorithm = _of(AdaptivePeriod(every=8, interval=8))
    played = play(algorithm, _gradient, _start(), N, 6, loss=loss)
    periods = [states[0]["period"] for states in played.states]
    # ceil(sqrt(3 / 4) 8) = 7 and ceil(sqrt(1 / 4) 8) = 4, each once an interval has passed
    assert periods == [8, 8, 7, 7, 4, 4, 4]
    assert {states[0]["first_loss"] for states in played.states[1:]} == {4.0}
    assert [s[0]["step"] for s in played.states] == [0, 8, 16, 23, 30, 34, 38]


@pytest.mark.parametrize(("stuck", "expected"), [(1.0, [6, 6, 6]), (0.5, [3, 2, 1])])
def test_a_period_that_is_stuck_shrinks_if_told(stuck: float, expected: list[int]) -> None:
    algorithm = _of(AdaptivePeriod(every=6, interval=1, stuck=stuck))
    played = play(algorithm, _gradient, _start(), 2, 3, loss=lambda _rank, _batch: 2.0)
    assert [states[0]["period"] for states in played.states[1:]] == expected


@pytest.mark.parametrize(("first", "later"), [(1.0, 9.0), (0.0, 1.0), (-1.0, 2.0)])
def test_a_loss_that_rises_or_is_not_above_zero_leaves_the_period(first, later) -> None:
    algorithm = _of(AdaptivePeriod(every=3, interval=1))
    played = play(
        algorithm, _gradient, _start(), 2, 3, loss=lambda _rank, b: first if b < 3 else later
    )
    assert [states[0]["period"] for states in played.states] == [3, 3, 3, 3]


def test_a_loss_of_zero_leaves_a_period_of_one() -> None:
    algorithm = _of(AdaptivePeriod(every=3, interval=1))
    played = play(algorithm, _gradient, _start(), 2, 3, loss=lambda _rank, b: float(b < 3))
    assert played.states[-1][0]["period"] == 1


# federated averaging ---------------------------------------------------------------------------


def test_all_clients_with_a_batch_each_are_synchronous_sgd() -> None:
    for sync in (FedAvg(batches=1), FedAvg()):
        ours = play(_of(sync), _gradient, _start(), N, 5, samples=(7, 7, 7), batch_samples=7)
        _close(ours.params, play(_of(EveryStep()), _gradient, _start(), N, 5).params)


def test_clients_count_by_their_samples_and_pass_over_all_of_them() -> None:
    taken: list[tuple[int, int]] = []

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        taken.append((rank, batch))
        return _gradient(rank, batch, w)

    samples = (4, 10, 0)
    algorithm = _of(FedAvg(epochs=2))
    played = play(algorithm, gradient, _start(), N, 1, samples=samples, batch_samples=4)
    assert taken == [(0, 0), (0, 1), *((1, batch) for batch in range(5))]
    assert [state["batch"] for state in played.states[-1]] == [2, 5, 0]
    ends = []
    for rank, n in ((0, 2), (1, 5)):
        x = _start()
        for batch in range(n):
            x = x - 0.1 * _gradient(rank, batch, x)
        ends.append(x)
    _close(played.params[1, 0], (4 * ends[0] + 10 * ends[1]) / 14)
    assert (played.params == played.params[:, :1]).all()


def test_the_sampled_are_as_many_as_told_the_same_for_all_and_others_in_turn() -> None:
    sync, team = FedAvg(fraction=0.5), workers(10, None, seed=3)  # type: ignore[arg-type]
    holds = [5.0] * 8 + [0.0] * 2
    rounds = [{sync.sampled(holds, step, me) for me in team} for step in range(40)]
    assert all(len(found) == 1 for found in rounds)
    sampled = [next(iter(found)) for found in rounds]
    assert all(len(each) == 4 for each in sampled)
    counts = [sum(rank in each for each in sampled) for rank in range(10)]
    assert counts[8:] == [0, 0]
    assert all(8 <= count <= 32 for count in counts[:8])
    assert len(FedAvg(fraction=0.01).sampled(holds, 0, team[0])) == 1


@pytest.mark.parametrize("compress", [TopK(ratio=0.25), PowerSGD(rank=1)])
def test_clients_that_are_not_sampled_compute_nothing_and_keep_what_they_have(compress) -> None:
    sync = FedAvg(fraction=0.4, batches=2)
    algorithm = _of(sync, compress=compress, feedback=ErrorFeedback())
    shapes = {"w": (4, 3)}
    played = play(algorithm, _gradient, _start(), 5, 4, shapes=shapes)
    for number, (before, after) in enumerate(zip(played.states, played.states[1:], strict=False)):
        sampled = sync.sampled([1.0] * 5, number, workers(5, None)[0])  # type: ignore[arg-type]
        assert len(sampled) == 2
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            assert (new["batch"] - old["batch"]) == (2 if rank in sampled else 0)
            same = _same(old["exchange"]["feedback"], new["exchange"]["feedback"])
            assert same == (rank not in sampled)
        assert all(torch.equal(new["params"], after[0]["params"]) for new in after)


def test_clients_that_are_not_sampled_send_four_bytes_a_tensor() -> None:
    shapes = {"a": (5,), "b": (7,)}
    sizes = {}
    for fraction in (0.25, 0.5, 1.0):
        algorithm = _of(FedAvg(fraction=fraction, batches=1))
        sizes[fraction] = sum(play(algorithm, _gradient, _start(), 4, 1, shapes=shapes).nbytes)
    vector, told = 12 * 8, 4 * 8  # what clients hold is told by all, in 8 bytes each
    assert sizes[1.0] == told + 4 * vector
    assert sizes[0.5] == told + 2 * vector + 4 * 2 * 4
    assert sizes[0.25] == told + vector + 4 * 2 * 4


def test_estimates_of_clients_that_are_not_sampled_go_on_counting() -> None:
    """Of ways that never change EF21 knows the mean over all clients once all were sampled."""
    algorithm = _of(FedAvg(fraction=0.4, batches=1), feedback=EF21())
    ways = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    played = play(
        algorithm,
        lambda rank, _batch, w: torch.full_like(w, float(ways[rank])),
        _start(),
        5,
        25,
        lr=1.0,
        samples=(1, 1, 1, 1, 4),
        batch_samples=4,
    )
    mean = (ways * torch.tensor([1, 1, 1, 1, 4])).sum() / 8
    _close(played.params[-2, 0] - played.params[-1, 0], torch.full((12,), float(mean)).double())


# growing batches -------------------------------------------------------------------------------


def test_batches_grow_geometrically_to_their_bound() -> None:
    sync = GrowingBatch(first=2, growth=1.5, at_most=9)
    assert [sync.n_batches(step) for step in range(6)] == [2, 3, 4, 6, 9, 9]
    assert sync.n_batches(10**6) == 9
    played = play(_of(sync), _gradient, _start(), 2, 4)
    assert [states[0]["batch"] for states in played.states] == [0, 2, 5, 9, 15]
    assert [record.step for record in played.records] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_step_is_along_the_mean_over_labels_of_all_batches_of_all_workers() -> None:
    def weight(rank: int, batch: int) -> float:
        return float((rank + 2 * batch) % 4)

    sync = GrowingBatch(first=3, growth=1.0)
    played = play(_of(sync), _gradient, _start(), N, 1, weight=weight)
    total, labels = torch.zeros(12).double(), 0.0
    for rank in range(N):
        for batch in range(3):
            total += weight(rank, batch) * _gradient(rank, batch, _start())
            labels += weight(rank, batch)
    _close(played.params[1, 0], _start() - 0.1 * total / labels)


def test_batches_that_do_not_grow_are_those_of_every_step() -> None:
    ours = play(_of(GrowingBatch(growth=1.0)), _gradient, _start(), N, 4)
    assert torch.equal(ours.params, play(_of(EveryStep()), _gradient, _start(), N, 4).params)


# votes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Ring(), ParameterServer(servers=2)])
def test_signs_and_votes_are_sign_sgd_with_majority_vote(topology) -> None:
    algorithm = _of(EveryStep(), compress=Sign(), aggregate=MajorityVote(), topology=topology)
    shapes = {"a": (5,), "b": (7,)}
    params = play(algorithm, _gradient, _start(), 3, 4, shapes=shapes).params
    for number in range(4):
        w = params[number, 0]
        votes = torch.stack([_gradient(rank, number, w) for rank in range(3)]).sign().sum(0)
        _close(params[number + 1, 0], w - 0.1 * votes.sign())


def test_ties_zeros_and_nan_are_no_votes() -> None:
    nan, inf = math.nan, math.inf
    rows = torch.tensor([[1.0, 2.0, 0.0, nan, inf, nan], [-5.0, 3.0, -1.0, 2.0, -1.0, nan]])
    out, _, excluded = MajorityVote().combine(list(rows), {})
    assert out.tolist() == [0, 1, -1, 1, 0, 0]
    assert excluded == ()


def test_a_worker_without_labels_has_no_vote() -> None:
    algorithm = _of(EveryStep(), compress=Sign(), aggregate=MajorityVote())
    played = play(
        algorithm,
        lambda rank, _batch, w: torch.full_like(w, -1.0 if rank else 0.0),
        _start(),
        2,
        1,
        weight=lambda rank, _batch: float(rank),
    )
    _close(played.params[1], (_start() + 0.1).expand(2, -1))


@pytest.mark.parametrize("feedback", [GMC(), WorkerMomentum(dampened=False)])
def test_momentum_that_a_feedback_owns_acts_on_ways(feedback) -> None:
    ours = play(_of(LocalSteps(every=1), feedback=feedback), _gradient, _start(), N, 4).params
    if isinstance(feedback, WorkerMomentum):
        theirs = play(_of(EveryStep(), rule=SGD(momentum=0.9)), _gradient, _start(), N, 4).params
        _close(ours, theirs)
    assert (ours == ours[:, :1]).all()
    plain = play(_of(LocalSteps(every=1)), _gradient, _start(), N, 4).params
    assert (ours[-1] - plain[-1]).abs().max() > 1e-3
