"""Delays on the page: every gradient is counted once, late workers are seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from polyreme import api
from polyreme.report import delays
from polyreme.report.runs import Run, read_run

SPEC = """
[model]
kind = "mlp"
hidden = [4]

[data]
kind = "digits"

[train]
steps = 12
global_batch = 16
eval_every = 6
checkpoint_every = 5

[data_parallel]
rule = { kind = "SGD", lr = 0.01 }
sync = { kind = "OrMo" }

[simulate]
workers = 4
compute = { factors = [1.0, 1.0, 1.0, 6.0] }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("delays")
    (folder / "spec.toml").write_text(SPEC)
    api.simulate(folder / "spec.toml", out=folder / "run")
    return read_run(folder / "run")


def test_every_gradient_of_a_step_has_its_delay(run: Run) -> None:
    """Also those that came while a checkpoint was taken: they are told with the next step."""
    of_steps = Counter[int]()
    for event in run.steps:
        assert event.delays is not None
        of_steps += Counter(event.delays)
    of_workers = sum((Counter(d) for d in run.delays[0].by_worker.values()), Counter[int]())
    assert of_steps == of_workers
    assert of_steps.total() >= 12 * 4
    assert sum(event.samples for event in run.steps) == of_steps.total() * 4


def test_a_slow_worker_pushes_less_and_later(run: Run) -> None:
    rows = {row[0]: row for row in delays.rows(run)}
    assert set(rows) == {"0", "1", "2", "3"}
    assert int(rows["3"][1]) * 4 < int(rows["0"][1])
    assert float(rows["3"][3]) > float(rows["0"][3])
    assert "others were applied" in delays.line(run)


def test_the_page_shows_delays_where_there_are_any(run: Run, tmp_path: Path) -> None:
    page = (run.folder / "report.html").read_text()
    assert 'id="delays"' in page
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.replace('"OrMo"', '"EveryStep"'))
    api.simulate(spec, out=tmp_path / "run")
    assert 'id="delays"' not in (tmp_path / "run" / "report.html").read_text()


def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    """What a drained checkpoint holds is all that goes on."""
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    again = api.simulate(
        spec, out=tmp_path / "again", resume=str(run.folder / "checkpoints" / "step-10")
    )
    assert again.steps == 12
    assert run.summary is not None
    assert again.final_loss == pytest.approx(run.summary.final_loss, abs=0.2)
    assert again.metrics == run.summary.metrics


@pytest.mark.parametrize(
    ("found", "share", "expected"),
    [({0: 1}, 0.5, 0), ({1: 1, 5: 1}, 0.5, 1), ({1: 1, 5: 9}, 0.95, 5)],
)
def test_quantiles_are_delays_that_there_were(found, share: float, expected: int) -> None:
    assert delays._quantile(Counter(found), share) == expected
