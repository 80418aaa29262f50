"""Flat vectors."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme.algo.effects import Computed
from polyreme.algo.vector import all_finite, mean

LARGE = torch.finfo(torch.bfloat16).max  # a float32 near its largest too


@pytest.mark.parametrize(
    ("entries", "finite"),
    [
        ([], True),
        ([0.0], True),
        ([LARGE, LARGE], True),  # their sum is not finite
        ([LARGE, LARGE, -math.inf], False),
        ([math.inf, -math.inf], False),
        ([1.0, math.nan], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_is_finite_where_its_entries_are(entries, finite, dtype):
    vector = torch.tensor(entries, dtype=dtype)
    assert all_finite(vector) is finite


def test_a_gradient_is_looked_at_unless_it_is_known_to_be_finite():
    bad = torch.tensor([math.nan])
    assert not Computed(gradient=bad, loss=1.0, weight=1.0).is_finite
    assert not Computed(gradient=torch.ones(1), loss=math.inf, weight=1.0).is_finite
    assert not Computed(gradient=bad, loss=1.0, weight=1.0, known_finite=False).is_finite
    assert Computed(gradient=torch.ones(1), loss=1.0, weight=1.0).numbers.finite == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_leaves_what_it_is_of(dtype):
    vectors = [torch.full((3,), float(i), dtype=dtype) for i in range(3)]
    assert mean(iter(vectors)).tolist() == [1.0] * 3
    assert [each[0].item() for each in vectors] == [0.0, 1.0, 2.0]
