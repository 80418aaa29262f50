"""Lazy workers, CSER, and what every sync promises."""

from __future__ import annotations

import io
import math
import typing

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, Compressor, PowerSGD, RandomK, Sign, TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.compress.maybe import nothing, something
from polyreme.algo.draw import Draw
from polyreme.algo.feedback import EF21, Feedback, OneBitAdam
from polyreme.algo.packet import Like, Message, Packet, from_bytes, to_bytes
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import CSER, LAG, EveryStep, FedAvg, LocalSteps, Sync, ThreePoint
from polyreme.algo.topology import AllReduce, Auto, Gossip, Hierarchical, ParameterServer, Ring
from workers import play

torch.set_num_threads(1)

N = 3
SHAPES = {"weight": (6, 3), "bias": (5,), "empty": (0,), "one": ()}
SYNCS = [
    FedAvg(fraction=0.7, batches=2)
    if kind is FedAvg
    else kind(every=3)
    if "every" in kind.__struct_fields__
    else kind()
    for kind in typing.get_args(Sync)
    # see test_served_contract, test_finite_sums
    if not (kind().n_servers(N) or kind.finite_sum)
]
FEEDBACKS = [kind(warmup=2) if kind is OneBitAdam else kind() for kind in typing.get_args(Feedback)]
COMPRESSORS = [
    kind(ratio=0.3) if "ratio" in kind.__struct_fields__ else kind()
    for kind in typing.get_args(Compressor)
]


def _name(member: object) -> str:
    return type(member).__name__


