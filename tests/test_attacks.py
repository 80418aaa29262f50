"""What hostile workers send, held to each attack's definition in numpy; who is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

import hostile
from hostile import SEEN, D, N, played, vectors
from polyreme.algo.aggregate import MajorityVote, Mean
from polyreme.algo.attack import (
    ALIE,
    Attack,
    InnerProduct,
    LabelFlip,
    Mimic,
    Noise,
    NotFinite,
    Optimised,
    Replay,
    SignFlip,
    Silence,
)
from polyreme.algo.attack.kind import Aim
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Sign, TopK
from polyreme.algo.draw import Draw
from polyreme.algo.effects import SumShards, alone, settled, together
from polyreme.algo.feedback import EF21, ErrorFeedback, WorkerMomentum
from polyreme.algo.rule import SGD, SNGD
from polyreme.algo.sync import CSER, LAG, EveryStep, FedAvg, LocalSteps
from polyreme.algo.topology import AllReduce, ParameterServer, Ring
from workers import play

HONEST = slice(0, 4)
TWO = (4, 5)


def _rows(attack: Attack, step: int = 0, **members: Any) -> np.ndarray:
    played([attack], steps=step + 1, **members)
    return SEEN[-1]


def test_a_flipped_sign_is_the_opposite_times_its_scale() -> None:
    rows = vectors(0)
    found = _rows(SignFlip(workers=TWO, scale=3.0))
    np.testing.assert_array_equal(found, hostile.of(rows, {4: -3 * rows[4], 5: -3 * rows[5]}))


@pytest.mark.parametrize("relative", [False, True])
def test_noise_is_normal_and_each_worker_s_own(relative: bool) -> None:
    wide = np.ones((N, 4000), np.float32)
    vector = torch.from_numpy(wide[0])
    attack = Noise(workers=TWO, sigma=0.5, relative=relative)
    draws = [Draw(seed=0, worker=rank, step=1) for rank in TWO]
    noises = [alone(attack.sent(vector, {}, draw))[0].numpy() - 1 for draw in draws]
    scale = 0.5 * (math.sqrt(4000) if relative else 1)
    for noise in noises:
        assert abs(noise.mean()) < 5 * scale / math.sqrt(4000)
        assert abs(noise.std() / scale - 1) < 0.06
    assert abs(np.corrcoef(*noises)[0, 1]) < 0.08
    again = alone(attack.sent(vector, {}, draws[0]))[0].numpy() - 1
    np.testing.assert_array_equal(again, noises[0])


@pytest.mark.parametrize("z", [None, 1.5])
def test_a_little_is_the_mean_less_z_deviations(z: float | None) -> None:
    rows = vectors(0)
    honest = rows[HONEST].astype(np.float64)
    n, f = N, 2
    s = n // 2 + 1 - f
    deviations = norm.ppf((n - f - s) / (n - f)) if z is None else z
    sent = honest.mean(0) - deviations * honest.std(0)
    found = _rows(ALIE(workers=TWO, z=z))
    np.testing.assert_allclose(found, hostile.of(rows, {4: sent, 5: sent}), rtol=2e-6)
    np.testing.assert_array_equal(found[HONEST], rows[HONEST])


def test_z_of_baruch_s_numbers() -> None:
    """n = 50, f = 24 gives s = 2 and z = ppf(24 / 26), as in the paper's experiments."""
    assert ALIE(workers=tuple(range(24))).deviations(50) == pytest.approx(1.42607687, abs=1e-6)
    assert ALIE(workers=TWO, z=0.3).deviations(50) == 0.3


def test_inner_product_is_against_the_honest_mean() -> None:
    rows = vectors(0)
    sent = -0.4 * rows[HONEST].mean(0)
    found = _rows(InnerProduct(workers=TWO, epsilon=0.4))
    np.testing.assert_allclose(found, hostile.of(rows, {4: sent, 5: sent}), rtol=2e-6)


def test_a_named_worker_is_mimicked() -> None:
    rows = vectors(0)
    found = _rows(Mimic(workers=TWO, worker=2))
    np.testing.assert_array_equal(found, hostile.of(rows, {4: rows[2], 5: rows[2]}))


def test_the_mimicked_is_whoever_stands_out_where_honest_workers_differ_most() -> None:
    """By the recursion in float64, and one that is far from the others is found."""

    def given(step: int) -> np.ndarray:
        rows = vectors(step) * 0.1
        rows[3, 1] += 2.0
        return rows

    steps, warm_up = 8, 5
    played([Mimic(workers=TWO, warm_up=warm_up)], steps=steps, given=given)
    generator = Draw(seed=3, worker=0, step=0).at(-2).at(0).shared()
    z = torch.randn(D, generator=generator, dtype=torch.float64).numpy()
    z /= np.linalg.norm(z)
    m, sums = np.zeros(D), np.zeros(4)
    for step in range(steps):
        x = given(step)[HONEST].astype(np.float64)
        if step < warm_up:
            m = step / (step + 1) * m + x.mean(0) / (step + 1)
            z = step / (step + 1) * z + ((x - m).T @ ((x - m) @ z)) / (step + 1)
            z /= np.linalg.norm(z)
            sums += (x - m) @ z
        chosen = int(np.abs(sums).argmax())
        np.testing.assert_array_equal(SEEN[step][4], x[chosen].astype(np.float32))
        np.testing.assert_array_equal(SEEN[step][5], SEEN[step][4])
    assert chosen == 3


