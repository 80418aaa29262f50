"""The hook for torch's DDP: against plain DDP, and against all workers played in one process."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polyreme as pr
from polyreme.algo.aggregate import CoordinateMedian
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import (
    AdaComp,
    Cast,
    GTopK,
    PowerSGD,
    RandomK,
    Sign,
    Threshold,
    TopK,
)
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.feedback import DGC, EF21, ErrorFeedback, WorkerMomentum
from polyreme.algo.packet import Buffer, Like
from polyreme.algo.rule import SGD
from polyreme.algo.topology import ParameterServer, Ring
from polyreme.errors import ConfigError
from workers import play

torch.set_num_threads(1)

N = 2
LR = 0.1


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    features = torch.randn(4, 6, generator=generator)
    return features, torch.randn(4, 3, generator=generator)


def _backward(model: nn.Module, rank: int, step: int) -> None:
    features, wanted = _samples(rank, step)
    (model(features) - wanted).square().mean().backward()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _ddp(model: nn.Module) -> DistributedDataParallel:
    # Buckets so small that there are several, and that DDP makes others after the first step.
    return DistributedDataParallel(model, bucket_cap_mb=1e-4)


def _trained(
    world: Any,
    algorithm: Any,
    steps: int,
    rates: tuple[float, ...] = (),
    stop: int | None = None,
) -> dict[str, Any]:
    """Train; after `stop` steps go on with another DDP and hook, from what was saved."""
    model = _model()

    def wrapped() -> tuple[DistributedDataParallel, Any, torch.optim.Optimizer]:
        ddp, state = _ddp(model), None
        if algorithm is not None:
            state, hook = pr.ddp_hook(algorithm, lr=LR)
            ddp.register_comm_hook(state, hook)
        return ddp, state, torch.optim.SGD(model.parameters(), lr=LR)

    ddp, state, optimizer = wrapped()
    weights, buckets = [], set()
    for step in range(steps):
        if step == stop:
            saved = io.BytesIO()
            torch.save(state.state_dict(), saved)
            saved.seek(0)
            ddp, state, optimizer = wrapped()
            state.load_state_dict(torch.load(saved, weights_only=True))
        if rates:
            optimizer.param_groups[0]["lr"] = state.lr = rates[step]
        optimizer.zero_grad()
        _backward(ddp, world.rank, step)
        optimizer.step()
        weights.append(_flat(model))
        buckets.add(tuple(getattr(state, "_buckets", ())))
    return {
        "weights": torch.stack(weights),
        "nbytes": state.nbytes if state is not None else 0,
        "buckets": buckets,
    }


def _played(algorithm: DataParallel, steps: int, rates: tuple[float, ...] = ()) -> torch.Tensor:
    """The same by the program of all workers in this process."""
    model = _model()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def gradient(rank: int, batch: int, params: torch.Tensor) -> torch.Tensor:
        nn.utils.vector_to_parameters(params, model.parameters())
        model.zero_grad()
        _backward(model, rank, batch)
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    rate = (lambda step: rates[step]) if rates else LR
    algorithm = msgspec.structs.replace(algorithm, rule=SGD(lr=LR))
    played = play(algorithm, gradient, _flat(model), N, steps, lr=rate, shapes=shapes)
    return played.params[1:, 0]


def test_without_compression_it_is_plain_ddp(pool: Any) -> None:
    hooked = pool(N).run(_trained, DataParallel(), 4)
    plain = pool(N).run(_trained, None, 4)
    for ours, theirs in zip(hooked, plain, strict=True):
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=0)


ALGORITHMS = {
    "top-k": DataParallel(compress=TopK(ratio=0.2), feedback=ErrorFeedback()),
    "top-k, plain": DataParallel(compress=TopK(ratio=0.2)),
    "signs": DataParallel(compress=Sign(scale="mean"), feedback=ErrorFeedback(rate="outside")),
    "sizes that vary": DataParallel(compress=Threshold(threshold=0.02), feedback=EF21()),
    "momentum": DataParallel(compress=TopK(ratio=0.2), feedback=DGC()),
    "a number as state": DataParallel(compress=TopK(ratio=0.5), feedback=WorkerMomentum()),
    "dense, small ones": DataParallel(
        compress=TopK(ratio=0.2, dense_below=8), feedback=ErrorFeedback()
    ),
    "suspects": DataParallel(aggregate=CoordinateMedian(byzantine=0)),
    "messages": DataParallel(compress=GTopK(ratio=0.2), feedback=ErrorFeedback()),
    "a ring": DataParallel(topology=Ring(), compress=TopK(ratio=0.2), feedback=ErrorFeedback()),
    "a server": DataParallel(
        topology=ParameterServer(servers=2), compress=TopK(ratio=0.2), feedback=ErrorFeedback()
    ),
}


RATES = (0.1, 0.05, 0.2, 0.1, 0.1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_the_program_of_all_workers(pool: Any, name: str) -> None:
    algorithm = ALGORITHMS[name]
    expected = _played(algorithm, 5, RATES)
    for each in pool(N).run(_trained, algorithm, 5, RATES):
        torch.testing.assert_close(each["weights"], expected, rtol=0, atol=1e-6)


def test_buckets_change_after_the_first_step(pool: Any) -> None:
    """Or the test above says nothing of that."""
    for each in pool(N).run(_trained, ALGORITHMS["top-k"], 3):
        assert {1, 3} == {len(buckets) for buckets in each["buckets"]}


@pytest.mark.parametrize("name", [*ALGORITHMS, "drawn", "low rank", "changes"])
def test_a_saved_state_goes_on_as_if_never_stopped(pool: Any, name: str) -> None:
    algorithm = {**ALGORITHMS, **OTHERS}[name]
    whole = pool(N).run(_trained, algorithm, 4, (), None)
    stopped = pool(N).run(_trained, algorithm, 4, (), 2)
    # Products of matrices are rounded otherwise where they lie otherwise in memory.
    tolerance = 1e-6 if isinstance(algorithm.compress, PowerSGD) else 0
    for ours, theirs in zip(whole, stopped, strict=True):
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=tolerance)


# They draw by the order in which DDP has parameters, not by the model's.
OTHERS = {
    "drawn": DataParallel(compress=RandomK(ratio=0.2, scaled=False), feedback=ErrorFeedback()),
    "low rank": DataParallel(compress=PowerSGD(rank=1), feedback=ErrorFeedback()),
    "changes": DataParallel(compress=AdaComp(bin_size=4), feedback=ErrorFeedback()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_workers_stay_alike(pool: Any, name: str) -> None:
    first, second = pool(N).run(_trained, OTHERS[name], 4)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert not torch.equal(first["weights"][-1], first["weights"][0])


def test_fewer_bytes_are_given(pool: Any) -> None:
    dense = pool(N).run(_trained, DataParallel(), 2)[0]["nbytes"]
    sparse = pool(N).run(_trained, ALGORITHMS["top-k, plain"], 2)[0]["nbytes"]
    n_entries = _flat(_model()).numel()
    assert dense == 2 * 4 * n_entries
    packets = [pr.compress.topk(p.detach(), 0.2).nbytes for p in _model().parameters()]
    assert sparse == 2 * sum(packets)


def _accumulated(world: Any, algorithm: DataParallel, steps: int) -> dict[str, Any]:
    """Two microbatches a step, the first under no_sync."""
    model = _model()
    ddp = _ddp(model)
    state, hook = pr.ddp_hook(algorithm, lr=LR)
    calls: list[int] = []

    def counted(
        state: Any,
        bucket: torch.distributed.GradBucket,
    ) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return hook(state, bucket)

    counted.__annotations__ = dict(hook.__annotations__)
    ddp.register_comm_hook(state, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    weights, firsts = [], []
    for step in range(steps):
        optimizer.zero_grad()
        calls.clear()
        with ddp.no_sync():
            _backward(ddp, world.rank, 2 * step)
        assert not calls
        _backward(ddp, world.rank, 2 * step + 1)
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()
        weights.append(_flat(model))
        firsts.append(calls.count(0))
    return {"weights": torch.stack(weights), "firsts": firsts, "step": state.step}


@pytest.mark.parametrize("name", ["dense", "top-k"])
def test_accumulated_gradients_are_exchanged_once_a_step(pool: Any, name: str) -> None:
    """A hook that ran at the wrong microbatch left each worker with a gradient of its own."""
    compress = {"dense": {}, "top-k": {"compress": TopK(ratio=0.2), "feedback": EF21()}}[name]
    model = _model()

    def gradient(rank: int, batch: int, params: torch.Tensor) -> torch.Tensor:
        nn.utils.vector_to_parameters(params, model.parameters())
        model.zero_grad()
        _backward(model, rank, 2 * batch)
        _backward(model, rank, 2 * batch + 1)
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    algorithm = DataParallel(**compress)
    halved = msgspec.structs.replace(algorithm, rule=SGD(lr=LR / 2))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    played = play(halved, gradient, _flat(model), N, 4, lr=LR / 2, shapes=shapes)
    first, second = pool(N).run(_accumulated, algorithm, 4)
    assert torch.equal(first["weights"], second["weights"])
    assert (first["firsts"], first["step"]) == ([1] * 4, 4)
    torch.testing.assert_close(first["weights"], played.params[1:, 0], rtol=0, atol=1e-6)


def _with_infinity(world: Any, algorithm: DataParallel) -> tuple[list[bool], bool]:
    model = _model()
    ddp = _ddp(model)
    state, hook = pr.ddp_hook(algorithm, lr=LR)
    ddp.register_comm_hook(state, hook)
    for step in range(2):
        _backward(ddp, world.rank, step)
        model.zero_grad()
    before = state.state_dict()
    # Of three buckets the second has it: the first is exchanged by then.
    if world.rank == 1:
        model[2].weight.register_hook(lambda gradient: gradient / 0)
    _backward(ddp, world.rank, 2)
    nan = [bool(p.grad.isnan().all()) for p in model.parameters()]
    after = state.state_dict()
    same = all(
        torch.equal(old["feedback"]["error"], after["parameters"][n]["feedback"]["error"])
        for n, old in before["parameters"].items()
    )
    return nan, same


def test_infinity_on_one_worker_is_seen_by_all_and_kept_by_none(pool: Any) -> None:
    """Signs would hide it: the others would step, and its worker's memory be spoilt for good."""
    algorithm = DataParallel(compress=Sign(scale="none"), feedback=ErrorFeedback())
    for nan, same in pool(N).run(_with_infinity, algorithm):
        assert all(nan[:3])
        assert not any(nan[4:])
        assert same


