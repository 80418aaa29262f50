"""A slice of `benchmarks/storm.py`: a fault of every kind while a run trains on 4 processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme.cluster.accelerator import detect

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.long
@pytest.mark.skipif(not detect().on_host, reason="the same bits are promised on processors")
def test_a_run_through_a_storm_ends_with_the_bits_of_a_quiet_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import storm

    setting = storm.Setting(home=tmp_path, steps=240, seconds=11.0, n_events=6, seed=4, every=10)
    with storm.disk(tmp_path / "probe") as has_disk:
        kinds = set(storm.KINDS) - ({"disk"} if not has_disk else set())
    weather, summary = storm.storm(setting, 0)
    assert not weather.wrong
    assert set(weather.events) == kinds
    assert summary["steps"] == setting.steps
