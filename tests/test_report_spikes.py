"""Loss spikes: those that are planted are found, and noise is none."""

from __future__ import annotations

import statistics

import msgspec
import numpy as np
import pytest

import report_run
from polyreme.report.spikes import Spike, spikes, usual_losses
from polyreme.runlog import StepEvent

FIRST = report_run.make_steps(1)[0]


def steps_of(losses: list[float | None] | np.ndarray) -> list[StepEvent]:
    return [
        msgspec.structs.replace(FIRST, step=index, t=float(index), loss=loss)
        for index, loss in enumerate(
            losses.tolist() if isinstance(losses, np.ndarray) else losses, start=1
        )
    ]


def found(losses: list[float | None] | np.ndarray) -> tuple[Spike, ...]:
    return spikes(steps_of(losses))


def falling(n_steps: int) -> np.ndarray:
    return 1.4 + 4.2 / (1 + np.arange(n_steps) / 14) ** 0.72


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_spike_that_is_missed(seed: int) -> None:
    losses = falling(400) + 0.05 * np.random.default_rng(seed).normal(size=400)
    losses[[120, 300, 301, 302]] += [1.0, 0.8, 2.0, 0.9]
    one, two = found(losses)
    assert (one.step, one.first, one.last) == (121, 121, 121)
    assert (two.step, two.first, two.last) == (302, 301, 303)
    assert one.loss == losses[120]
    assert one.usual == statistics.median(losses[70:120])
    assert one.rise == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.3])
@pytest.mark.slice(1)
def test_noise_that_is_called_a_spike(scale: float) -> None:
    alarms = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        alarms += len(found(3.0 + scale * draw.normal(size=300)))
        alarms += len(found(falling(300) + scale * draw.normal(size=300)))
    assert alarms == 0


def test_curves_without_a_spike_that_have_one() -> None:
    assert found(falling(400)) == ()
    assert found([2.5] * 200) == ()  # no deviation at all
    assert found([2.5] * 100 + [2.6]) == ()  # below the least share
    assert found([9.0, 1.0, 30.0] + [2.0] * 20 + [50.0]) == ()  # too early to say
    assert found([]) == found([None] * 80) == found([float("nan")] * 80) == ()


def test_a_spike_on_a_constant_loss_that_is_missed() -> None:
    (spike,) = found([2.5] * 100 + [2.8] + [2.5] * 60)
    assert (spike.step, spike.usual) == (101, 2.5)


def test_losses_that_are_not_finite_hide_no_spike() -> None:
    losses = [None if i % 3 else 2.0 + 0.01 * (i % 5) for i in range(300)]
    losses[250], losses[252], losses[253] = float("nan"), 7.0, float("inf")
    assert [spike.step for spike in found(losses)] == [253]


def test_a_new_level_is_not_a_spike_for_ever() -> None:
    (spike,) = found([2.0] * 100 + [4.0] * 200)
    assert spike.first == 101
    assert spike.last <= 130


def test_a_steady_rise_is_not_a_spike() -> None:
    assert found(2.0 + 0.02 * np.arange(300)) == ()


def test_the_usual_loss_over_a_long_run_is_that_of_each_window() -> None:
    losses = -0.01 * np.arange(20_200) + np.random.default_rng(0).normal(size=20_200) / 100
    usual, _ = usual_losses(losses)
    assert np.isnan(usual[:30]).all()
    for index in (30, 49, 50, 51, 20_049, 20_050, 20_051, 20_199):
        assert usual[index] == statistics.median(losses[max(0, index - 50) : index])
