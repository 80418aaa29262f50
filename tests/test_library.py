"""Functions for loops of one's own: compressors of a tensor, aggregators of rows, light imports."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
import torch

import polyreme as pr
from polyreme import spec
from polyreme.algo.aggregate.kind import AggregatorKind
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Compressor
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.draw import Draw
from polyreme.algo.members import members
from polyreme.algo.packet import Buffer, Like
from polyreme.errors import ConfigError

torch.set_num_threads(1)

CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "cast": {},
    "qsgd": {"levels": 4},
    "terngrad": {},
    "natural": {},
    "sign": {"scale": "mean"},
    "onebit": {},
    "topk": {"ratio": 0.1},
    "randomk": {"ratio": 0.1},
    "threshold": {"threshold": 0.5},
    "adacomp": {"bin_size": 8},
    "variancebased": {"alpha": 0.5},
    "sbc": {"ratio": 0.1},
    "stc": {"ratio": 0.1},
    "rotated": {},
    "countsketch": {},
    "atomo": {"rank": 1},
    "lowrank": {"rank": 1},
}
DRAWN = ("qsgd", "terngrad", "natural", "randomk", "rotated", "countsketch", "atomo", "lowrank")


def _x(shape: tuple[int, ...] = (16, 12), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def _call(name: str, x: torch.Tensor, **options: Any) -> Any:
    return getattr(pr.compress, name)(x, **CALLS[name], **options)


def test_every_compressor_that_has_packets_is_a_function() -> None:
    kinds = {kind.__name__.lower() for kind in get_args(Compressor) if not kind.in_rounds}
    assert set(CALLS) == kinds


@pytest.mark.parametrize("name", CALLS)
def test_a_packet_has_bytes_and_decodes(name: str) -> None:
    x = _x()
    kept = x.clone()
    packet = _call(name, x)
    decoded = packet.decode()
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    assert torch.equal(x, kept)
    assert 0 < packet.nbytes <= 4 * x.numel()
    assert (packet.nbytes < 4 * x.numel()) == (name != "dense")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_come_back_as_they_are(name: str, dtype: torch.dtype) -> None:
    assert _call(name, _x(dtype=dtype)).decode().dtype == dtype


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(0,), (1,), ()])
def test_tensors_of_no_and_of_one_entry(name: str, shape: tuple[int, ...]) -> None:
    assert _call(name, _x(shape)).decode().shape == shape


@pytest.mark.parametrize("name", DRAWN)
def test_a_generator_says_what_is_drawn(name: str) -> None:
    def drawn(seed: int) -> torch.Tensor:
        return _call(name, _x(), generator=torch.Generator().manual_seed(seed)).decode()

    assert torch.equal(drawn(0), drawn(0))
    assert any(not torch.equal(drawn(0), drawn(seed)) for seed in range(1, 6))


@pytest.mark.parametrize("name", DRAWN)
def test_without_a_generator_torch_s_own_seed_says_it(name: str) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(_call(name, _x()).decode())
    assert torch.equal(*found)


def test_a_tensor_that_wants_gradients_is_no_matter() -> None:
    assert not pr.compress.topk(_x().requires_grad_(), 0.1).decode().requires_grad


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda x: pr.compress.topk(x, 0.0), "TopK.ratio"),
        (lambda x: pr.compress.topk(x, 1.5), "TopK.ratio"),
        (lambda x: pr.compress.topk(x, math.nan), "TopK.ratio"),
        (lambda x: pr.compress.topk(x, 0.1, select="best"), "TopK.select"),
        (lambda x: pr.compress.qsgd(x, 0), "QSGD.levels"),
        (lambda x: pr.compress.qsgd(x, 2.5), "QSGD.levels"),
        (lambda x: pr.compress.cast(x, "fp8"), "Cast.to"),
        (lambda x: pr.compress.topk(x.long(), 0.1), "x"),
        (lambda x: pr.compress.topk(x.tolist(), 0.1), "x"),
        (lambda x: pr.compress.rotated(x, inner={"kind": "Sign"}), "Rotated.inner"),
        (lambda x: pr.compress.rotated(x, inner="Sign"), "Rotated.inner"),
        (lambda x: pr.compress.topk(x, "0.1"), "TopK.ratio"),
        (lambda x: pr.compress.cast(x, 3), "Cast.to"),
        (lambda x: pr.compress.qsgd(x, generator=5), "generator"),
        (lambda x: pr.compress.packed("TopK", x), "compress"),
        (lambda x: pr.compress.packed(Rounded, x), "compress"),
        (lambda x: pr.aggregate.mean(x.tolist()), "rows"),
        (lambda x: pr.aggregate.combined("Mean", x), "aggregator"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(call: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(_x())
    (violation,) = caught.value.violations
    assert violation.path == path
    assert violation.legal


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: pr.compress.topk(x, "0.1"), '"0.1" is not legal. Legal: float > 0 and <= 1.'),
        (lambda x: pr.compress.cast(x, "bf61"), '"bf61" is not legal. Legal: "bf16", "fp16".'),
        (lambda x: pr.compress.cast(x, 3), '3 is not legal. Legal: "fp16", "bf16".'),
        (lambda x: pr.compress.packed("topk", x), '"topk" is none. Legal: TopK(...), Dense(...)'),
        (lambda x: pr.compress.packed(Rounded, x), "is a class, and one that is made of it is"),
        (lambda x: pr.aggregate.mean([x]), '"list" is not rows of real numbers. Legal: a tensor'),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_given_and_what_is_legal(
    call: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        call(_x())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("room", "name", "near"),
    [("compress", "topK", "topk"), ("aggregate", "means", "mean"), ("optim", "Adamw", "AdamW")],
)
def test_a_function_that_is_not_there_is_answered_with_those_that_are_like_it(
    room: str, name: str, near: str
) -> None:
    with pytest.raises(AttributeError, match=rf"{room} has no '{name}'. There are: {near}, "):
        getattr(getattr(pr, room), name)
    with pytest.raises(AttributeError, match=r"polyreme has no 'trian'. There are: train, "):
        pr.trian  # noqa: B018


def test_a_compressor_in_rounds_has_no_packet() -> None:
    for kind in get_args(Compressor):
        if kind.in_rounds:
            with pytest.raises(ConfigError, match="exchanges in rounds"):
                pr.compress.packed(kind(), _x())


class Rounded(CompressorKind, frozen=True, kw_only=True):
    """One of the user's own: whole numbers in 8 bits."""

    def form(self, like: Like) -> tuple[Buffer, ...]:
        return (Buffer("int8", like.n_entries),)

    def encode(self, x: torch.Tensor, state: Any, draw: Draw) -> Any:
        return (x.reshape(-1).round().to(torch.int8),), state

    def decode(self, buffers: Any, like: Like) -> torch.Tensor:
        return buffers[0].to(getattr(torch, like.dtype)).view(like.shape)