def _of_other_shapes(world: Any) -> str:
    state, hook = pr.ddp_hook(ALGORITHMS["top-k"])
    ddp = _ddp(_model())
    ddp.register_comm_hook(state, hook)
    _backward(ddp, world.rank, 0)
    other, hook = pr.ddp_hook(ALGORITHMS["top-k"])
    other.load_state_dict(state.state_dict())
    ddp = _ddp(nn.Linear(6, 3))
    ddp.register_comm_hook(other, hook)
    try:
        _backward(ddp, world.rank, 0)
    except Exception as error:
        return str(error)
    return ""


def test_a_state_of_another_model_is_refused(pool: Any) -> None:
    for said in pool(N).run(_of_other_shapes):
        assert "state.parameters[" in said


def _of_another_feedback(world: Any) -> str:
    ddp = _ddp(_model())
    state, hook = pr.ddp_hook(ALGORITHMS["top-k"])
    ddp.register_comm_hook(state, hook)
    _backward(ddp, world.rank, 0)
    other, _ = pr.ddp_hook(ALGORITHMS["sizes that vary"])
    try:
        other.load_state_dict(state.state_dict())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_state_of_another_feedback_is_refused(pool: Any) -> None:
    for said in pool(N).run(_of_another_feedback):
        assert "holds error of another feedback" in said


