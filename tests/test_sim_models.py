"""Models of computing and of networks: the seconds that they give."""

from __future__ import annotations

import statistics
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from polyreme.sim.compute import (
    Compute,
    Constant,
    Exponential,
    Factors,
    File,
    Gamma,
    Heterogeneous,
    LogNormal,
    Pareto,
    Periodic,
    Stragglers,
)
from polyreme.sim.compute.draws import uniform
from polyreme.sim.network import Hosts, SlowLinks, Uniform
from polyreme.sim.options import Simulate

N = 4000
PINNED = [0.7999305087237619, 0.768352024471768, 0.1648301539150273]
RANDOM = [
    (Exponential(seconds=2.0), 2.0, 2.0),
    (Exponential(seconds=2.0, constant=0.75), 2.0, 0.5),
    (LogNormal(seconds=3.0, spread=0.5), 3.0, 1.5),
    (Gamma(seconds=2.0, machine_spread=1e-6, spread=0.3), 2.0, 0.6),
]


def _seconds(model: Compute, rank: int = 0, n: int = 4, seed: int = 0) -> list[float]:
    return [model.gradient_s(rank, n, batch, seed) for batch in range(N)]


@pytest.mark.parametrize(("model", "mean_s", "deviation_s"), RANDOM, ids=str)
def test_drawn_seconds_have_the_stated_mean_and_spread(model, mean_s, deviation_s):
    drawn = _seconds(model)
    assert min(drawn) > 0
    assert statistics.fmean(drawn) == pytest.approx(mean_s, abs=4 * deviation_s / N**0.5)
    assert statistics.stdev(drawn) == pytest.approx(deviation_s, rel=0.12)


def test_exponential_seconds_have_no_memory_beyond_their_constant_part():
    drawn = np.array(_seconds(Exponential(seconds=1.0, constant=0.5)))
    assert drawn.min() >= 0.5
    for quantile in (0.1, 0.5, 0.9):
        expected = 0.5 - 0.5 * np.log(1 - quantile)
        assert np.quantile(drawn, quantile) == pytest.approx(expected, rel=0.1)


def test_gamma_machines_differ_and_keep_their_speed():
    model = Gamma(seconds=1.0, machine_spread=0.6, spread=0.01)
    means = [statistics.fmean(model.gradient_s(r, 500, b, 0) for b in range(5)) for r in range(500)]
    assert statistics.fmean(means) == pytest.approx(1.0, abs=0.1)
    assert statistics.stdev(means) == pytest.approx(0.6, rel=0.15)
    again = [model.gradient_s(3, 500, b, 0) for b in range(100, 120)]
    assert statistics.fmean(again) == pytest.approx(means[3], rel=0.02)


@pytest.mark.parametrize("model", [each for each, *_ in RANDOM] + [Stragglers(), Pareto()], ids=str)
def test_draws_are_functions_of_seed_worker_and_batch_alone(model):
    backwards = [model.gradient_s(0, 4, batch, 0) for batch in reversed(range(200))]
    assert backwards[::-1] == _seconds(model)[:200]
    assert _seconds(model)[:200] != _seconds(model, rank=1)[:200]
    assert _seconds(model)[:200] != _seconds(model, seed=1)[:200]


def test_uniform_numbers_stay_inside_and_do_not_change_between_versions():
    drawn = [uniform(5, index) for index in range(N)]
    assert 0 < min(drawn) < max(drawn) < 1
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert ((counts - N / 10) ** 2 / (N / 10)).sum() < 27.9  # chi-square, 9 degrees, p = 0.001
    assert [uniform(1, 2, 3), uniform(1, 2), uniform(2, 1)] == PINNED


def test_stragglers_are_slow_for_whole_spells_with_their_probability():
    model = Stragglers(seconds=2.0, probability=0.25, factor=3.0, spell=10)
    drawn = np.array(_seconds(model)).reshape(-1, 10)
    assert set(drawn.flatten()) == {2.0, 6.0}
    assert (drawn == drawn[:, :1]).all()
    slow = (drawn[:, 0] == 6.0).mean()
    assert slow == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(drawn)) ** 0.5)


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 1.0), (1.0, 5.0)])
def test_stragglers_never_or_always(probability, expected):
    assert set(_seconds(Stragglers(probability=probability))) == {expected}