class Wrong(Rounded, frozen=True, kw_only=True):
    """It does not keep to the form of `Rounded` in one way."""

    way: str

    def encode(self, x: torch.Tensor, state: Any, draw: Draw) -> Any:
        (held,), state = super().encode(x, state, draw)
        return {
            "bare": held,
            "no state": (held,),
            "two": ((held, held), state),
            "list": ((held.tolist(),), state),
            "dtype": ((held.float(),), state),
            "length": ((held[:1],), state),
            "shape": ((held.view(x.shape),), state),
        }.get(self.way, ((held,), state))

    def decode(self, buffers: Any, like: Like) -> Any:
        decoded = super().decode(buffers, like)
        ways = {"flat": decoded.reshape(-1), "double": decoded.double(), "none": None}
        return ways.get(self.way, decoded)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("bare", "encode: .* is not buffers and a state"),
        ("no state", "encode: .* is not buffers and a state"),
        ("two", r"encode: 2 is the number of buffers, and its form has 1\. Legal: 1"),
        ("list", r'encode: "list" is not buffer 0 of its form\. Legal: a tensor of int8 of one'),
        ("dtype", "encode: .*float32 of shape .* is not buffer 0 of its form"),
        ("length", "encode: .*int8 of shape .* is not buffer 0 of its form.*of length 2"),
        ("shape", "encode: .*int8 of shape .* is not buffer 0 of its form"),
        ("flat", r"decode: .*float32 of shape \(2,\).* Legal: float32 of shape \(1, 2\)"),
        ("double", "decode: .*float64 of shape .* is not like what was encoded"),
        ("none", 'decode: "NoneType" is not like what was encoded'),
    ],
)
def test_a_compressor_of_ones_own_is_held_to_its_form_at_once(way: str, said: str) -> None:
    x = torch.tensor([[1.2, -3.7]])
    with pytest.raises(ConfigError, match=rf"Wrong\.{said}"):
        pr.compress.packed(Wrong(way=way), x)
    assert pr.compress.packed(Wrong(way="right"), x).decode().tolist() == [[1.0, -4.0]]