def _channels_last(world: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    state, hook = pr.ddp_hook(DataParallel(compress=TopK(ratio=0.1)))
    ddp.register_comm_hook(state, hook)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(world.rank))
    (ddp(x) ** 2).sum().backward()
    alone = nn.Conv2d(3, 4, 3)
    alone.load_state_dict(model.state_dict())
    (alone(x) ** 2).sum().backward()
    sent = pr.compress.topk(alone.weight.grad, 0.1).decode()
    torch.distributed.all_reduce(sent)
    return (model.weight.grad - sent / N).abs().max()


def test_dimensions_in_another_order_are_no_other_entries(pool: Any) -> None:
    assert all(error < 1e-5 for error in pool(N).run(_channels_last))


class Halves(CompressorKind, frozen=True, kw_only=True):
    """One of the user's own: entries in half precision."""

    def form(self, like: Like) -> tuple[Buffer, ...]:
        return (Buffer("float16", like.n_entries),)

    def encode(self, x: Any, state: Any, draw: Any) -> Any:
        return (x.reshape(-1).half(),), state

    def decode(self, buffers: Any, like: Like) -> Any:
        return buffers[0].to(getattr(torch, like.dtype)).view(like.shape)


def test_a_compressor_of_the_user_s_own_is_played(pool: Any) -> None:
    own = DataParallel(compress=Halves(), feedback=ErrorFeedback())
    cast = DataParallel(compress=Cast(to="fp16"), feedback=ErrorFeedback())
    ours, theirs = pool(N).run(_trained, own, 2)[0], pool(N).run(_trained, cast, 2)[0]
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=0)


def test_the_rule_is_the_user_s_own() -> None:
    """A feedback with momentum beside the default rule, Adam's, which is not used here."""
    tables = {"compress": {"kind": "TopK", "ratio": 0.1}, "feedback": {"kind": "DGC"}}
    for algorithm in (tables, DataParallel(compress=TopK(), feedback=DGC())):
        state, _ = pr.ddp_hook(algorithm)
        assert state.algorithm.compress.ratio > 0
    assert pr.ddp_hook({"rule": {"kind": "SGD", "lr": 0.3}})[0].lr == 0.3
    assert pr.ddp_hook({"rule": {"kind": "SGD", "lr": 0.3}}, lr=0.2)[0].lr == 0.2