syncs = pytest.mark.parametrize("sync", SYNCS, ids=_name)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _still(rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
    return _gradient(rank, 0, w)


def _start(n: int = 24, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=dtype)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# packets that may be none ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Dense(), TopK(ratio=0.3), QSGD(), Sign()], ids=_name)
@pytest.mark.parametrize("shape", [(3, 4), (), (0,)])
def test_a_packet_that_may_be_none_reads_as_it_is_or_as_zero(kind, shape) -> None:
    x = torch.linspace(-1, 2, math.prod(shape)).view(shape)
    buffers, _ = kind.encode(x, kind.init(Like.of(x)), Draw(seed=0, worker=0, step=0))
    packet = Packet(buffers=buffers, like=Like.of(x), kind=kind)
    there, none = something(packet), nothing(kind, Like.of(x), x.device)
    assert there.nbytes == 4 + packet.nbytes
    assert none.nbytes == 4
    message = Message(packets=(there, none))
    read = from_bytes(to_bytes(message), message.kinds)
    assert torch.equal(read.packets[0].decode(), packet.decode())
    assert torch.equal(read.packets[1].decode(), torch.zeros(shape))


# lazy workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [LAG(xi=0.0), ThreePoint(zeta=0.0)], ids=_name)
@pytest.mark.parametrize("topology", [Ring(), ParameterServer(servers=2), Gossip()], ids=_name)
def test_without_a_trigger_lazy_workers_are_those_of_every_step(sync, topology) -> None:
    for rule in (SGD(momentum=0.9), AdamW(lr=0.1)):
        ours = play(_of(sync, topology=topology, rule=rule), _gradient, _start(), N, 6).params
        theirs = play(_of(EveryStep(), topology=topology, rule=rule), _gradient, _start(), N, 6)
        _close(ours, theirs.params)


@pytest.mark.parametrize("compress", [TopK(ratio=0.3), RandomK(ratio=0.3), PowerSGD()], ids=_name)
def test_three_points_without_a_trigger_are_ef21(compress) -> None:
    lazy = _of(ThreePoint(zeta=0.0), compress=compress)
    ef21 = _of(EveryStep(), compress=compress, feedback=EF21())
    ends = [play(a, _gradient, _start(), N, 8, shapes=SHAPES).params for a in (lazy, ef21)]
    _close(*ends)


def test_lag_is_silent_where_its_paper_says() -> None:
    """Against the rule on moves of parameters, of gradients without noise, from one loop."""
    lr, xi, depth, curves = 0.05, 0.1, 3, [0.1, 1.0, 3.0]

    def gradient(rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
        return curves[rank] * (w - rank)

    played = play(_of(LAG(xi=xi, depth=depth)), gradient, _start(), N, 25, lr=lr)
    w, known = [_start()], torch.zeros(N, 24).double()
    silent = 0
    for step in range(25):
        moves = [(a - b).square().sum() for a, b in zip(w[::-1], w[-2::-1], strict=False)]
        bound = xi / lr**2 * sum(moves[:depth])
        for rank in range(N):
            g = gradient(rank, step, w[-1])
            if (g - known[rank]).square().sum() <= bound:
                silent += 1
            else:
                known[rank] = g
        w.append(w[-1] - lr * known.mean(0))
        _close(played.params[step + 1, 0], w[-1])
    assert silent > 20
    told = 4 + 24 * 8
    assert sum(played.nbytes) == 4 * silent + told * (N * 25 - silent)
    assert played.nbytes[0] < played.nbytes[2]  # the flattest loss is silent most


def test_three_points_are_silent_where_their_paper_says() -> None:
    zeta, lr = 30.0, 0.05
    algorithm = _of(ThreePoint(zeta=zeta), compress=TopK(ratio=0.5))
    played = play(algorithm, _still, _start(), N, 25, lr=lr)
    w, h, y, silent = _start(), torch.zeros(N, 24).double(), None, 0
    for step in range(25):
        g = torch.stack([_still(rank, 0, w) for rank in range(N)])
        for rank in range(N):
            lacks = g[rank] - h[rank]
            if y is not None and lacks.square().sum() <= zeta * (g[rank] - y[rank]).square().sum():
                silent += 1
                continue
            top = lacks.abs().topk(12).indices
            h[rank, top] = g[rank, top]
        y, w = g, w - lr * h.mean(0)
        _close(played.params[step + 1, 0], w)
    assert 10 < silent < 70


def test_a_lazy_worker_s_first_gradient_is_sent_whatever_the_trigger() -> None:
    for sync in (LAG(xi=1e9), ThreePoint(zeta=1e9)):
        played = play(_of(sync), _gradient, _start(), N, 3)
        assert played.nbytes == [4 + 24 * 8 + 2 * 4] * N
        first = torch.stack([_gradient(rank, 0, _start()) for rank in range(N)]).mean(0)
        _close(played.params[3, 0], _start() - 3 * 0.1 * first)


@pytest.mark.parametrize("sync", [LAG(), ThreePoint()], ids=_name)
@pytest.mark.parametrize("feedback", FEEDBACKS, ids=_name)
@pytest.mark.slice(8)
def test_lazy_workers_still_reach_the_optimum(sync, feedback) -> None:
    algorithm = _of(sync, feedback=feedback)
    n_rounds, lr = (300, 0.02) if feedback.owns_momentum else (100, 0.04)
    if isinstance(feedback, OneBitAdam):  # whose frozen variance is that of two steps here
        lr = lambda step: 0.05 * 0.97**step  # noqa: E731
    params = play(algorithm, _still, _start(), N, n_rounds, lr=lr).params[-1, 0]
    i = torch.arange(24, dtype=torch.float64)
    optimum = torch.stack([(r + 1) * torch.sin(i + r) for r in range(N)]).mean(0)
    assert (params - optimum).norm() < 0.05 * (_start() - optimum).norm()


# CSER ------------------------------------------------------------------------------------------


def test_cser_that_sends_all_is_sgd_with_momentum() -> None:
    rule = SGD(momentum=0.9, weight_decay=0.01)
    ours = play(_of(CSER(every=2), rule=rule), _gradient, _start(), N, 6)
    _close(ours.params, play(_of(EveryStep(), rule=rule), _gradient, _start(), N, 6).params)
    assert not any(state["error"].abs().max() > 1e-15 for state in ours.states[-1])


@pytest.mark.parametrize("topology", [Ring(), ParameterServer()], ids=_name)
def test_cser_is_its_program(topology) -> None:
    lr, beta, every, k, k2 = 0.05, 0.9, 3, 4, 8

    def top(x: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        where = x.abs().topk(n).indices
        out[where] = x[where]
        return out

    algorithm = _of(
        CSER(every=every, reset=TopK(ratio=k2 / 24)),
        rule=SGD(momentum=beta),
        compress=TopK(ratio=k / 24),
        topology=topology,
    )
    played = play(algorithm, _gradient, _start(), N, 10, lr=lr)
    w = [_start() for _ in range(N)]
    m, e = ([torch.zeros(24).double() for _ in range(N)] for _ in range(2))
    for step in range(10):
        m = [beta * m[r] + _gradient(r, step, w[r]) for r in range(N)]
        sent = [top(lr * each, k) for each in m]
        c = torch.stack(sent).mean(0)
        for r in range(N):
            rest = lr * m[r] - sent[r]
            w[r], e[r] = w[r] - (c + rest), e[r] - rest
        if (step + 1) % every == 0:
            sent = [top(each, k2) for each in e]
            c = torch.stack(sent).mean(0)
            for r in range(N):
                rest = e[r] - sent[r]
                w[r], e[r] = w[r] - e[r] + (c + rest), rest
        states = played.states[step + 1]
        for r in range(N):
            _close(algorithm.sync.own(states[r]), w[r])
            _close(states[r]["error"], e[r])
            _close(algorithm.sync.model(states[r]), w[r] - e[r])
            assert torch.equal(algorithm.sync.model(states[r]), algorithm.sync.model(states[0]))
    assert (algorithm.sync.own(states[0]) - algorithm.sync.own(states[1])).abs().max() > 1e-3


def test_random_choices_of_a_reset_are_not_those_of_its_step() -> None:
    compress = RandomK(ratio=0.5, scaled=False)
    algorithm = _of(CSER(every=1, reset=compress), compress=compress)
    played = play(algorithm, _gradient, _start(), N, 1)
    left = played.states[1][0]["error"] != 0
    assert 0 < left.sum() < 12  # the same choice twice would leave 12 of 24, all of the rest


# every sync ------------------------------------------------------------------------------------


def _form(state: dict, above: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _form(value, f"{above}{key}/")
        else:
            shaped = torch.is_tensor(value)
            found[above + key] = (value.shape, value.dtype) if shaped else type(value)
    return found


def _same(one, other) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            _same(value, other[name])
        elif torch.is_tensor(value):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@syncs
@pytest.mark.parametrize("topology", [AllReduce(), Gossip()], ids=_name)
def test_a_run_saved_in_the_middle_goes_on_bit_by_bit_and_states_keep_their_form(
    sync, topology
) -> None:
    algorithm = _of(sync, compress=TopK(ratio=0.3), topology=topology, rule=AdamW(lr=0.01))

    def on(rounds: int, states=None):
        return play(algorithm, _gradient, _start(), N, rounds, shapes=SHAPES, states=states).states

    whole, saved = on(5), io.BytesIO()
    torch.save(whole[2], saved)
    saved.seek(0)
    for one, other in zip(whole[5], on(3, torch.load(saved, weights_only=True))[3], strict=True):
        _same(one, other)
    for states in whole[1:]:
        assert [_form(state) for state in states] == [_form(state) for state in whole[0]]
        assert all(state["step"] > 0 for state in states)
    kinds = {kind for kind in _form(whole[0][0]).values() if isinstance(kind, type)}
    assert kinds <= {int, float, bool}


@pytest.mark.slice(6)
@syncs
@pytest.mark.parametrize("compress", COMPRESSORS, ids=_name)
def test_all_workers_end_with_one_model_whatever_is_compressed(sync, compress) -> None:
    algorithm = _of(sync, compress=compress, feedback=FEEDBACKS[1])
    start = _start(dtype=torch.float32)
    played = play(algorithm, _gradient, start, N, 4, lr=0.01, shapes=SHAPES)
    models = torch.stack([sync.model(state) for state in played.states[-1]])
    assert models.dtype == torch.float32
    assert torch.isfinite(models).all()
    assert (models == models[0]).all()
    assert not torch.equal(models[0], start)


@pytest.mark.slice(6)
@syncs
@pytest.mark.parametrize("feedback", FEEDBACKS, ids=_name)
@pytest.mark.parametrize(
    "topology", [Hierarchical(group=2), ParameterServer(back=QSGD()), Auto(), Gossip()], ids=_name
)
def test_every_sync_goes_with_every_feedback_and_topology(sync, feedback, topology) -> None:
    algorithm = _of(sync, compress=TopK(ratio=0.3), feedback=feedback, topology=topology)
    played = play(algorithm, _gradient, _start(), 4, 3, lr=0.01, shapes=SHAPES)
    models = torch.stack([sync.model(state) for state in played.states[-1]])
    assert torch.isfinite(models).all()
    assert not torch.equal(models[0], _start())
    assert not sync.agrees(algorithm) or (models == models[0]).all()


@syncs
def test_vectors_that_a_sync_keeps_are_as_many_as_stated(sync) -> None:
    algorithm, n = _of(sync), 24
    state = play(algorithm, _gradient, _start(n), 1, 1).states[1][0]
    shapes = [kind[0] for kind in _form(state).values() if isinstance(kind, tuple)]
    assert shapes.count(torch.Size([n])) == 1 + sync.n_vectors


@syncs
def test_every_sync_goes_with_votes(sync) -> None:
    algorithm = _of(sync, compress=Sign(), aggregate=MajorityVote())
    played = play(algorithm, _gradient, _start(), N, 3, lr=0.01)
    assert all(torch.equal(s["params"], played.states[-1][0]["params"]) for s in played.states[-1])
    assert torch.isfinite(played.params).all()


@syncs
@pytest.mark.parametrize("n_entries", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_worker_and_short_vectors_are_trained(sync, n_entries: int, dtype) -> None:
    start = torch.ones(n_entries, dtype=dtype)
    played = play(_of(sync), _gradient, start, 1, 4, lr=0.01)
    assert played.params.shape == (5, 1, n_entries)
    assert played.params.dtype == dtype
    assert torch.isfinite(played.params).all()
    assert not n_entries or (played.params[-1] != start).any()


@syncs
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_worker_s_bad_gradient_reaches_no_state(sync, bad: float) -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        g = _gradient(rank, batch, w)
        if batch == 1 and rank == 1:
            g[3] = bad
        return g

    algorithm = _of(sync, compress=TopK(ratio=0.3), feedback=FEEDBACKS[1])
    played = play(algorithm, gradient, _start(), N, 4, lr=0.01)
    for states in played.states:
        assert all(torch.isfinite(sync.model(state)).all() for state in states)
        assert all(torch.isfinite(s["exchange"]["feedback"]["error"]).all() for s in states)
    assert any(record.seen.bad == (1,) for record in played.records)
    if not isinstance(sync, LocalSteps | FedAvg):  # these skip steps of the worker's own
        before, after = played.states[1], played.states[2]
        assert all(
            torch.equal(a["params"], b["params"]) for a, b in zip(before, after, strict=True)
        )
