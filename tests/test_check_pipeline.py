"""`check` says of a split what planning it would say, with a way out that leads out."""

from __future__ import annotations

import json

import pytest

import refusals

LLAMA = """
[model]
kind = "transformers"
model_type = "llama"
config.vocab_size = 259
config.hidden_size = 16
config.intermediate_size = 16
config.num_hidden_layers = 4
config.num_attention_heads = 4
[data]
kind = "python_source"
[train]
steps = 2
global_batch = 8
seq_len = 16
[cluster]
cpu_processes = 2
"""
BERT = LLAMA.replace('"llama"', '"bert"').replace(
    'kind = "python_source"', 'kind = "python_source"\nobjective = "masked"'
)
MLP = """
[model]
kind = "mlp"
[data]
kind = "digits"
[train]
steps = 2
global_batch = 8
[cluster]
cpu_processes = 2
"""


def _check(tmp_path, text, *settings):
    (tmp_path / "spec.toml").write_text(text)
    sets = [part for each in settings for part in ("--set", each)]
    said = refusals.command(["check", str(tmp_path / "spec.toml"), *sets, "--json"])
    return said.code, json.loads(said.out).get("errors", [])


@pytest.mark.parametrize(
    ("text", "settings", "path", "legal"),
    [
        (LLAMA, ["pp=2", "stages=[3,4]"], "parallel.stages", "[3, 3]"),
        (LLAMA, ["pp=2", 'order="zb-v"', "stages=[1,1,1,1]"], "parallel.stages", "[2, 2, 1, 1]"),
        (LLAMA, ["pp=2", "stages=[6]"], "parallel.stages", "add up"),
        (LLAMA, ["pp=2", "microbatch=9"], "parallel.microbatch", "1, 2, 3, 4, 8"),
        (LLAMA, ["pp=2", 'order="chimera"', "microbatch=8"], "parallel.microbatch", "1, 2, 4"),
        (LLAMA, ["pp=2", 'order="interleaved"', "microbatch=3"], "parallel.microbatch", "1, 2, 4"),
        (MLP, ["tp=2"], "parallel.tp", "1"),
        (BERT, ["pp=2", 'order="terapipe"'], "parallel.order", "causal"),
        (LLAMA, ["pp=2", 'order="terapipe"', 'recompute="all"'], "parallel.recompute", '"none"'),
    ],
    ids=lambda given: "; ".join(given) if isinstance(given, list) else None,
)
def test_what_no_plan_can_meet_is_found_before_anything_starts(
    tmp_path, text, settings, path, legal
):
    code, errors = _check(tmp_path, text, *(f"parallel.{each}" for each in settings))
    assert code == 2
    assert [each["path"] for each in errors] == [path]
    assert legal in errors[0]["legal"], errors


def test_an_odd_number_of_ranks_is_the_fault_and_not_the_replicas(tmp_path):
    settings = ["parallel.pp=3", 'parallel.order="dualpipe"', "cluster.cpu_processes=3"]
    code, (error,) = _check(tmp_path, LLAMA, *settings)
    assert (code, error["path"], error["legal"]) == (2, "parallel.pp", "2")
    assert "3 ranks are not even" in error["rule"]


def test_all_that_versions_of_weights_rule_out_is_said_at_once(tmp_path):
    settings = ['order="pipedream"', "pp=2", "decouple=true", "shard=1", "replica=1"]
    sets = ["train.clip_norm=1.0", *(f"parallel.{each}" for each in settings)]
    code, errors = _check(tmp_path, LLAMA, *sets)
    assert code == 2
    assert {each["path"] for each in errors} == {"train.clip_norm", "parallel.decouple"}


@pytest.mark.parametrize("settings", [[], ["pp=2", "microbatch=3"], ["tp=2", "sp=true"]], ids=str)
def test_what_can_be_planned_is_not_refused(tmp_path, settings):
    code, errors = _check(tmp_path, LLAMA, *(f"parallel.{each}" for each in settings))
    assert (code, errors) == (0, [])