def test_fixed_models_give_each_worker_its_own():
    slow = Heterogeneous(seconds=2.0, slow_fraction=0.25, slow_factor=3.0)
    assert [slow.gradient_s(rank, 4, 7, 0) for rank in range(4)] == [6.0, 2.0, 2.0, 2.0]
    factors = Factors(seconds=2.0, factors=(1.0, 0.5))
    assert [factors.gradient_s(rank, 3, 0, 0) for rank in range(3)] == [2.0, 1.0, 2.0]
    assert Constant(seconds=0.5).gradient_s(9, 10, 3, 1) == 0.5


def test_a_file_is_read_line_by_worker_and_starts_anew(tmp_path):
    path = tmp_path / "seconds.txt"
    path.write_text("1 2.5, 3\n4\n\n")
    model = File(path=str(path))
    assert [model.gradient_s(0, 3, batch, 0) for batch in range(4)] == [1.0, 2.5, 3.0, 1.0]
    assert [model.gradient_s(rank, 3, 5, 0) for rank in (1, 2)] == [4.0, 3.0]
    assert not Simulate(compute=model).check()


@pytest.mark.parametrize("text", ["", "1 x\n", "1 0\n", "1 nan\n", "1 -2\n", None])
def test_a_file_that_holds_no_seconds_is_refused(tmp_path, text):
    path = tmp_path / "seconds.txt"
    if text is not None:
        path.write_text(text)
    (found,) = Simulate(compute=File(path=str(path))).check()
    assert found.path == "simulate.compute.path"
    assert "holds no seconds" in found.rule


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 2\n3,,4\n", "line 2 has an empty place beside a comma"),
        ("1, 2,\n", "line 1 has an empty place beside a comma"),
        ("1 2\n\n3 4\n", "line 2 is blank"),
        ("1\n2 3\n4 x 5\n", "line 3: x is no number"),
        ("1\n2 -3\n", "line 2: -3 is no positive number"),
        ("1\ninf\n", "line 2: inf is no positive number"),
    ],
)
def test_a_hole_in_a_file_is_named_with_its_line(tmp_path, text, told):
    path = tmp_path / "seconds.txt"
    path.write_text(text)
    (found,) = Simulate(compute=File(path=str(path))).check()
    assert told in found.rule


def test_pareto_seconds_have_the_stated_mean_and_a_tail_that_falls_as_a_power():
    model = Pareto(seconds=3.0, shape=2.5)
    drawn = np.array(_seconds(model))
    least = 3.0 * 1.5 / 2.5
    assert drawn.min() >= least
    assert drawn.mean() == pytest.approx(3.0, abs=4 * least * (2.5 / (1.5**2 * 0.5) / N) ** 0.5)
    for quantile in (0.1, 0.5, 0.9, 0.99):
        expected = least * (1 - quantile) ** (-1 / 2.5)
        assert np.quantile(drawn, quantile) == pytest.approx(expected, rel=0.1)


def test_a_periodic_worker_is_slow_for_its_share_of_each_period():
    model = Periodic(seconds=2.0, factor=3.0, period=8, share=0.25, phases=(0.0, 0.5, 0.875))
    took = [[model.gradient_s(rank, 4, b, 0) for b in range(16)] for rank in range(4)]
    assert [[b for b in range(16) if each[b] == 6.0] for each in took] == [
        [0, 1, 8, 9],
        [4, 5, 12, 13],
        [1, 2, 9, 10],
        [0, 1, 8, 9],
    ]


def test_phases_of_periodic_workers_are_drawn_for_each():
    model = Periodic(factor=2.0, period=10, share=0.5)
    first = [
        next(b for b in range(10) if model.gradient_s(r, 200, b, 0) == 2.0) for r in range(200)
    ]
    assert set(first) == {0, 1, 2, 3, 4, 5}  # who begins in the middle of it is slow at once
    for rank in range(200):
        assert sum(_seconds(model, rank)[:1000]) == 1500
    drawn = [_seconds(model, rank)[:10] for rank in range(200)]
    assert drawn == [_seconds(model, rank)[10:20] for rank in range(200)]
    assert len({tuple(each) for each in drawn}) == 10


