"""What every compressor that has packets must keep, whatever it does to the numbers."""

from __future__ import annotations

import copy
import io
from typing import get_args

import pytest
import torch

from polyreme.algo.compress import (
    ATOMO,
    QSGD,
    SBC,
    STC,
    AdaComp,
    Cast,
    Compressor,
    CountSketch,
    Dense,
    LowRank,
    Natural,
    OneBit,
    RandomK,
    Rotated,
    Sign,
    TernGrad,
    Threshold,
    TopK,
    VarianceBased,
)
from polyreme.algo.compress.kind import CompressorKind, State
from polyreme.algo.draw import Draw
from polyreme.algo.packet import Like, Message, Packet, added, from_bytes, to_bytes

torch.set_num_threads(1)

MEMBERS: list[CompressorKind] = [
    Dense(),
    Cast(to="fp16"),
    Cast(to="bf16"),
    QSGD(),
    QSGD(levels=1, bucket=4),
    QSGD(levels=1, coding="elias"),
    QSGD(levels=7, bucket=4, coding="elias_dense"),
    TernGrad(),
    TernGrad(clip=0),
    Natural(),
    Sign(),
    Sign(scale="mean"),
    OneBit(),
    TopK(ratio=0.3),
    TopK(ratio=0.7),
    TopK(ratio=1.0),
    TopK(ratio=0.3, select="sampled"),
    RandomK(ratio=0.3),
    RandomK(ratio=0.3, indices="own", scaled=False),
    Threshold(threshold=0.5),
    AdaComp(bin_size=4),
    VarianceBased(alpha=0.5),
    SBC(ratio=0.3),
    STC(ratio=0.3),
    Rotated(),
    Rotated(inner=TopK(ratio=0.3), block=64),
    Rotated(inner=RandomK(ratio=0.3)),
    CountSketch(ratio=2.0, keep=0.3),
    ATOMO(rank=1),
    LowRank(rank=1),
]
LIKES = [
    Like(shape, dtype)
    for shape in [(), (1,), (0, 3), (7, 5), (33,)]
    for dtype in ["float32", "float64", "bfloat16"]
]


def _name(value: object) -> str:
    return repr(value).replace("'", "") if isinstance(value, CompressorKind) else str(value)


members = pytest.mark.parametrize("kind", MEMBERS, ids=_name)


def _draw(step: int = 0, worker: int = 0) -> Draw:
    return Draw(seed=5, worker=worker, step=step)


