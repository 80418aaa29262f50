"""The largest of so many entries that a sample says which are looked at."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme.algo.compress import top_k

torch.set_num_threads(1)

N = top_k._SAMPLED_FROM + 17


def _normal() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def _few(bad: float) -> torch.Tensor:
    return _normal().index_fill(0, torch.arange(0, N, 5003), bad)


ENTRIES = {
    "normal": _normal(),
    "ties": _normal().mul(8).round(),
    "equal": torch.ones(N),
    "rising": torch.arange(N).float(),
    "mostly zero": torch.where(_normal() > 2.5, _normal(), 0.0),
    "periodic": torch.where(torch.arange(N) % 16 == 0, _normal(), 0.0),
    "some NaN": _few(math.nan),
    "some infinite": _few(math.inf),
    "many NaN": torch.where(_normal() > 1.0, math.nan, _normal()),
}


@pytest.mark.parametrize("k", [1, 100, N // 100, N // 10, N // 2])
@pytest.mark.parametrize("name", ENTRIES)
def test_the_largest_of_many_are_those_of_a_stable_sort(name: str, k: int) -> None:
    entries = ENTRIES[name]
    ordered = entries.nan_to_num(nan=math.inf).sort(descending=True, stable=True).indices
    assert torch.equal(top_k.largest(entries, k), ordered[:k].sort().values)
    assert torch.equal(top_k.smallest(-entries, k), ordered[:k].sort().values)


def test_a_sample_spares_looking_at_all() -> None:
    near = top_k._near(ENTRIES["normal"], N // 100)
    assert near is not None
    assert N // 100 <= near.numel() < N // 50
    assert top_k._near(ENTRIES["equal"], N // 100) is None