def test_a_ring_takes_n_minus_1_messages_in_a_row():
    network = Uniform(latency_s=0.5, bytes_per_s=100.0)
    assert network.gathering_s([50]) == 0
    assert network.gathering_s([50, 50]) == pytest.approx(1.0)
    assert network.gathering_s([100] * 4) == pytest.approx(3 * 1.5)


def test_a_ring_of_unequal_messages_by_hand():
    # Latency 0, a byte a second; worker 0 has 3 bytes, others 1. The 3 bytes leave worker 0 until
    # 3 and worker 1 until 6. Worker 0 has the byte of 2 at 1 and passes it on from 3 to 4; no
    # other way ends later than 6.
    assert Uniform(latency_s=0.0, bytes_per_s=1.0).gathering_s([3, 1, 1]) == pytest.approx(6.0)


def test_a_slow_link_holds_up_the_whole_ring():
    network = SlowLinks(latency_s=0.0, bytes_per_s=100.0, slow=(1,), slow_factor=4.0)
    assert network.gathering_s([100] * 3) == pytest.approx(8.0)


def test_a_ring_over_hosts_is_as_slow_as_the_links_between_them():
    network = Hosts(
        per_host=2, latency_s=0.0, bytes_per_s=1.0, inside_latency_s=0.0, inside_bytes_per_s=1e9
    )
    assert network.gathering_s([1, 1]) == pytest.approx(1e-9)
    assert network.gathering_s([1] * 4) == pytest.approx(3.0, rel=1e-6)


def test_workers_of_a_host_share_its_link():
    network = Hosts(per_host=2)
    assert network.way(0, 2, 5).out == network.way(1, 4, 5).out
    assert network.way(0, 2, 5).into == network.way(4, 3, 5).into
    assert network.way(0, 1, 5).out != network.way(0, 2, 5).out
    assert network.way(0, 1, 5).out != network.way(1, 0, 5).out


def test_a_slow_worker_that_is_not_there_is_refused():
    (found,) = Simulate(workers=4, network=SlowLinks(slow=(0, 4))).check()
    assert (found.path, found.value) == ("simulate.network.slow", [0, 4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"worker": 4},
        {"compute": {"kind": "constant", "seconds": 0}},
        {"compute": {"kind": "constant", "second": 1.0}},
        {"compute": {"kind": "factors", "factors": []}},
        {"compute": {"kind": "exponential", "constant": 1.0}},
        {"compute": {"kind": "stragglers", "spell": 0}},
        {"compute": {"kind": "pareto", "shape": 1.0}},
        {"compute": {"kind": "periodic", "phases": [1.0]}},
        {"compute": {"kind": "periodic", "period": 0}},
        {"network": {"kind": "uniform", "loss": 1.0}},
        {"network": {"kind": "hosts", "jitter_s": -1.0}},
        {"faults": [{"kind": "crash", "worker": 0}]},
        {"faults": [{"kind": "join", "worker": -1, "at_s": 1.0}]},
        {"faults": [{"kind": "random_crashes", "every_s": 0}]},
        {"network": {"kind": "uniform", "bytes_per_s": 0}},
        {"network": {"kind": "slow_links", "slow_factor": 0.5}},
        {"network": {}},
    ],
    ids=str,
)
def test_options_that_say_nothing_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Simulate)


def test_options_are_read_by_kind():
    options = msgspec.convert(
        {
            "workers": 64,
            "compute": {"kind": "gamma", "machine_spread": 0.6},
            "network": {"kind": "hosts", "per_host": 4},
        },
        Simulate,
    )
    assert options.compute == Gamma(machine_spread=0.6)
    assert options.network == Hosts(per_host=4)


def test_options_are_read_without_torch():
    code = "import sys; sys.modules['torch'] = None; import polyreme.sim.options"
    subprocess.run([sys.executable, "-c", code], check=True)
