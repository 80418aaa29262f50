"""Random numbers by their place."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo import counted

N = 1 << 18
KEYS = [counted.COUNTED, counted.COUNTED + 1, counted.COUNTED + (1 << 32), (1 << 63) - 1]


def _uniform(key: int, n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return counted.uniform(torch.tensor(key), n, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_number_is_the_same_however_many_are_drawn(dtype: torch.dtype) -> None:
    for key in KEYS:
        assert torch.equal(_uniform(key, 7, dtype), _uniform(key, 1000, dtype)[:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_are_even_and_not_alike_from_place_to_place(dtype: torch.dtype) -> None:
    """Chances of one step that lean one way bias all that is rounded by them."""
    for key in KEYS:
        drawn = _uniform(key, dtype=dtype).double()
        assert 0 <= float(drawn.min()) < float(drawn.max()) < 1
        assert abs(float(drawn.mean()) - 0.5) < 5 * (1 / 12 / N) ** 0.5
        counts = torch.histc(drawn, 64, 0, 1)
        assert float(((counts - N / 64) ** 2 / (N / 64)).sum()) < 63 + 6 * (2 * 63) ** 0.5
        for lag in (1, 2, 32, 1024):
            both = torch.stack([drawn[lag:], drawn[:-lag]])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / N**0.5


def test_keys_that_differ_in_a_bit_give_unlike_numbers() -> None:
    rows = torch.stack([_uniform(key).double() for key in KEYS])
    assert float((torch.corrcoef(rows) - torch.eye(len(KEYS))).abs().max()) < 5 / N**0.5


def test_no_numbers_are_drawn_of_none() -> None:
    assert _uniform(KEYS[0], 0).shape == (0,)


def test_signs_are_all_bits_of_numbers_and_lean_to_neither_side() -> None:
    """A sign that two places share, or a bit that is always set, leaves rotations uneven."""
    for key in KEYS:
        signs = counted.signs(torch.tensor(key), N, torch.float32)
        whole = counted.hashed(torch.tensor(key), N // 64)
        for place in (0, 31, 32, 63):
            assert torch.equal(signs[place::64] < 0, (whole >> place & 1) == 1)
        assert torch.equal(counted.signs(torch.tensor(key), 70, torch.float32), signs[:70])
        assert float(signs.view(-1, 64).mean(0).abs().max()) < 5 / (N / 64) ** 0.5
        for lag in (1, 2, 32, 64):
            assert float((signs[lag:] * signs[:-lag]).mean().abs()) < 5 / N**0.5
