"""Degrees of a spec against the number of devices."""

from __future__ import annotations

import pytest

from polyreme import spec


@pytest.mark.parametrize(
    ("parallel", "n_devices", "legal"),
    [
        ({"replica": 3}, 8, "1, 2, 4, 8"),
        ({"replica": 2, "shard": 8}, 8, "1"),
        ({"replica": 2, "shard": 2, "tp": 1, "cp": 1, "pp": 1}, 8, "4"),
        ({"replica": 16}, 8, "1, 2, 4, 8"),
        ({"shard": 2}, 1, "1"),
    ],
)
def test_degrees_that_do_not_fit_the_devices(
    parallel: dict[str, int], n_devices: int, legal: str
) -> None:
    document = {
        "model": {"kind": "resnet20"},
        "data": {"kind": "digits"},
        "train": {"steps": 1},
        "parallel": parallel,
    }
    found = spec.parse(document)
    (violation,) = spec.check(found, n_devices)
    assert violation.legal == legal
    axis = violation.path.removeprefix("parallel.")
    for value in legal.split(", "):
        mended = spec.parse({**document, "parallel": {**parallel, axis: int(value)}})
        assert spec.check(mended, n_devices) == []


@pytest.mark.parametrize("parallel", [{}, {"replica": 4}, {"replica": 4, "shard": 2}, {"tp": 1}])
def test_degrees_that_fit_the_devices(parallel: dict[str, int]) -> None:
    small = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}}
    assert spec.check(spec.parse(small | {"parallel": parallel}), 8) == []


def test_degrees_that_no_single_change_mends_begin_with_the_largest() -> None:
    small = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}}
    found = spec.parse(small | {"parallel": {"replica": 3, "shard": 5}})
    (violation,) = spec.check(found, 4)
    assert (violation.path, violation.legal) == ("parallel.shard", "1")
