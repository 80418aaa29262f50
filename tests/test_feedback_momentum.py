"""Global momentum compression and the ones it is better than."""

from __future__ import annotations

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import RandomK, TopK
from polyreme.algo.compress.dense import Dense
from polyreme.algo.feedback import DGC, GMC
from polyreme.algo.rule import SGD
from workers import play

torch.set_num_threads(1)


def _toy(d: int):
    """Two workers whose quadratics have opposite optima; the sum's is 0."""
    i = torch.arange(d, dtype=torch.float64)
    return lambda rank, _batch, w: 2 * (d - i) * (w - (i + 1) * (1 - 2 * rank))


@pytest.mark.parametrize("compress", [Dense(), TopK(ratio=1.0)])
def test_gmc_that_sends_all_is_heavy_ball(compress) -> None:
    start = torch.full((6,), 2.0).double()
    gmc = DataParallel(rule=SGD(), compress=compress, feedback=GMC())
    ball = DataParallel(rule=SGD(momentum=0.9))
    for lr in (0.002, lambda step: 0.002 / (1 + step % 3)):
        ours, theirs = (play(a, _toy(6), start, 2, 50, lr=lr).params for a in (gmc, ball))
        if callable(lr):  # then the last step, not the last gradients, is what goes on
            steps = theirs.diff(dim=0)
            assert (ours.diff(dim=0) - steps).abs().max() > 1e-3
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gmc_repeats_its_last_step_whatever_the_rate_becomes() -> None:
    feedback = GMC(momentum=0.5)
    algorithm = DataParallel(rule=SGD(), feedback=feedback)
    rates = [0.1, 0.4, 0.0, 0.2]
    played = play(
        algorithm,
        lambda _rank, _batch, w: torch.ones_like(w),
        torch.zeros(1).double(),
        2,
        4,
        lr=lambda step: rates[step],
    )
    expected = torch.tensor([-0.1, -0.45, 0.0, -0.2], dtype=torch.float64)
    torch.testing.assert_close(played.params[:, 0, 0].diff(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compress", [TopK(ratio=0.2), RandomK(ratio=0.2, scaled=False)])
def test_gmc_s_shifted_weights_take_plain_steps(compress) -> None:
    """Lemma 3: z = w + b / (1 - b) (w - last w) - lr / (1 - b) e moves by -lr / (1 - b) g.

    Errors e and gradients g are means over workers.
    """
    lr, beta, n, seen = 0.01, 0.9, 3, {}

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        i = torch.arange(w.numel(), dtype=w.dtype)
        seen.setdefault(batch, []).append((1 + i % 3) * (w - torch.sin(i * (rank + 1))))
        return seen[batch][-1]

    algorithm = DataParallel(rule=SGD(), compress=compress, feedback=GMC(momentum=beta))
    played = play(algorithm, gradient, torch.linspace(-1, 1, 10).double(), n, 30, lr=lr)
    w = played.params[:, 0]
    last = torch.cat([w[:1], w[:-1]])
    errors = torch.stack(
        [torch.stack([s["exchange"]["feedback"]["error"] for s in each]) for each in played.states]
    ).mean(1)
    assert errors[-1].norm() > 1e-2
    z = w + beta / (1 - beta) * (w - last) - lr / (1 - beta) * errors
    means = torch.stack([torch.stack(seen[batch]).mean(0) for batch in range(30)])
    torch.testing.assert_close(z.diff(dim=0), -lr / (1 - beta) * means, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("d", "lr", "rounds", "reached"),
    [
        (2, 3e-3, 400, 1e-3),
        pytest.param(20, 1e-4, 800, 0.5, marks=pytest.mark.long),
    ],
)
def test_gmc_reaches_the_optimum_that_masked_dgc_stays_away_from(
    d: int, lr: float, rounds: int, reached: float
) -> None:
    start = torch.full((d,), 2.0 if d == 2 else 1.0).double()

    def distances(feedback) -> torch.Tensor:
        algorithm = DataParallel(rule=SGD(), compress=TopK(ratio=1 / d), feedback=feedback)
        played = play(algorithm, _toy(d), start, 2, rounds, lr=lr)
        return played.params[-rounds // 4 :, 0].norm(dim=1)

    gmc, masked = distances(GMC()), distances(DGC())
    assert gmc.mean() < reached
    assert masked.mean() > 3 * gmc.mean()
    assert masked.min() > 5e-3