@pytest.mark.parametrize("direction", ["deviation", "mean"])
def test_what_is_optimised_does_more_harm_than_any_gamma_of_a_grid(direction: str) -> None:
    rows = vectors(0).astype(np.float64)
    honest = rows[HONEST]
    middle = honest.mean(0)
    away = honest.std(0) if direction == "deviation" else middle

    def harm(row: np.ndarray) -> float:
        whole = np.vstack([honest, row, row])
        order = np.argsort(whole.sum(1), kind="stable")
        return float(np.linalg.norm(whole[order[N // 2]] - middle))

    found = _rows(Optimised(workers=TWO, direction=direction, tries=32))  # type: ignore[arg-type]
    assert len(SEEN) == 33
    gamma = ((middle - found[4]) / away).mean()
    np.testing.assert_allclose(found[4], middle - gamma * away, rtol=1e-5, atol=1e-6)
    assert harm(found[4]) >= max(harm(middle - 2.0**k * away) for k in range(5)) - 1e-5
    assert harm(found[4]) >= max(harm(middle - g * away) for g in np.linspace(0.5, 2, 7)) * 0.9


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_reaches_the_aggregate_which_sets_it_aside(value: str) -> None:
    states, (record,) = played([NotFinite(workers=(5,), value=value)])  # type: ignore[arg-type]
    np.testing.assert_array_equal(SEEN[0][5], np.full(D, float(value), np.float32))
    assert record.suspects == (5,)
    assert not record.seen.skipped
    assert all(torch.isfinite(state["params"]).all() for state in states)


def test_with_a_mean_what_is_not_finite_spoils_the_model_and_later_steps_are_skipped() -> None:
    states, _ = played([NotFinite(workers=(5,))], aggregate=Mean())
    assert all(torch.isnan(state["params"]).all() for state in states)


@pytest.mark.parametrize("topology", [AllReduce(), ParameterServer()], ids=str)
def test_a_silent_worker_is_no_row_and_a_suspect(topology: Any) -> None:
    _, records = played([Silence(workers=(1, 4))], steps=2, topology=topology)
    for step, rows in enumerate(SEEN):
        np.testing.assert_array_equal(rows, vectors(step)[[0, 2, 3, 5]])
    assert [record.suspects for record in records] == [(1, 4)] * 2


def test_a_silent_worker_counts_as_zero_in_a_mean() -> None:
    states, _ = played([Silence(workers=(1,))], aggregate=Mean())
    rows = hostile.of(vectors(0), {1: np.zeros(D)})
    np.testing.assert_allclose(states[0]["params"].numpy(), -rows.mean(0), rtol=1e-6)


@pytest.mark.parametrize(("steps", "ago"), [(None, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 2])])
def test_a_replayed_vector_is_the_first_or_that_of_so_many_steps_ago(
    steps: int | None, ago: list[int]
) -> None:
    played([Replay(workers=(5,), steps=steps)], steps=5)
    for step, old in enumerate(ago):
        np.testing.assert_array_equal(SEEN[step][5], vectors(old)[5])


def test_flipped_labels_are_the_other_end_of_the_classes() -> None:
    labels = torch.tensor([[0, 9, -100], [4, 5, 1]])
    found = LabelFlip(workers=(0,)).labelled(labels, 10)
    assert found.tolist() == [[9, 0, -100], [5, 4, 8]]


def test_attacks_of_one_run_each_take_their_own_workers() -> None:
    """Those that see the others count no hostile worker among the honest, whatever it does."""
    rows = vectors(0)
    played(
        [
            ALIE(workers=(5,), z=1.0),
            SignFlip(workers=(4,)),
            NotFinite(workers=(3,)),
            LabelFlip(workers=(2,)),
        ]
    )
    honest = rows[:2].astype(np.float64)
    sent = honest.mean(0) - honest.std(0)
    wanted = hostile.of(rows, {5: sent, 4: -rows[4], 3: np.full(D, np.nan)})
    np.testing.assert_allclose(SEEN[0], wanted, rtol=2e-6)


@pytest.mark.parametrize(
    "members",
    [
        {"sync": LocalSteps(every=2)},
        {"sync": FedAvg(batches=1)},
        {"sync": LAG(xi=0.0), "aggregate": Mean()},
        {"sync": CSER(every=2), "aggregate": Mean()},
        {"feedback": EF21(), "aggregate": Mean()},
        {"feedback": ErrorFeedback(), "compress": TopK(ratio=0.5)},
        {"topology": Ring()},
        {"topology": ParameterServer(servers=2), "aggregate": MajorityVote()},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "attack", [SignFlip(workers=TWO), ALIE(workers=TWO, z=5.0), Silence(workers=TWO)]
)
def test_all_workers_come_to_the_same_other_model_under_an_attack(
    attack: Attack, members: dict[str, Any]
) -> None:
    def given(step: int) -> np.ndarray:
        return vectors(step) - 1

    states, _ = played([attack], steps=8, given=given, **members)
    clean, _ = played([], steps=8, given=given, **members)
    params = [state["params"] for state in states]
    assert all(torch.equal(each, params[0]) for each in params)
    assert torch.isfinite(params[0]).all()
    assert not torch.equal(params[0], clean[0]["params"])


def test_the_hostile_feed_momentum_as_the_honest_do_and_send_its_opposite() -> None:
    played([SignFlip(workers=(5,))], steps=2, feedback=WorkerMomentum(momentum=0.5, dampened=True))
    first, second = vectors(0), vectors(1)
    momentum = 0.5 * first + 0.5 * second
    np.testing.assert_allclose(SEEN[1], hostile.of(momentum, {5: -momentum[5]}), rtol=1e-6)


def test_what_sees_the_others_is_sent_in_the_form_that_packets_have() -> None:
    """Under signs it is a sign, not the numbers that packets cannot hold."""
    found = _rows(InnerProduct(workers=TWO, epsilon=0.4), compress=Sign(per="model"))
    assert set(np.unique(np.abs(found))) == {1.0}
    np.testing.assert_array_equal(found[4], -np.sign(np.sign(vectors(0))[HONEST].mean(0) + 1e-9))


@pytest.mark.parametrize(
    "attack",
    [
        ALIE(workers=TWO, z=1.0),
        InnerProduct(workers=TWO),
        Mimic(workers=TWO, warm_up=2),
        Optimised(workers=TWO, tries=6),
        Noise(workers=TWO, relative=True),
    ],
    ids=str,
)
def test_parts_of_a_replica_send_parts_of_what_the_whole_sends(attack: Any) -> None:
    """Norms, inner products and harm are of all parts together."""
    wide, cut = np.random.default_rng(5).normal(size=(N, 60)), 25
    draw = Draw(seed=1, worker=4, step=0)

    def shown(part: slice) -> Any:
        rows = torch.from_numpy(wide[:, part].copy())
        if not attack.sees:
            # Its numbers are drawn part by part: what is compared is how far they reach.
            sent, _ = yield from attack.sent(rows[4], {}, draw)
            numbers = torch.randn(rows[4].shape, generator=draw.own(), dtype=torch.float64)
            return (sent - rows[4]) / numbers

        def aggregate(row: torch.Tensor) -> Any:
            total = yield SumShards(partial=row.sum())
            return rows[:4].mean(0) + row * (total.abs() < 30)

        state, aim = attack.init(rows[0], N), Aim(n=N, draw=draw, aggregate=aggregate)
        if "direction" in state:  # the drawn start is of each part
            state |= {"direction": torch.from_numpy(np.linspace(-1, 1, 60)[part].copy()), "seen": 1}
        sent, _ = yield from settled(attack.made(dict(enumerate(rows[:4])), state, aim))
        return sent

    whole = alone(shown(slice(None)))
    parts = together([shown(slice(cut)), shown(slice(cut, None))])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def _gradient(rank: int, batch: int, params: torch.Tensor) -> torch.Tensor:
    drawn = np.random.default_rng((rank, batch)).normal(size=params.numel())
    return torch.from_numpy(drawn).float() + params


@pytest.mark.parametrize("rule", [SNGD(lr=0.1), SGD(lr=0.1)], ids=str)
def test_momentum_of_nothing_the_mean_and_no_attack_are_plain_training(rule: Any) -> None:
    """ByzSGDnm without any of these is SNGD, ByzSGDm is SGD, to the bit."""
    plain = DataParallel(rule=rule)
    byzantine = DataParallel(rule=rule, feedback=WorkerMomentum(momentum=0.0), aggregate=Mean())
    start = torch.arange(5.0)
    one, other = (play(each, _gradient, start, 4, 6).params for each in (plain, byzantine))
    assert torch.equal(one, other)
    assert not torch.equal(one[-1], one[0])


def test_a_step_of_every_worker_is_told_as_it_is() -> None:
    """Hostile workers tell of their batches what is so: losses are not touched."""
    _, (record,) = played([SignFlip(workers=TWO)], sync=EveryStep())
    assert record.seen.loss == 1.0
    assert record.seen.n_samples == N
