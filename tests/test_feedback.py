"""What becomes of what was not sent: against independent programs, and identities of the papers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import QSGD, OneBit, TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.feedback import (
    DEF,
    DGC,
    DIANA,
    ECQ,
    EF21,
    ErrorFeedback,
    Feedback,
    NoFeedback,
    OneBitAdam,
    WorkerMomentum,
)
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.packet import Buffer
from polyreme.algo.rule import SGD
from workers import play

torch.set_num_threads(1)

FOLDER = Path(__file__).parent / "golden"
GOLDEN = {k: torch.from_numpy(v) for k, v in np.load(FOLDER / "feedback.npz").items()}


class ScaledSign(CompressorKind, frozen=True, kw_only=True, tag="ScaledSign", tag_field="kind"):
    """Mean magnitude times sign; no bits are saved."""

    def form(self, like):
        return (Buffer(like.dtype, like.n_entries),)

    def encode(self, x, state, draw):
        return (x.reshape(-1).abs().mean() * x.reshape(-1).sign(),), state

    def decode(self, buffers, like):
        return buffers[0].view(like.shape)


def test_every_golden_array_has_its_source_told() -> None:
    told = json.loads((FOLDER / "feedback.json").read_text())
    assert {name.split("/")[0] + "/*" for name in GOLDEN} == set(told)


def _algorithm(feedback: Feedback, compress: CompressorKind, **rule: float) -> DataParallel:
    return DataParallel(rule=SGD(**rule), compress=compress, feedback=feedback)


def _given(grads: torch.Tensor):
    """Gradients [batch, worker, ...] that do not depend on the weights."""
    return lambda rank, batch, w: grads[batch, rank].reshape(-1).to(w.dtype)


def _near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_error_feedback_is_the_peer_s(momentum: float) -> None:
    grads, lr = GOLDEN["dgc/grads"][:, :1], 0.1
    if momentum:  # before compression: sums of a worker's own momentum are what DGC sends
        feedback, name = DGC(momentum=momentum, masking=False), f"efsgd/mom{momentum}"
    else:
        feedback, name = ErrorFeedback(), "efsgd/mom0.0"
    algorithm = _algorithm(feedback, ScaledSign(), lr=lr)
    played = play(algorithm, _given(grads), torch.zeros(12).double(), 1, 6, lr=lr)
    _near(played.params[1:, 0], GOLDEN[f"{name}/param"])
    errors = torch.stack([each[0]["exchange"]["feedback"]["error"] for each in played.states[1:]])
    _near(errors * (lr if momentum else 1), GOLDEN[f"{name}/memory"])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_dgc_is_the_peer_s(masking: bool, nesterov: bool) -> None:
    name = ("mfm" if masking else "nomfm") + ("_nesterov" if nesterov else "")
    algorithm = _algorithm(DGC(masking=masking, nesterov=nesterov), TopK(ratio=3 / 12), lr=1.0)
    start = torch.zeros(12).double()
    played = play(algorithm, _given(GOLDEN["dgc/grads"]), start, 2, 6, lr=1.0)
    _near(-played.params[:, 0].diff(dim=0), GOLDEN[f"dgc/{name}/sent"].mean(1), 1e-12)
    for key, theirs in (("momentum_buffer", "u_after"), ("error", "v_after")):
        ours = [[s["exchange"]["feedback"][key] for s in each] for each in played.states[1:]]
        _near(torch.stack([torch.stack(each) for each in ours]), GOLDEN[f"dgc/{name}/{theirs}"])


@pytest.mark.parametrize(
    ("name", "feedback", "ratio"),
    [
        ("topk0.3_nomem", NoFeedback(), 0.3),
        ("topk0.3_ef", ErrorFeedback(rate="outside"), 0.3),
        ("topk0.001_ef", ErrorFeedback(rate="outside"), 0.001),
    ],
)
def test_top_k_with_and_without_memory_is_grace_s(name: str, feedback, ratio: float) -> None:
    algorithm = _algorithm(feedback, TopK(ratio=ratio), lr=1.0)
    grads = GOLDEN["grace/grads"]
    played = play(algorithm, _given(grads), torch.zeros(30), 2, 5, lr=1.0)
    _near(-played.params[1:, 0].view(5, 6, 5), GOLDEN[f"grace/{name}/agg"].cumsum(0), 1e-6)
    if not isinstance(feedback, NoFeedback):
        ours = [[s["exchange"]["feedback"]["error"] for s in each] for each in played.states[1:]]
        ours = torch.stack([torch.stack(each) for each in ours]).view(5, 2, 6, 5)
        _near(ours, GOLDEN[f"grace/{name}/residual_after"], 1e-6)


def test_one_bit_has_grace_s_memory_without_grace_s_255() -> None:
    grads, name = GOLDEN["grace/grads"], "grace/onebit_ef"
    sent, left = GOLDEN[f"{name}/decompressed"], GOLDEN[f"{name}/residual_after"]
    feedback, turn = ErrorFeedback(rate="outside"), Turn(step=0, lr=0.1)
    for worker in range(2):
        state = feedback.init(grads[0, 0])
        for step in range(5):
            prepared, state = feedback.prepare(grads[step, worker], state, turn)
            shown, below = sent[step, worker].double(), prepared < 0
            halves = prepared[below].double(), prepared[~below].double()
            means = [half.sum() / max(half.numel(), 1) for half in halves]
            _near(shown[~below], 255 * means[1].expand(int((~below).sum())), 1e-3)
            _near(shown[below], (means[0] + 254 * means[1]).expand(int(below.sum())), 1e-3)
            right = _decoded(OneBit(), prepared)
            _near(right[below].double(), means[0].expand(int(below.sum())), 1e-4)
            _near(right[~below].double(), means[1].expand(int((~below).sum())), 1e-4)
            nothing = torch.zeros_like(prepared).bool()
            state = feedback.settle(prepared, sent[step, worker], nothing, state)
            _near(state["error"], left[step, worker], 1e-6)


def _decoded(kind: CompressorKind, x: torch.Tensor) -> torch.Tensor:
    from polyreme.algo.draw import Draw
    from polyreme.algo.packet import Like

    like = Like.of(x)
    buffers, _ = kind.encode(x, kind.init(like), Draw(seed=0, worker=0, step=0))
    return kind.decode(buffers, like)


def test_masked_momentum_is_grace_s() -> None:
    grads, name = GOLDEN["grace/grads"], "grace/dgc0.3_m0.9"
    feedback, turn = DGC(), Turn(step=0, lr=0.1)
    for worker in range(2):
        state = feedback.init(grads[0, 0])
        for step in range(5):
            prepared, state = feedback.prepare(grads[step, worker], state, turn)
            sent = GOLDEN[f"{name}/decompressed"][step, worker]
            _near(torch.where(sent != 0, prepared, 0.0), sent, 1e-6)
            state = feedback.settle(prepared, sent, sent != 0, state)
            _near(state["momentum_buffer"], GOLDEN[f"{name}/residual_after"][step, worker], 1e-6)


def test_masking_leaves_the_momentum_of_dense_tensors() -> None:
    compress = TopK(ratio=0.5, dense_below=3)
    shapes = {"weight": (4,), "bias": (2,)}
    masked, plain = (
        play(
            _algorithm(DGC(masking=masking), compress, lr=0.1),
            lambda _rank, _batch, w: torch.ones_like(w),
            torch.zeros(6),
            2,
            3,
            shapes=shapes,
        ).params[-1, 0]
        for masking in (True, False)
    )
    assert torch.equal(masked[4:], plain[4:])
    assert not torch.equal(masked[:4], plain[:4])


def _unlike(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    """Gradient of a quadratic whose optimum differs from worker to worker."""
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - torch.sin(i * (rank + 1)) * (rank + 1))


def _optimum(n: int, n_entries: int) -> torch.Tensor:
    i = torch.arange(n_entries, dtype=torch.float64)
    return torch.stack([torch.sin(i * (rank + 1)) * (rank + 1) for rank in range(n)]).mean(0)


def _rate(step: int) -> float:
    return 0.05 / (1 + step)


@pytest.mark.parametrize("rate", ["inside", "outside"])
def test_what_waits_and_what_was_done_sum_to_all_steps(rate) -> None:
    """Error feedback telescopes: w + mean e is where dense steps along these gradients lead."""
    n, start, seen = 3, torch.linspace(-1, 1, 12).double(), []

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        seen.append((batch, _unlike(rank, batch, w)))
        return seen[-1][1]

    algorithm = _algorithm(ErrorFeedback(rate=rate), TopK(ratio=0.1), lr=0.05)
    lr = _rate if rate == "inside" else 0.05
    last = play(algorithm, gradient, start, n, 20, lr=lr).states[-1]
    errors = torch.stack([s["exchange"]["feedback"]["error"] for s in last]).mean(0)
    waits = errors * (1 if rate == "inside" else 0.05)
    rates = [lr(b) if callable(lr) else lr for b, _ in seen]
    steps = sum(r * g for r, (_, g) in zip(rates, seen, strict=True)) / n
    assert errors.norm() > 0.1
    _near(last[0]["params"] - waits, start - steps)


def test_rates_inside_and_outside_differ_only_where_the_rate_changes() -> None:
    start = torch.linspace(-1, 1, 12).double()

    def end(rate, lr) -> torch.Tensor:
        algorithm = _algorithm(ErrorFeedback(rate=rate), TopK(ratio=0.1), lr=0.05)
        return play(algorithm, _unlike, start, 2, 10, lr=lr).params[-1, 0]

    _near(end("inside", 0.05), end("outside", 0.05))
    assert (end("inside", _rate) - end("outside", _rate)).abs().max() > 1e-3


@pytest.mark.parametrize("feedback", [ErrorFeedback(), DEF()])
def test_a_rate_of_zero_moves_nothing_and_is_not_a_division(feedback) -> None:
    algorithm = _algorithm(feedback, TopK(ratio=0.1), lr=0.05)
    start = torch.linspace(-1, 1, 12)
    params = play(algorithm, _unlike, start, 2, 3, lr=lambda step: 0.05 * (step != 1)).params
    assert torch.equal(params[1], params[2])
    assert not torch.equal(params[2], params[3])
    assert torch.isfinite(params).all()


@pytest.mark.parametrize("compress", [TopK(ratio=0.1), QSGD(levels=2)])
def test_ecq_that_forgets_nothing_is_error_feedback(compress) -> None:
    start = torch.linspace(-1, 1, 12).double()
    ends = [
        play(_algorithm(feedback, compress, lr=0.05), _unlike, start, 2, 10, lr=0.05).params
        for feedback in (ECQ(alpha=1.0, beta=1.0), ErrorFeedback(rate="outside"))
    ]
    _near(*ends)


def test_ecq_is_its_recursion() -> None:
    feedback, turn = ECQ(alpha=0.3, beta=0.8), Turn(step=0, lr=0.1)
    grads = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, h = feedback.init(grads[0]), torch.zeros(7).double()
    for g in grads:
        prepared, state = feedback.prepare(g, state, turn)
        _near(prepared, g + 0.3 * h)
        sent = prepared.round()
        state = feedback.settle(prepared, sent, sent != 0, state)
        h = 0.8 * h + g - sent
        _near(state["error"], h)


def test_def_without_foresight_is_error_feedback_and_with_it_is_not() -> None:
    start = torch.linspace(-1, 1, 12).double()

    def end(feedback) -> torch.Tensor:
        algorithm = _algorithm(feedback, TopK(ratio=0.1), lr=0.05)
        return play(algorithm, _unlike, start, 2, 10, lr=0.05).params

    assert torch.equal(end(DEF(coefficient=0.0)), end(ErrorFeedback()))
    assert (end(DEF(coefficient=0.3)) - end(ErrorFeedback())).abs().max() > 1e-3


def test_def_takes_gradients_where_part_of_what_waits_is_done() -> None:
    asked = []

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        asked.append(w)
        return torch.arange(4.0)

    algorithm = _algorithm(DEF(coefficient=0.5), TopK(ratio=0.25), lr=0.1)
    play(algorithm, gradient, torch.zeros(4), 1, 2, lr=0.1)
    _near(asked[1], torch.tensor([0.0, -0.05, -0.1, -0.3]), 1e-7)


@pytest.mark.parametrize(
    ("feedback", "compress", "lr"),
    [(EF21(), TopK(ratio=0.25), 0.1), (DIANA(alpha=0.5), QSGD(levels=4), 0.15)],
)
def test_differences_lead_to_the_optimum_where_plain_compression_stalls(
    feedback, compress, lr: float
) -> None:
    n, start = 3, torch.zeros(8).double()

    def distance(feedback) -> float:
        played = play(_algorithm(feedback, compress, lr=lr), _unlike, start, n, 150, lr=lr)
        return float((played.params[-1, 0] - _optimum(n, 8)).norm())

    assert distance(feedback) < 1e-4
    assert distance(NoFeedback()) > 1e-2


def test_diana_that_takes_up_all_is_ef21_and_one_that_takes_up_nothing_is_none() -> None:
    start = torch.linspace(-1, 1, 12).double()

    def end(feedback) -> torch.Tensor:
        algorithm = _algorithm(feedback, TopK(ratio=0.25), lr=0.05)
        return play(algorithm, _unlike, start, 2, 10, lr=0.05).params

    _near(end(DIANA(alpha=1.0)), end(EF21()))
    _near(end(DIANA(alpha=0.0)), end(NoFeedback()))


@pytest.mark.parametrize("feedback", [EF21(), DIANA()])
def test_the_mean_that_all_keep_is_that_of_the_workers(feedback) -> None:
    algorithm = _algorithm(feedback, TopK(ratio=0.25), lr=0.05)
    last = play(algorithm, _unlike, torch.zeros(8).double(), 3, 7, lr=0.05).states[-1]
    own, mean = feedback.vectors
    each = torch.stack([s["exchange"]["feedback"][own] for s in last])
    for state in last:
        _near(state["exchange"]["feedback"][mean], each.mean(0))


def test_momentum_of_the_workers_own_is_that_of_sgd_if_all_is_sent() -> None:
    start = torch.linspace(-1, 1, 12).double()
    ours = _algorithm(WorkerMomentum(dampened=False), Dense(), lr=0.05)
    theirs = _algorithm(NoFeedback(), Dense(), lr=0.05, momentum=0.9)
    _near(*(play(a, _unlike, start, 3, 10, lr=0.05).params for a in (ours, theirs)))


def test_dampened_momentum_is_a_mean_from_its_first_gradient_on() -> None:
    feedback, turn = WorkerMomentum(momentum=0.75), Turn(step=0, lr=0.1)
    state = feedback.init(torch.zeros(1))
    found = []
    for g in (8.0, 4.0, 4.0):
        sent, state = feedback.prepare(torch.tensor([g]), state, turn)
        found.append(sent.item())
    assert found == [8.0, 7.0, 6.25]


def _adam(grads: list[torch.Tensor], warmup: int, sign) -> torch.Tensor:
    """1-bit Adam by hand, all workers in one: gradients [worker, entry] of each step."""
    m = v = torch.zeros_like(grads[0][0])
    error, w = torch.zeros_like(grads[0]), torch.zeros_like(grads[0][0])
    for t, g in enumerate(grads):
        if t < warmup:
            m = 0.9 * m + 0.1 * g.mean(0)
            v = 0.999 * v + 0.001 * g.mean(0) ** 2
        else:
            p = 0.9 * m + 0.1 * g + error
            sent = torch.stack([sign(row) for row in p])
            error, m = p - sent, sent.mean(0)
        w = w - 0.01 * m / (v.sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("warmup", [3, 6])
def test_one_bit_adam_is_its_recursion(warmup: int) -> None:
    grads = GOLDEN["dgc/grads"]
    algorithm = _algorithm(OneBitAdam(warmup=warmup), ScaledSign(), lr=0.01)
    played = play(algorithm, _given(grads), torch.zeros(12).double(), 2, 6, lr=0.01)
    by_hand = _adam(list(grads), warmup, lambda row: row.abs().mean() * row.sign())
    _near(played.params[-1, 0], by_hand)


def test_one_bit_adam_sends_all_first_and_little_later() -> None:
    algorithm = _algorithm(OneBitAdam(warmup=2), TopK(ratio=1 / 12), lr=0.01)
    given, start = _given(GOLDEN["dgc/grads"]), torch.zeros(12).double()
    sent = [play(algorithm, given, start, 2, rounds).nbytes[0] for rounds in (0, 1, 2, 3)]
    assert list(np.diff(sent)) == [96, 96, 9]
