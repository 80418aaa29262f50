"""Passes compiled for accelerators make what torch's own operations make on the host."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme.algo import bits, counted
from polyreme.algo.compress import above, drawn, golomb, natural, qsgd, rotated, tern_grad, top_k
from polyreme.algo.draw import Draw
from polyreme.cluster.accelerator import detect

HERE = detect()
pytestmark = pytest.mark.skipif(HERE.on_host, reason="needs an accelerator")
pytest.importorskip("triton")
THERE = HERE.device(0)
KEY = Draw(seed=5, worker=1, step=2).key("own", torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _entries(name: str, n: int) -> torch.Tensor:
    drawn = _normal(n)
    if name == "ties":
        return (3 * drawn).round() / 3
    if name == "zeros of both signs":
        return torch.where(drawn.abs() > 2, drawn, 0.0 * drawn)
    if name == "not finite":
        drawn[:: n // 7], drawn[n // 2], drawn[n // 3] = math.nan, math.inf, -math.inf
    return drawn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["value", "magnitude", "turned"])
@pytest.mark.parametrize("name", ["normal", "ties", "zeros of both signs", "not finite"])
def test_the_k_largest_are_those_of_a_stable_sort(name, size, dtype) -> None:
    """A bound that is one step off, or equal entries that trade places, choose others."""
    from polyreme.algo.compress import ranked

    x = _entries(name, 6_007).to(dtype)
    sizes = top_k._sized(x, size).double()
    order = sizes.sort(descending=True, stable=True).indices
    n_held = 0
    for k in (1, 60, 300):
        found = ranked.largest(x.to(THERE), k, size=size, step=9, rank=k // 9 + 60, most=2_000)
        if int(found.holds):
            n_held += 1
            where = order[:k].sort().values
            assert torch.equal(found.where.cpu(), where)
            assert torch.equal(found.entries.cpu().nan_to_num(), x[where].nan_to_num())
    assert n_held or name != "normal"


def test_too_many_above_a_bound_are_no_largest() -> None:
    from polyreme.algo.compress import ranked

    for x in (torch.ones(5_000), torch.zeros(5_000)):
        given = {"size": "magnitude", "step": 9, "rank": 50}
        assert not int(ranked.largest(x.to(THERE), 10, most=200, **given).holds)
        assert int(ranked.largest(x.to(THERE), 10, most=5_000, **given).holds)


@pytest.mark.parametrize("n", [1, 31, 33, 4_096, 9_001])
def test_bits_say_where_and_are_those_that_are_packed(n) -> None:
    from polyreme.algo.compress import picked

    x = _normal(n).float()
    least = torch.tensor(0.5)
    found = picked.counted(x.to(THERE), least.to(THERE), size="value")
    mask = x >= least
    assert torch.equal(found.where(found.n).cpu(), above.above(x, least, size="value"))
    assert torch.equal(found.mask.cpu(), bits.pack(mask, 1))
    for value in (0, 1):
        again = picked.of_mask(found.mask, n, value=value)
        expected = (mask == bool(value)).nonzero().squeeze(-1)
        assert torch.equal(again.where(again.n).cpu(), expected)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 900), (1_025, 1_025), (700, 9_001), (3, 1 << 20)])
def test_gaps_are_written_and_read_as_on_the_host(k, n) -> None:
    from polyreme.algo.compress import gaps

    where = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values
    for width in {golomb.remainder(k, n), 12}:
        unary, rest = golomb.pack(where, width)
        written, left = gaps.split(where.to(THERE), width)
        assert torch.equal(written.cpu(), unary)
        assert torch.equal(bits.pack(left.cpu(), width), rest)
        read = gaps.joined(written, bits.unpack(rest, width, k).to(THERE), width)
        assert torch.equal(read.cpu(), where)


@pytest.mark.parametrize(("n", "k"), [(5_000, 50), (5_000, 1_200), (100_003, 9_000)])
def test_entries_drawn_without_a_sort_are_the_same(n, k) -> None:
    from polyreme.algo.compress import lots

    n_sure, n_drawn = drawn._sure(n, k), drawn._draws(n, k)
    found = lots.chosen(KEY.to(THERE), n, k, n_sure, n_drawn)
    assert torch.equal(found.cpu(), drawn.chosen(KEY, n, k))


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 9, 4_099])
def test_entries_are_rounded_by_the_same_chances(n, dtype, bad) -> None:
    from polyreme.algo.compress import rounded

    x = _normal(n).to(dtype)
    if bad is not None:
        x[n // 2 :] = bad
    there, key, name = x.to(THERE), KEY.to(THERE), str(dtype).removeprefix("torch.")
    near = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-3, "atol": 0.0, "equal_nan": True}

    norm, levels = qsgd._coded(x, KEY, levels=15, bucket=0, width=5)
    torch.testing.assert_close(rounded.norm(there).cpu(), norm, rtol=1e-6, atol=0, equal_nan=True)
    written = rounded.levels(there, norm.to(THERE), key, 15, 5)
    assert _alike(written.cpu(), levels)
    meant = rounded.of_levels(levels.to(THERE), norm.to(THERE), n, 15, 5, dtype).cpu()
    torch.testing.assert_close(
        meant, qsgd._shown(norm, levels, n, levels=15, bucket=0, width=5, dtype=name), **near
    )

    powers = natural._coded(x, KEY)
    assert torch.equal(rounded.powers(there, key, natural._most(dtype)).cpu(), powers)
    meant = rounded.of_powers(powers.to(THERE), n, dtype).cpu()
    torch.testing.assert_close(meant, natural._meant(powers, n, dtype=name), **near)

    for clip in (0.0, 2.5):
        scale, signs = tern_grad._coded(x, KEY, clip=clip)
        found = rounded.scale(there, clip).cpu()
        torch.testing.assert_close(found, scale, rtol=1e-6, atol=0, equal_nan=True)
        assert _alike(rounded.signs(there, scale.to(THERE), key).cpu(), signs)
        meant = rounded.of_signs(signs.to(THERE), scale.to(THERE), n, dtype).cpu()
        torch.testing.assert_close(meant, tern_grad._meant(scale, signs, n, dtype=name), **near)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bytes are the same but for few: a product and a sum may be rounded as one."""
    return found.shape == expected.shape and int((found != expected).sum()) <= len(found) // 500


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("sides", [(1, 5), (300, 77), (513, 260)], ids=str)
def test_products_with_thin_matrices_are_those_of_the_host(sides, rank) -> None:
    from polyreme.algo.compress import products

    rows, columns = sides
    whole = _normal(rows * columns).float().view(rows, columns)
    left, right = (_normal(n * rank, n).float().view(n, rank) for n in sides)
    pairs = [
        (products.times(whole.to(THERE), right.to(THERE)), whole @ right),
        (products.turned_times(whole.to(THERE), left.to(THERE)), whole.T @ left),
        (products.outer(left.to(THERE), right.to(THERE)), left @ right.T),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-4)


