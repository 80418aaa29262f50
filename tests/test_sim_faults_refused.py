"""Faults of simulated workers that cannot be: refused by name, with a way out."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme import spec
from polyreme.errors import ConfigError

DOCUMENT: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [4]},
    "data": {"kind": "digits"},
    "train": {"steps": 6, "global_batch": 12},
    "data_parallel": {"rule": {"kind": "SGD"}, "sync": {"kind": "ASGD"}},
}


def _refused(faults: list[dict[str, Any]], sync: str = "ASGD") -> list[Any]:
    document = {
        **DOCUMENT,
        "data_parallel": {"rule": {"kind": "SGD"}, "sync": {"kind": sync}},
        "simulate": {"workers": 4, "faults": faults},
    }
    try:
        spec.parse(document)
    except ConfigError as error:
        return list(error.violations)
    return []


CRASH = {"kind": "crash", "worker": 3, "at_s": 10.0, "back_s": 20.0}


@pytest.mark.parametrize(
    ("faults", "path", "value", "legal"),
    [
        ([{**CRASH, "worker": 4}], "simulate.faults[0].worker", 4, "3 (or any integer >= 0"),
        (
            [CRASH, {"kind": "join", "worker": 9, "at_s": 1.0}],
            "simulate.faults[1].worker",
            9,
            "3 (or any integer >= 0",
        ),
        ([{**CRASH, "back_s": 10.0}], "simulate.faults[0].back_s", 10.0, "11.0 (or any number >"),
        ([CRASH, {**CRASH, "at_s": 19.0, "back_s": 30.0}], "simulate.faults[1].worker", 3, "a w"),
        (
            [{"kind": "crash", "worker": 3, "at_s": 1.0}, CRASH],
            "simulate.faults[1].worker",
            3,
            "a worker that simulate.faults[0] is not of",
        ),
        (
            [CRASH, {"kind": "join", "worker": 3, "at_s": 30.0}],
            "simulate.faults[1].worker",
            3,
            "a worker that simulate.faults[0] is not of",
        ),
        (
            [CRASH, {"kind": "random_crashes"}],
            "simulate.faults[1].kind",
            "random_crashes",
            "leave one of both out",
        ),
        (
            [{"kind": "random_crashes"}, {"kind": "random_crashes"}],
            "simulate.faults[1].kind",
            "random_crashes",
            "leave one of both out",
        ),
    ],
    ids=[
        "crash of nobody",
        "join of nobody",
        "back before",
        "crash while away",
        "crash after the last",
        "crash before it joined",
        "crash beside random ones",
        "random ones twice",
    ],
)
def test_faults_that_cannot_be_are_refused_by_name(faults, path, value, legal):
    (found,) = _refused(faults)
    assert (found.path, found.value) == (path, value)
    assert found.legal.startswith(legal)


def test_faults_one_after_another_and_of_others_are_not_refused():
    later = {**CRASH, "at_s": 20.0, "back_s": 30.0}
    assert not _refused([CRASH, later, {**CRASH, "worker": 2}])
    assert not _refused([{"kind": "join", "worker": 3, "at_s": 10.0}, CRASH])
    assert not _refused([{"kind": "join", "worker": 3, "at_s": 9.0}, {"kind": "random_crashes"}])


@pytest.mark.parametrize("sync", ["EveryStep", "LocalSteps"])
def test_faults_of_workers_that_meet_are_refused(sync):
    found = _refused([CRASH, {"kind": "join", "worker": 0, "at_s": 1.0}], sync)
    assert [(each.path, each.value) for each in found] == [
        ("simulate.faults[0].kind", "crash"),
        ("simulate.faults[1].kind", "join"),
    ]
    assert f"under {sync} all workers meet" in found[0].rule
    assert "ASGD" in found[0].legal


@pytest.mark.parametrize("sync", ["PartialReduce", "ADPSGD", "AsyncPushSum"])
def test_faults_of_workers_that_have_the_models_are_not_refused(sync):
    assert not _refused([CRASH], sync)
