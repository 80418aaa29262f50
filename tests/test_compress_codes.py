"""Codes, choices of entries and tables of single compressors, against hand-made numbers."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch

from polyreme.algo.compress import (
    QSGD,
    SBC,
    STC,
    AdaComp,
    CountSketch,
    OneBit,
    RandomK,
    Rotated,
    TopK,
    VarianceBased,
    elias,
    golomb,
    places,
)
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.compress.rotated import hadamard
from polyreme.algo.compress.sampled import stride
from polyreme.algo.draw import Draw
from polyreme.algo.packet import Like, Packet, added

torch.set_num_threads(1)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _packet(kind: CompressorKind, x: torch.Tensor, worker: int = 0, step: int = 0) -> Packet:
    like = Like.of(x)
    draw = Draw(seed=5, worker=worker, step=step)
    buffers, _ = kind.encode(x, kind.init(like), draw)
    return Packet(buffers=buffers, like=like, kind=kind)


# Elias 1975, table of omega codes.
OMEGA = {
    1: "0",
    2: "100",
    3: "110",
    4: "101000",
    7: "101110",
    8: "1110000",
    15: "1111110",
    16: "10100100000",
    100: "1011011001000",
    1000: "11100111111010000",
}


def test_omega_codes_are_those_of_the_table() -> None:
    code, length = elias.codes(torch.tensor(list(OMEGA)))
    written = [f"{c:0{n}b}" for c, n in zip(code.tolist(), length.tolist(), strict=True)]
    assert written == list(OMEGA.values())


@pytest.mark.parametrize("n", range(20))
def test_omega_codes_read_back_whatever_the_stream_ends_with(n: int) -> None:
    values = torch.randint(1, 1 << 31, (n,), generator=_random(n)) >> torch.arange(n) * 2
    values = values.clamp(min=1)
    reader = elias.Reader(elias.write(*elias.codes(values)))
    assert reader.value[reader.chain(reader.next)].tolist() == values.tolist()


@pytest.mark.parametrize("coding", ["elias", "elias_dense"])
@pytest.mark.parametrize("levels", [1, 5, 2**15])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_elias_packets_decode_as_fixed_ones(coding, levels: int, n: int) -> None:
    x = torch.randn(n, generator=_random(n))
    fixed = _packet(QSGD(levels=levels), x)
    assert torch.equal(_packet(QSGD(levels=levels, coding=coding), x).decode(), fixed.decode())


def test_elias_codes_are_short_where_the_paper_says() -> None:
    n = 10_000
    x = torch.randn(n, generator=_random(0))
    root = math.sqrt(n)
    sparse = _packet(QSGD(levels=1, coding="elias"), x).nbytes
    # Theorem 3.2 at s = 1 less its o(1), which is a factor of about 1.5 here.
    bits = (3 + 1.5 * 1.5 * math.log2(2 * (1 + n) / (1 + root))) * (1 + root) + 32
    assert sparse < bits / 8 < _packet(QSGD(levels=1), x).nbytes / 5
    # At s = sqrt(n) a level is about 1: codes of one, three and three bits, and a sign.
    dense = _packet(QSGD(levels=100, coding="elias_dense"), x).nbytes
    assert dense < 3 * n / 8 < _packet(QSGD(levels=100), x).nbytes / 2


@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 0), (9, 9), (1000, 1), (1000, 10), (1000, 700)])
def test_golomb_codes_and_places_read_back(n: int, k: int) -> None:
    where = torch.randperm(n, generator=_random(n))[:k].sort().values
    width = golomb.remainder(k, n)
    assert golomb.unpack(*golomb.pack(where, width), width, k).tolist() == where.tolist()
    packed = places.pack(where, n)
    assert packed.numel() == places.n_bytes(k, n)
    assert places.unpack(packed, k, n).tolist() == where.tolist()


@pytest.mark.parametrize(("n", "k"), [(200_000, 2000), (200_000, 200)])
def test_golomb_codes_are_as_long_as_their_formula(n: int, k: int) -> None:
    where = torch.randperm(n, generator=_random(0))[:k].sort().values
    width, share = golomb.remainder(k, n), k / n
    # Sattler et al. 2019, equation 11.
    expected = width + 1 / (1 - (1 - share) ** (2**width))
    length = 8 * sum(part.numel() for part in golomb.pack(where, width)) / k
    assert length == pytest.approx(expected, rel=0.02)
    assert all(expected <= w + 1 / (1 - (1 - share) ** (2**w)) + 0.05 for w in range(20))


def test_top_k_takes_the_first_of_equal_entries_and_nan_before_all() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, math.nan, 0.5, 1.0])
    kept = TopK(ratio=0.5).kept(_packet(TopK(ratio=0.5), x).buffers, Like.of(x))
    assert kept.tolist() == [True, True, False, True, False, False]


def test_ratios_warm_up_as_dgc_s() -> None:
    kind = TopK(ratio=0.001, warmup_epochs=4, epoch_steps=10)
    ratios = [kind.at(10 * epoch).ratio for epoch in range(6)]
    assert ratios == pytest.approx([0.2512, 0.0631, 0.01585, 0.00398, 0.001, 0.001], rel=1e-3)
    rotated = Rotated(inner=kind).at(0)
    assert rotated.inner.ratio == pytest.approx(0.2512, rel=1e-3)


def test_sampled_top_k_is_nearly_the_exact_one() -> None:
    x = torch.randn(100_000, generator=_random(0))
    k = 1000
    exact = _packet(TopK(ratio=0.01), x).decode() != 0
    for step in range(5):
        kept = _packet(TopK(ratio=0.01, select="sampled"), x, step=step).decode() != 0
        assert 0.8 * k <= int(kept.sum()) <= k
        assert int((kept & exact).sum()) >= 0.7 * k


def test_strides_are_those_of_dgc_s_code() -> None:
    # 1 % are 1000; steps of 129, 121, 113 and 105 would give fewer.
    assert stride(100_000, 0.01) == 97
    assert stride(150, 0.01) == 1


def test_sampled_top_k_of_zeros_and_spikes_sends_no_more_than_its_share() -> None:
    for x in (torch.zeros(5000), torch.eye(1, 5000).view(-1), torch.full((5000,), 2.0)):
        packet = _packet(TopK(ratio=0.01, select="sampled"), x)
        assert packet.buffers[1].numel() <= 50


def test_shared_indices_are_shared_and_move_with_the_step() -> None:
    x = torch.arange(1.0, 101.0)
    kept = {
        (indices, worker, step): tuple(
            _packet(RandomK(ratio=0.1, indices=indices), x, worker, step)
            .decode()
            .nonzero()
            .view(-1)
            .tolist()
        )
        for indices in ("shared", "own")
        for worker in (0, 1)
        for step in (0, 1)
    }
    assert kept["shared", 0, 0] == kept["shared", 1, 0] != kept["shared", 0, 1]
    assert kept["own", 0, 0] != kept["own", 1, 0]
    assert all(len(set(each)) == 10 for each in kept.values())


def test_sbc_sends_the_side_that_is_further_from_zero() -> None:
    x = torch.tensor([3.0, 0.1, -2.0, 2.0, -4.0, 0.0, -1.0, 0.2])
    # Means of the two largest and two smallest: 2.5 and -3.
    assert _packet(SBC(ratio=0.25), x).decode().tolist() == [0, 0, -3, 0, -3, 0, 0, 0]
    assert _packet(SBC(ratio=0.25), -x).decode().tolist() == [0, 0, 3, 0, 3, 0, 0, 0]
    even = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    assert _packet(SBC(ratio=0.25), even).decode().tolist() == [0, 1, 0, 0]


def test_stc_sends_signs_of_the_largest_at_their_mean() -> None:
    x = torch.tensor([3.0, 0.1, -2.0, 2.5, -4.5, 0.0, -1.0, 0.2])
    expected = [3, 0, -3, 3, -3, 0, 0, 0]
    assert _packet(STC(ratio=0.5), x).decode().tolist() == expected


def test_adacomp_sends_what_would_lead_its_bin_after_one_more_step() -> None:
    kind = AdaComp(bin_size=4)
    first = torch.tensor([1.0, 0.4, -0.6, 0.1, 0.0, 0.0, 0.0, 0.0, -3.0, 1.0])
    like = Like.of(first)
    draw = Draw(seed=0, worker=0, step=0)
    buffers, state = kind.encode(first, kind.init(like), draw)
    # Bins lead with 1, 0 and 3: mean 4/3. Nothing waits, so H = 2 G.
    scale = 4 / 3
    sent = torch.tensor([scale, 0, -scale, 0, 0, 0, 0, 0, -scale, 0])
    torch.testing.assert_close(kind.decode(buffers, like), sent)
    residue = first - sent
    torch.testing.assert_close(state["residue"], residue)
    gradient = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    g = residue + gradient
    h = g + gradient
    buffers, _ = kind.encode(g, state, draw)
    tops = torch.stack([g[:4].abs().max(), g[4:8].abs().max(), g[8:].abs().max()])
    lead = h.abs() >= tops.repeat_interleave(4)[:10]
    expected = torch.where(lead & (g != 0), g.sign() * tops.mean(), torch.zeros(10))
    assert expected.count_nonzero() not in (0, 10)
    torch.testing.assert_close(kind.decode(buffers, like), expected)


def test_variance_based_waits_for_entries_that_agree() -> None:
    kind = VarianceBased(alpha=1.5, decay=1.0)
    like, state = Like((3,), "float32"), VarianceBased().init(Like((3,), "float32"))
    error, sent = torch.zeros(3), []
    steps = [[1.0, 1.0, 0.0], [1.0, -0.9, 0.0], [1.0, 1.0, 0.0], [1.0, -0.9, 0.0]]
    for step in steps:
        prepared = error + torch.tensor(step)
        buffers, state = kind.encode(prepared, state, Draw(seed=0, worker=0, step=0))
        sent.append(kind.decode(buffers, like))
        error = prepared - sent[-1]
    # Like steps: (2g)^2 > 1.5 * 2 g^2, at every second step. Steps that cancel are never sure.
    assert [each.tolist() for each in sent] == [[0, 0, 0], [2, 0, 0], [0, 0, 0], [2, 0, 0]]


def test_variance_based_values_are_the_nearer_powers_within_three_bits() -> None:
    x = torch.tensor([8.0, 5.9, 6.1, -1.0, 0.0625, 0.06, 0.04, 0.0, 11.0])
    kind = VarianceBased(alpha=0.5)
    # The largest is in [8, 16): 8 stands for all above, 2**-4 is seven steps below.
    expected = [8.0, 4.0, 8.0, -1.0, 0.0625, 0.0625, 0.0, 0.0, 8.0]
    assert _packet(kind, x).decode().tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_transform_is_hadamard_s(size: int) -> None:
    rows = torch.randn(3, size, generator=_random(0), dtype=torch.float64)
    matrix = torch.from_numpy(scipy.linalg.hadamard(size)).double() / math.sqrt(size)
    torch.testing.assert_close(hadamard(rows), rows @ matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 5, 64, 100, 300])
def test_a_rotation_is_undone(n: int) -> None:
    x = torch.randn(n, generator=_random(n), dtype=torch.float64)
    decoded = _packet(Rotated(inner=TopK(ratio=1.0), block=64), x).decode()
    torch.testing.assert_close(decoded, x, rtol=0, atol=1e-12)


def test_rotation_helps_one_bit_where_one_entry_is_large() -> None:
    x = torch.randn(4096, generator=_random(0)) * 0.01
    x[7] = 10.0
    whole = x.square().sum()
    kinds = (OneBit(), Rotated(inner=OneBit(), block=4096))
    lost = [(_packet(kind, x).decode() - x).square().sum() for kind in kinds]
    assert lost[0] > 0.9 * whole
    assert lost[1] < 0.1 * whole


def test_a_sketch_of_workers_tells_what_is_large_for_all() -> None:
    n, workers = 2000, 8
    large = torch.zeros(n)
    large[[3, 500, 1999]] = torch.tensor([4.0, -5.0, 6.0])
    kind = CountSketch(ratio=0.25, rows=5, keep=3 / n)
    packets = [
        _packet(kind, large + 0.05 * torch.randn(n, generator=_random(w)), worker=w)
        for w in range(workers)
    ]
    total = added(packets).decode() / workers
    assert total.nonzero().view(-1).tolist() == [3, 500, 1999]
    torch.testing.assert_close(total, large, rtol=0, atol=0.3)


def test_a_sketch_s_entries_are_medians_that_one_large_entry_does_not_spoil() -> None:
    """A mean over rows would be spoilt wherever any one of five cells is shared, 22 % of them."""
    x = torch.ones(1000)
    x[17] = 1e6
    told = _packet(CountSketch(ratio=0.1, rows=5, keep=1.0), x).decode()
    assert (told.abs() > 1e4).float().mean() < 0.03
    assert told[17] == pytest.approx(1e6, rel=1e-3)