def test_directions_are_drawn_where_the_last_ones_are_of_no_use() -> None:
    from polyreme.algo.compress import products

    last = _normal(4_500).float().view(1_500, 3)
    last[:, 1], last[4, 2] = 0.0, math.nan
    fresh = counted.normal(KEY, last.numel()).view(last.shape).float()
    for warm in (True, False):
        found = products.directions(last.to(THERE), KEY.to(THERE), warm=warm).cpu()
        kept = last[:, 0] if warm else fresh[:, 0]
        torch.testing.assert_close(found, torch.stack([kept, fresh[:, 1], fresh[:, 2]], 1))


@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_blocks_are_turned_as_on_the_host_and_back(size) -> None:
    from polyreme.algo.compress import turns

    n = 2 * size + 3
    x = _normal(n).float()
    padded = torch.nn.functional.pad(x, (0, -n % size))
    signed = padded * counted.signs(KEY, len(padded), padded.dtype)
    expected = rotated.hadamard(signed.view(-1, size)).reshape(-1)
    found = turns.turned(x.to(THERE), KEY.to(THERE), n, size, back=False)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    again = turns.turned(found, KEY.to(THERE), n, size, back=True)
    torch.testing.assert_close(again.cpu(), x, rtol=1e-5, atol=1e-5)