def _tensor(like: Like, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(like.shape, dtype=torch.float64, generator=random)
    return wide.to(getattr(torch, like.dtype))


def _packet(kind: CompressorKind, x: torch.Tensor, draw: Draw | None = None) -> Packet:
    like = Like.of(x)
    buffers, _ = kind.encode(x, kind.init(like), draw or _draw())
    return Packet(buffers=buffers, like=like, kind=kind)


def _copy(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_every_compressor_with_packets_is_here() -> None:
    listed = {type(member) for member in MEMBERS}
    assert listed == {kind for kind in get_args(Compressor) if not kind.in_rounds}


@members
@pytest.mark.parametrize("like", LIKES, ids=str)
def test_a_packet_is_its_form_and_survives_the_wire(kind: CompressorKind, like: Like) -> None:
    x = _tensor(like)
    before = x.clone()
    packet = _packet(kind, x)
    assert torch.equal(x, before), "encoding leaves its argument as it is"
    for buffer, form in zip(packet.buffers, kind.form(like), strict=True):
        assert buffer.dim() == 1
        assert buffer.dtype == getattr(torch, form.dtype)
        assert form.length in (None, buffer.numel())
    decoded = packet.decode()
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    message = Message(packets=(packet, packet))
    data = to_bytes(message)
    assert (data.dtype, data.numel()) == (torch.uint8, message.nbytes)
    for received in from_bytes(data, message.kinds).packets:
        assert torch.equal(received.decode(), decoded)


@members
@pytest.mark.parametrize("like", LIKES[-3:], ids=str)
def test_state_can_be_saved_and_taken_up_again(kind: CompressorKind, like: Like) -> None:
    state = kind.init(like)
    for step in range(3):
        _, state = kind.encode(_tensor(like, step), state, _draw(step))
    kept, untouched = _copy(state), copy.deepcopy(state)
    one, _ = kind.encode(_tensor(like, 9), state, _draw(3))
    two, _ = kind.encode(_tensor(like, 9), kept, _draw(3))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for name, value in untouched.items():
        assert torch.equal(state[name], value), "encoding leaves its state as it is"


@members
@pytest.mark.parametrize("shape", [(), (9,)])
def test_zeros_stay_zeros(kind: CompressorKind, shape: tuple[int, ...]) -> None:
    decoded = _packet(kind, torch.zeros(shape)).decode()
    # One bit without a scale has no zero.
    expected = torch.ones(shape) if kind == Sign() else torch.zeros(shape)
    assert torch.equal(decoded, expected)


@members
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_made_finite(kind: CompressorKind, bad: float) -> None:
    x = _tensor(Like((33,), "float32"))
    x[4] = bad
    decoded = _packet(kind, x).decode()
    if isinstance(kind, Sign) and kind.scale == "none":
        assert set(decoded.tolist()) == {-1.0, 1.0}
    elif isinstance(kind, RandomK):
        kept = kind.kept(_packet(kind, x).buffers, Like.of(x))
        assert bool(decoded.isfinite().all()) == (not kept[4])
    elif isinstance(kind, Rotated) and isinstance(kind.inner, RandomK | TopK):
        assert not decoded.isfinite().any()
    else:
        assert not decoded.isfinite().all()


@members
def test_packets_are_a_function_of_the_draw(kind: CompressorKind) -> None:
    x = _tensor(Like((8, 8), "float32"))
    first, again = _packet(kind, x).decode(), _packet(kind, x).decode()
    assert torch.equal(first, again)
    others = [_packet(kind, x, _draw(step, 0)).decode() for step in range(1, 9)]
    drawn = any(not torch.equal(first, other) for other in others)
    unmoved = {Dense, Cast, Sign, OneBit, TopK, Threshold, AdaComp, VarianceBased, SBC, STC}
    by_sample = isinstance(kind, TopK) and kind.select == "sampled"
    assert drawn == (by_sample or type(kind) not in unmoved)


@members
def test_packets_that_add_give_the_packet_of_the_sum(kind: CompressorKind) -> None:
    like = Like((33,), "float64")
    one, two = _tensor(like, 0), _tensor(like, 1)
    packets = [_packet(kind, one, _draw(7, 0)), _packet(kind, two, _draw(7, 1))]
    if not kind.adds:
        with pytest.raises(AssertionError):
            added(packets)
        return
    both = added(packets)
    expected = _packet(kind, one + two, _draw(7, 2))
    for buffer, wanted in zip(both.buffers, expected.buffers, strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(both.decode(), expected.decode(), rtol=0, atol=1e-12)


@members
def test_kept_entries_are_those_that_are_not_zero(kind: CompressorKind) -> None:
    if not kind.sparse:
        return
    x = _tensor(Like((7, 5), "float32"))
    packet = _packet(kind, x)
    kept = kind.kept(packet.buffers, packet.like)
    assert (kept.dtype, kept.shape) == (torch.bool, x.shape)
    assert kept.any()
    assert torch.equal(kept, packet.decode() != 0)


COPIES = 10_000


@pytest.mark.parametrize(
    "kind",
    [
        Dense(),
        QSGD(levels=1, bucket=8),
        QSGD(levels=15, bucket=8, coding="elias"),
        TernGrad(clip=0),
        Natural(),
        RandomK(ratio=0.2),
        RandomK(ratio=0.2, indices="own"),
        Rotated(inner=QSGD(levels=2, bucket=64), block=64),
        Rotated(inner=RandomK(ratio=0.2), block=64),
    ],
    ids=_name,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_over_draws_is_the_input(kind: CompressorKind, dtype: torch.dtype) -> None:
    assert kind.unbiased
    x = torch.tensor([0.3, -1.7, 0.0, 1e-3, 2.5, -0.04, 0.9, -0.6]).to(dtype).float()
    # bfloat16 has too few digits for the mean of what is decoded; what is drawn is exact.
    copies = x.repeat(COPIES).to(dtype)
    decoded = _packet(kind, copies).decode().view(COPIES, 8).double()
    error = (decoded.mean(0) - x.double()).abs()
    rounding = 2.0**-8 * decoded.abs().amax(0) if dtype == torch.bfloat16 else 1e-6
    assert (error <= 5 * decoded.std(0) / COPIES**0.5 + rounding).all(), error


def test_the_rest_do_not_promise_it() -> None:
    promised = {type(kind) for kind in MEMBERS if kind.unbiased}
    assert promised == {Dense, QSGD, TernGrad, Natural, RandomK, Rotated, ATOMO}
    assert not TernGrad().unbiased
    assert not RandomK(scaled=False).unbiased
    assert not Rotated(inner=Sign()).unbiased
