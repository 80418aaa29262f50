"""What every sync with servers keeps to, whichever it is."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD
from polyreme.algo.sync import Sync
from polyreme.algo.sync.served import Served
from polyreme.errors import ConfigError
from polyreme.runtime import own
from polyreme.sim.compute import LogNormal
from served import simulated

torch.set_num_threads(1)
N = 3
MEMBERS = [sync for sync in (kind() for kind in get_args(Sync)) if sync.n_servers(N)]
each_member = pytest.mark.parametrize("sync", MEMBERS, ids=lambda sync: type(sync).__name__)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _model(clock: Any, n: int = N) -> torch.Tensor:
    return clock.algorithm.sync.whole(clock.states[n:], clock.states[:n])


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _packed(sync) -> DataParallel:
    """With compression of all that travels, unless the member refuses it: then each says so."""
    pushes: dict[str, Any] = {"compress": TopK(ratio=0.3), "feedback": ErrorFeedback()}
    refused = [each.path for each in _of(sync, **pushes).check()]
    if refused:
        assert sorted(refused) == ["data_parallel.compress.kind", "data_parallel.feedback.kind"]
        pushes = {}
    back: dict[str, Any] = {"compress_back": TopK(ratio=0.3)}
    if refused := [each.path for each in _of(sync, **back).check()]:
        assert refused == ["data_parallel.compress_back.kind"]
        back = {}
    return _of(sync, **pushes, **back)


def _forms(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _forms(value) for key, value in state.items()}
    return (tuple(state.shape), state.dtype) if torch.is_tensor(state) else type(state)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    return [state] if torch.is_tensor(state) else []


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


def _play(algorithm: DataParallel, gradient=_gradient, n: int = N, **more) -> Any:
    options = {"lr": 0.01, "compute": LogNormal(spread=1.0), **more}
    start = options.pop("start", None)
    return simulated(algorithm, gradient, _start() if start is None else start, n, **options)


@each_member
def test_states_keep_their_form_and_can_be_kept(sync) -> None:
    algorithm = _packed(sync)
    clock = _play(algorithm)
    before = [_forms(state) for state in clock.states]
    clock.play(3 * sync.per_push)
    clock.drain()
    assert [_forms(state) for state in clock.states] == before
    assert all(own.named(state, rank) for rank, state in enumerate(clock.states))


@each_member
def test_a_bad_gradient_reaches_no_state(sync) -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        found = _gradient(rank, batch, w)
        if batch == 1 and rank == 1:
            found[3] = math.nan
        return found

    records: list[Any] = []
    algorithm = _packed(sync)
    clock = _play(algorithm, gradient, on_record=lambda _me, record, _s: records.append(record))
    clock.play(6 * sync.per_push)
    clock.drain()
    assert any(record.seen.bad == (1,) for record in records)
    for state in clock.states:
        assert all(tensor.isfinite().all() for tensor in _tensors(state))


@each_member
@pytest.mark.parametrize("n_entries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_worker_and_short_vectors_are_trained(sync, n_entries: int, dtype) -> None:
    start = torch.ones(n_entries, dtype=dtype)
    clock = _play(_of(sync), n=1, start=start)
    clock.play(6 * sync.per_push)
    clock.drain()
    model = _model(clock, 1)
    assert (model.shape, model.dtype) == (start.shape, dtype)
    assert model.isfinite().all()
    assert (model != start).any()


@each_member
def test_what_was_drained_goes_on_from_states_alone(sync) -> None:
    algorithm = _packed(sync)
    first = _play(algorithm)
    first.play(3 * sync.per_push)
    first.drain()
    one = _play(algorithm, states=[dict(state) for state in first.states])
    other = _play(algorithm, states=[dict(state) for state in first.states])
    one.play(7 * sync.per_push)
    other.play(7 * sync.per_push)
    one.drain()
    other.drain()
    assert all(_alike(a, b) for a, b in zip(one.states, other.states, strict=True))
    assert not torch.equal(_model(one), _model(first))


@each_member
def test_a_quadratic_is_brought_down(sync) -> None:
    """All workers have the same minimum, so that no member stops elsewhere."""
    target = torch.sin(torch.arange(12).double())

    def gradient(_rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
        return w - target

    clock = _play(_of(sync), gradient, lr=0.02)
    clock.play(400 * max(1, sync.per_push // 4))
    model = _model(clock)
    assert (model - target).norm() < 0.02 * (_start() - target).norm()


@pytest.mark.parametrize(
    "sync",
    [sync for sync in MEMBERS if isinstance(sync, Served)],  # of others it follows from workers
    ids=lambda sync: type(sync).__name__,
)
def test_no_member_takes_more_servers_than_entries(sync) -> None:
    wide = msgspec.structs.replace(sync, servers=5)
    if sync.one_server:
        (found,) = _of(wide).check()
        assert (found.path, found.legal) == ("data_parallel.sync.servers", "1")
        return
    assert not _of(wide).check()
    clock = _play(_of(wide), n=2, start=torch.ones(5).double())
    clock.play(4 * sync.per_push)
    assert torch.isfinite(_model(clock, 2)).all()
    with pytest.raises(ConfigError, match="is more than the model's 4 parameters"):
        _play(_of(wide), n=2, start=torch.ones(4).double())


def test_what_is_offered_instead_of_a_part_is_a_kind_of_it() -> None:
    parts = ("rule", "topology", "compress", "compress_back", "feedback", "aggregate")
    unions = {part: get_args(get_type_hints(DataParallel)[part]) for part in parts}
    n_names = 0
    for sync, part in itertools.product(map(_made, get_args(Sync)), parts):
        kinds = {each.__struct_config__.tag for each in unions[part]}
        for member in map(_made, unions[part]):
            for found in _of(sync, **{part: member}).check():
                at = found.path.removeprefix("data_parallel.").removesuffix(".kind")
                if at != part or not found.path.endswith(".kind"):
                    continue
                own, _, _ = found.legal.partition(" (")
                names = re.findall(r'"([^"]+)"', own)
                assert {*names, found.value} <= kinds, f"{found}"
                n_names += len(names)
    assert n_names


def _made(kind: Any) -> Any:
    """A member of a kind; those with a field that must be given get one that is legal."""
    given = {"alpha": 0.5, "ratio": 0.1, "threshold": 0.1, "path": "matrix.txt"}
    return kind(**{name: given[name] for name in kind.__struct_fields__ if name in given})
