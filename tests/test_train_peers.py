"""`polyreme train` of syncs whose models travel: logs, evaluations, checkpoints, both clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme import api
from polyreme.runtime.served.applied import read_taken
from test_train_served import SPEC


def _spec(folder: Path, sync: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(SPEC.replace('{ kind = "OrMo", servers = 2 }', f'{{ kind = "{sync}" }}'))
    return path


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sync", ["PartialReduce", "ADPSGD", "AsyncPushSum"])
def test_a_run_ends_is_logged_and_goes_on_from_its_checkpoint(sync: str, tmp_path: Path) -> None:
    spec, run = _spec(tmp_path, sync), tmp_path / "run"
    first = api.train(spec, out=run)
    assert (first.status, first.steps, first.workers) == ("done", 24, 2)
    events = _events(run)
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 25))
    assert all(event["loss"] > 0 for event in steps)
    assert sum(event["wire_bytes"] for event in steps) > 0
    delays = [sum(event["delays"].values()) for event in steps if event.get("delays")]
    assert delays == ([] if sync == "PartialReduce" else [2] * 24)
    evals = [event for event in events if event["kind"] == "eval"]
    assert [event["step"] for event in evals] == [12, 24]
    before, after = (event["metrics"]["heldout_loss"] for event in evals)
    assert after < before
    assert len(read_taken(run / "servers" / "taken-0.bin")) >= 24
    checkpoint = str(run / "checkpoints" / "step-16")
    again = api.train(spec, out=tmp_path / "again", resume=checkpoint)
    assert (again.status, again.steps) == ("done", 24)
    simulated = api.simulate(spec, out=tmp_path / "clock", resume=checkpoint)
    assert simulated.steps == 24
    keys = [
        {key for event in _events(folder) if event["kind"] == kind for key in event}
        for folder in (run, tmp_path / "clock")
        for kind in ("step", "eval")
    ]
    assert keys[:2] == keys[2:]
