"""Fixed parts of a plan that are impossible: all are named, with values that are taken next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyreme import spec as specs
from polyreme.api import fixed
from polyreme.api.problem import pose
from polyreme.cluster.parse import parse_preset
from polyreme.cluster.types import MAX_DEVICES
from polyreme.errors import ConfigError, Violation

LLAMA = Path(__file__).parent.parent / "examples" / "llama-7b.toml"


def refused(cluster: str, *fixes: str, devices: int | None = None) -> dict[str, Violation]:
    """What `plan` says to fixes before it searches; a violation of each path."""
    from polyreme.api.steps import something_offered

    overrides = ["train.global_batch=96", *(f"parallel.{each}" for each in fixes)]
    try:
        spec = specs.load(LLAMA, overrides=overrides, trusted=("data",))
        problem = pose(spec, cluster=cluster, devices=devices)
        something_offered(problem, problem.spec.parallel)
    except ConfigError as error:
        return {each.path: each for each in error.violations}
    return {}


@pytest.mark.parametrize(
    ("n_devices", "fix"), [(97, "tp=2"), (97, "tp=97"), (97, "pp=97"), (6, "tp=3"), (6, "tp=4")]
)
def test_a_value_said_to_be_legal_was_refused_next(n_devices: int, fix: str) -> None:
    cluster, axis = f"preset:{n_devices}xH100", fix.partition("=")[0]
    legal = refused(cluster, fix)[f"parallel.{axis}"].legal
    alone, _, fewer = legal.partition(" (or ")
    for value in alone.split(", "):
        assert refused(cluster, f"{axis}={value}") == {}
    assert bool(fewer) == (n_devices == 97)
    if fewer:
        values, _, devices = fewer.removesuffix(")").partition(" with --devices ")
        for value in re.findall(r"\d+", values):
            assert refused(cluster, f"{axis}={value}", devices=int(devices)) == {}


def test_fixes_that_no_model_and_no_batch_allow_hid_behind_those_of_the_devices() -> None:
    found = refused("preset:6xH100", "tp=3", "pp=4", "microbatch=1000")
    assert list(found) == ["parallel.pp", "parallel.tp", "parallel.microbatch"]
    assert found["parallel.tp"].legal == "1, 2"
    assert "96" in found["parallel.microbatch"].legal


def test_all_axes_fixed_are_mended_by_one_that_the_model_allows() -> None:
    degrees = {"replica": 1, "shard": 1, "tp": 1, "cp": 1, "pp": 2}
    found = refused("preset:97xH100", *(f"{axis}={n}" for axis, n in degrees.items()))
    assert found["parallel.pp"].legal == "2 with --devices 2"


@pytest.mark.parametrize("text", ["100000000000xH100", "3x99999999xH100", "9" * 6000 + "xH100"])
def test_more_devices_than_there_may_be_are_told_so_and_not_the_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_preset(text)
    (violation,) = caught.value.violations
    assert violation.rule.startswith("names ")
    assert violation.rule.endswith(" devices")
    assert f"<= {MAX_DEVICES}" in violation.legal


@pytest.mark.parametrize(
    ("axis", "rule"),
    [
        ("shard=-1", ">= 1"),
        ("shard=0", ">= 1"),
        ("shard=x", "AXIS=N"),
        ("shard=-", "AXIS=N"),
        ("sharp=2", "AXIS=N"),
        ("shard=²", "AXIS=N"),
    ],
)
def test_a_degree_below_1_is_an_axis_and_a_number_all_the_same(axis: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fixed([axis])
    (violation,) = caught.value.violations
    assert violation.rule.endswith(rule)
