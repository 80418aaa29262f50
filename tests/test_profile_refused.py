"""Profiles that cannot be used: what is wrong, lacks or differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import polyreme as pr
from polyreme.errors import ConfigError
from polyreme.profile.record import HostSeconds, LayerTimes, PartBytes, PassTimes, Profile
from polyreme.profile.store import load, save

SPEC: dict[str, Any] = {
    "model": {
        "kind": "transformers",
        "model_type": "llama",
        "config": {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    },
    "data": {"kind": "tokens", "path": "tokens.bin", "vocab": 64},
    "train": {"steps": 1, "global_batch": 8, "seq_len": 32},
}
CLUSTER = "preset:4xH100"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return pr.profile(SPEC, assume=True, cluster=CLUSTER)


def refused(
    profile: Profile, spec: dict[str, Any] = SPEC, cluster: str = CLUSTER, **parallel: int
) -> list[str]:
    try:
        pr.plan(spec | {"parallel": parallel}, profile=profile, cluster=cluster)
    except ConfigError as error:
        return [each.rule for each in error.violations]
    return []


def changed(profile: Profile, **fields: object) -> Profile:
    """The profile with fields of its blocks changed."""
    block = msgspec.structs.replace(profile.layers["block"], **fields)
    return msgspec.structs.replace(profile, layers={**profile.layers, "block": block})


@pytest.mark.parametrize(
    "field", ["saved_bytes_per_sample", "recompute_bytes_per_sample", "again_bytes_per_sample"]
)
def test_negative_bytes_were_taken_as_memory_won(
    field: str, profile: Profile, tmp_path: Path
) -> None:
    save(changed(profile, **{field: -1}), tmp_path / "profile.json")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "profile.json")
    assert f"profile.layers.block.{field}" in {each.path for each in caught.value.violations}


def test_negative_bytes_of_parts_are_named(profile: Profile, tmp_path: Path) -> None:
    block: LayerTimes = profile.layers["block"]
    parts: dict[int, PartBytes] = dict(block.part_bytes)
    split = msgspec.structs.replace(parts[2].split, saved=-5)
    parts[2] = msgspec.structs.replace(parts[2], split=split)
    wrong = PassTimes(microbatch=(1,), forward_s=(-1.0,), backward_s=(1.0,))
    save(changed(profile, part_bytes=parts, parts={2: wrong}), tmp_path / "profile.json")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "profile.json")
    assert {each.path for each in caught.value.violations} == {
        "profile.layers.block.part_bytes.2.split.saved",
        "profile.layers.block.parts.2.forward_s",
    }


def test_a_host_that_asks_in_no_time_at_all_is_refused(profile: Profile, tmp_path: Path) -> None:
    """Negative seconds of a host would have hidden those of the device."""
    host = HostSeconds(forward=1e-3, backward=-1e-3)
    part = PassTimes(microbatch=(1,), forward_s=(1.0,), backward_s=(1.0,), host_s=host)
    save(changed(profile, host_s=host, parts={2: part}), tmp_path / "profile.json")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "profile.json")
    assert {each.path for each in caught.value.violations} == {
        "profile.layers.block.host_s",
        "profile.layers.block.parts.2.host_s",
    }


def test_bytes_of_parts_that_a_plan_wants_are_named_where_nothing_stands_in(
    profile: Profile,
) -> None:
    parts = profile.layers["block"].part_bytes
    lacking = changed(profile, part_bytes={})
    assert refused(lacking, tp=4) == ["lacks layers.block.part_bytes.4"]
    assert refused(lacking) == ["lacks layers.block.part_bytes.2"]
    assert refused(lacking, tp=1) == []
    fewer = changed(profile, part_bytes={2: parts[2]})
    assert refused(fewer, tp=4) == []
    more = changed(profile, part_bytes={4: parts[4]})
    assert refused(more, tp=2) == ["lacks layers.block.part_bytes.2"]


def test_a_measured_profile_without_times_of_parts_names_them(profile: Profile) -> None:
    measured = msgspec.structs.replace(profile, assumed=False, global_batch=8)
    found = refused(measured, tp=2)
    assert "lacks layers.block.parts.2" in found
    assert all(".parts.2" in rule for rule in found)
    assert refused(measured, tp=1) == []


def test_a_profile_of_other_lengths_says_both(profile: Profile) -> None:
    longer = SPEC | {"train": {**SPEC["train"], "seq_len": 64}}
    (rule,) = refused(profile, longer)
    assert rule.startswith("graph: made for another model, or other lengths of samples (")
    assert "input_ids of a sample: [32] there, [64] wanted" in rule


def test_a_profile_of_another_model_says_in_what(profile: Profile) -> None:
    config = {**SPEC["model"]["config"], "num_hidden_layers": 3}
    (rule,) = refused(profile, SPEC | {"model": {**SPEC["model"], "config": config}})
    assert "2 block" in rule
    assert "3 block" in rule
    wider = {**SPEC["model"]["config"], "intermediate_size": 32}
    (rule,) = refused(profile, SPEC | {"model": {**SPEC["model"], "config": wider}})
    assert "parameters of block: " in rule


def test_a_profile_of_another_cluster_says_in_what(profile: Profile) -> None:
    rules = refused(profile, cluster="preset:2x2xH100")
    assert "hosts: 1 of 4 H100 there, 2 of 2 H100 wanted" in rules[0]
    rules = refused(profile, cluster="preset:8xH100")
    assert "devices: 4 there, 8 wanted" in rules[0]


def test_a_profile_without_facts_still_says_which_input_differs(profile: Profile) -> None:
    bare = msgspec.structs.replace(profile, made_for={})
    (rule,) = refused(bare, SPEC | {"train": {**SPEC["train"], "seq_len": 64}})
    assert rule == "graph: made for another model, or other lengths of samples"
