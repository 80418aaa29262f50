"""A spec with tensor parts, stages and shards: checked, trained, gone on from by another plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import polyreme as pr
from polyreme.errors import ConfigError
from polyreme.plan import store
from polyreme.plan.grid import grid_of

VIT = {
    "kind": "transformers",
    "model_type": "vit",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "patch_size": 4,
    },
}
SPEC = {
    "model": VIT,
    "data": {"kind": "digits"},
    "train": {"steps": 4, "global_batch": 8, "clip_norm": 1.0, "checkpoint_every": 2},
    "data_parallel": {"rule": {"kind": "AdamW", "lr": 1e-3}},
    "cluster": {"cpu_processes": 4},
    "parallel": {"tp": 2, "pp": 2, "order": "zb-h1", "microbatch": 2, "sp": True},
}


def _with(**parallel):
    return {**SPEC, "parallel": {"microbatch": 2, **parallel}}


@pytest.mark.long
def test_a_run_of_parts_and_stages_goes_on_under_another_plan(tmp_path: Path, warm: None) -> None:
    first = pr.train({**SPEC, "train": {**SPEC["train"], "steps": 2}}, out=tmp_path / "first")
    assert first.status == "done"
    grid = grid_of(store.load(tmp_path / "first" / "plan.json"))
    assert (grid.pp, grid.tp) == (2, 2)
    other = _with(pp=2, shard=2, level="params", order="1f1b")
    second = pr.train(other, out=tmp_path / "second", resume=str(tmp_path / "first"))
    assert (second.status, second.steps) == ("done", 4)


@pytest.mark.long
def test_such_a_plan_is_verified(warm: None) -> None:
    assert pr.verify(SPEC, steps=1).passed


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"tp": 3}, "does not divide num_attention_heads 4"),
        ({"pp": 4, "stages": [1, 1, 1]}, "3 stages, and there are 4"),
        ({"pp": 2, "order": "zb-h3"}, "is no order"),
        ({"pp": 2, "order": "terapipe"}, "do not work on tokens behind others"),
    ],
)
def test_what_cannot_be_split_so_is_said_before_any_process_starts(parallel, said) -> None:
    with pytest.raises(ConfigError, match=said):
        pr.plan({**_with(**parallel), "cluster": {"cpu_processes": 12}}, assume=True)


def test_thirty_layers_over_four_stages_are_all_there(tmp_path: Path) -> None:
    """28 of 30 layers trained silently."""
    config = {**VIT["config"], "num_hidden_layers": 28}
    spec = {**SPEC, "model": {**VIT, "config": config}, "parallel": {"pp": 4}}
    plan = pr.plan(spec, assume=True)[0]
    sizes = [len(stage.layers) for stage in plan.stages]
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.update(microbatches=1000), "exceeds the samples of a device"),
        (lambda file: file.update(global_batch=16), "is 8 in the spec"),
        (lambda file: file["layer_plans"].popitem(), "has no layer plan"),
        (lambda file: file["order"][0].pop(0), "plan.order"),
        (lambda file: file["stages"][0]["layers"].pop(), "is a layer in no stage"),
        (lambda file: file.update(bucket_bytes=-4), "is not >= 1"),
    ],
)
def test_an_edited_plan_is_refused_where_it_would_be_priced(tmp_path: Path, change, said) -> None:
    path, spec = tmp_path / "plan.json", _with(pp=2, shard=2)
    pr.plan(spec, assume=True, out=path)
    pr.plan(_with(), assume=True, given=path)  # on its own it is priced
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=re.escape(said)):
        pr.plan(_with(), assume=True, given=path)


def test_a_plan_for_more_devices_than_there_are_is_not_priced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    pr.plan(_with(pp=2, shard=2), assume=True, out=path)
    with pytest.raises(ConfigError, match="is no device of"):
        pr.plan({**_with(), "cluster": {"cpu_processes": 2}}, assume=True, given=path)


def test_a_plan_for_machines_that_are_elsewhere_is_checked(tmp_path: Path) -> None:
    path, spec = tmp_path / "plan.json", {**_with(pp=2, shard=2), "cluster": {}}
    pr.plan(spec, assume=True, cluster="preset:2x2xH100", out=path)
    pr.check({**spec, "parallel": {}}, plan=path, cluster="preset:2x2xH100")
    with pytest.raises(ConfigError, match="is no device of 2xH100"):
        pr.check({**spec, "parallel": {}}, plan=path, cluster="preset:2xH100")