class Unfinished(CompressorKind, frozen=True, kw_only=True, tag="Unfinished", tag_field="kind"):
    """Says what its packets are, and not how they are made."""

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """All entries."""
        return (Buffer(dtype=like.dtype, length=like.n_entries),)


def test_what_an_own_compressor_lacks_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"test_library\.Unfinished must define 'encode'"):
        pr.compress.packed(Unfinished(), _x())


def test_a_compressor_of_the_user_s_own_makes_packets() -> None:
    packet = pr.compress.packed(Rounded(), torch.tensor([[1.2, -3.7]]))
    assert packet.nbytes == 2
    assert packet.decode().tolist() == [[1.0, -4.0]]


# Aggregators


def test_the_mean_is_the_mean() -> None:
    rows = _x((5, 7), torch.float64)
    assert torch.equal(pr.aggregate.majority_vote(rows), rows.sign().sum(0).sign())
    torch.testing.assert_close(pr.aggregate.mean(rows), rows.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_is_of_the_rows_type_and_leaves_them(dtype: torch.dtype) -> None:
    rows = _x((3, 4), dtype)
    kept = rows.clone()
    out = pr.aggregate.mean(rows)
    assert out.dtype == dtype
    assert out.shape == (4,)
    assert torch.equal(rows, kept)


def test_one_row_is_its_own_mean_and_no_entries_are_none() -> None:
    row = _x((1, 3))
    assert torch.equal(pr.aggregate.mean(row), row[0])
    assert pr.aggregate.mean(torch.zeros(2, 0)).shape == (0,)


def test_nan_in_a_row_is_nan_in_that_entry_alone() -> None:
    rows = torch.tensor([[1.0, math.nan], [3.0, 1.0]])
    out = pr.aggregate.mean(rows)
    assert out[0] == 2
    assert out[1].isnan()


@pytest.mark.parametrize(
    "rows", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 2, 2), torch.zeros(2, 3).long()]
)
def test_what_is_no_rows_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"rows: .*is not rows of real numbers"):
        pr.aggregate.mean(rows)


class Largest(AggregatorKind, frozen=True, kw_only=True):
    """One of the user's own."""

    def combine(self, rows: Any, state: Any) -> Any:
        return torch.stack(list(rows)).amax(0), state, ()


def test_an_aggregator_of_the_user_s_own_combines() -> None:
    rows = torch.tensor([[1.0, 5.0], [2.0, 3.0]])
    assert pr.aggregate.combined(Largest(), rows).tolist() == [2.0, 5.0]


# The package


def test_a_name_of_the_package_imports_no_torch_until_it_computes() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import polyreme as pr\n"
        "pr.compress.topk, pr.aggregate.mean, pr.DataParallel()\n"
        "from polyreme.algo.members import members\n"
        "assert members()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_package_has_is_listed() -> None:
    names = {"aggregate", "compress", "optim", "ddp_hook", "DataParallel"}
    assert names <= set(dir(pr))
    for name in names:
        assert getattr(pr, name) is not None


@pytest.mark.parametrize("name", ["algo.compress.functions", "aggregate"])
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"polyreme.{name}")).failed == 0


@pytest.mark.parametrize("member", members(), ids=lambda m: f"{m.part}-{m.kind}")
def test_an_unknown_option_of_a_member_is_an_error_that_lists_known_ones(member: Any) -> None:
    table = {"kind": member.kind, "zzz": 1}
    if member.kind == "Matrix":
        table["path"] = "w.npy"
    with pytest.raises(msgspec.ValidationError, match="unknown field `zzz`"):
        msgspec.convert(table, member.cls)
    part, _, below = member.part.partition(".")
    name = member.part
    if below == "before":
        table, name = {"kind": "Krum", below: [table]}, f"{member.part}[0]"
    elif below:
        table = {"kind": "Gossip", below: table}
    document = {
        "model": {"kind": "mlp"},
        "data": {"kind": "digits"},
        "train": {"steps": 1},
        "data_parallel": {part: table},
    }
    with pytest.raises(ConfigError) as caught:
        spec.parse(document)
    path = f"data_parallel.{name}.zzz"
    (violation,) = [each for each in caught.value.violations if each.path == path]
    free = set(member.cls.__struct_fields__) - {"path"}
    assert all(name in violation.legal for name in free)


def test_the_algorithm_itself_knows_its_parts() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `compres`"):
        msgspec.convert({"compres": {"kind": "TopK"}}, DataParallel)
