"""GRACE's memories that fade or scale: what it has right, and the right value of its slips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Sign, TopK
from polyreme.algo.draw import Draw
from polyreme.algo.feedback import ECQ, ErrorFeedback, WorkerMomentum
from polyreme.algo.feedback.kind import Turn
from polyreme.algo.packet import Like
from polyreme.algo.rule import SGD
from workers import play

torch.set_num_threads(1)

FILE = Path(__file__).parent / "golden" / "feedback.npz"
GRACE = {k: torch.from_numpy(v) for k, v in np.load(FILE).items() if k.startswith("grace/")}
GRADS = GRACE["grace/grads"]


def _steps(algorithm: DataParallel) -> tuple[torch.Tensor, list]:
    """Aggregates by step, and states after each."""
    played = play(
        algorithm,
        lambda rank, batch, w: GRADS[batch, rank].reshape(-1).to(w.dtype),
        torch.zeros(30),
        2,
        5,
        lr=1.0,
    )
    return -played.params[:, 0].diff(dim=0).view(5, 6, 5), played.states[1:]


def _near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_memory_that_fades_as_it_is_added_is_ecq_with_both_shares_alike() -> None:
    """p = beta r + g and r' = p - q."""
    algorithm = DataParallel(
        rule=SGD(), compress=TopK(ratio=0.3), feedback=ECQ(alpha=0.9, beta=0.9)
    )
    found, states = _steps(algorithm)
    name = "grace/topk0.3_ef_beta0.9_gamma1"
    _near(found, GRACE[f"{name}/agg"])
    errors = [[s["exchange"]["feedback"]["error"].view(6, 5) for s in each] for each in states]
    errors = torch.stack([torch.stack(each) for each in errors])
    left = GRACE[f"{name}/residual_after"]
    _near(errors, left)
    assert left.abs().max() > 0.1


def test_signs_of_momentum_are_grace_s_and_a_tie_is_no_vote() -> None:
    """Its momentum begins with the first gradient whole; a tie is plus one there."""
    algorithm = DataParallel(
        rule=SGD(), compress=Sign(), feedback=WorkerMomentum(), aggregate=MajorityVote()
    )
    found, _ = _steps(algorithm)
    each, agreed = GRACE["grace/signum0.9/decompressed"], GRACE["grace/signum0.9/agg"]
    tie = each.sum(1) == 0
    assert 0 < tie.sum() < 100
    assert torch.equal(found[~tie], agreed[~tie])
    assert (agreed[tie] == 1).all()
    assert (found[tie] == 0).all()


def test_scaled_signs_with_the_rate_inside_are_grace_s_without_its_two_slips() -> None:
    """Its first gradient is not multiplied with the rate, and its sum is not divided by workers."""
    lr, kind, name = 0.1, Sign(scale="mean"), "grace/efsignsgd_lr0.1"
    feedback, turn = ErrorFeedback(rate="inside"), Turn(step=0, lr=lr)
    sent, left = GRACE[f"{name}/decompressed"], GRACE[f"{name}/residual_after"]
    for step in range(5):
        decoded = []
        for worker in range(2):
            before = left[step - 1, worker] if step else torch.zeros(6, 5)
            prepared, state = feedback.prepare(GRADS[step, worker], {"error": before}, turn)
            like = Like.of(prepared)
            buffers, _ = kind.encode(prepared, {}, Draw(seed=0, worker=worker, step=step))
            decoded.append(kind.decode(buffers, like))
            slip = 1.0 if step else lr
            _near(decoded[worker], slip * sent[step, worker])
            none = torch.zeros_like(prepared).bool()
            state = feedback.settle(prepared, decoded[worker], none, state)
            _near(state["error"], slip * left[step, worker])
        mean, _ = feedback.receive(torch.stack(decoded).mean(0), {}, turn)
        slip = 1.0 if step else lr
        torch.testing.assert_close(
            mean, slip * GRACE[f"{name}/agg"][step] / 2, rtol=1e-5, atol=1e-6
        )
