"""Updates that are asked for before the host has read the step's numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from behind import Behind
from polyreme.algo.rule import Adam, AdamW
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.runtime.agreed import Agreed
from polyreme.runtime.foreseen import can_be, foreseen
from test_measure import lone
from test_runtime_oddities import _microbatch, _scale_driver

NOMINAL = 12.0


def _vector(weight: float, square_sum: float, bad_loss: tuple[float, ...] = (0.0, 0.0)):
    flags = [flag for bad in bad_loss for flag in (bad, 0.0)]
    return torch.tensor([3.0, weight, square_sum, *flags, 7.0, 1.0], dtype=torch.float64)


def _stepped(known, gradient: float = 2.0) -> tuple[torch.Tensor, dict]:
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = torch.optim.AdamW([weights], lr=0.1, fused=True)
    assert can_be([optimizer])
    weights.grad = torch.full((5,), gradient)
    with known.given_to(optimizer):
        optimizer.step()
    return weights.detach(), optimizer.state[weights]


@pytest.mark.parametrize(
    ("weight", "square_sum", "bad_loss"),
    [
        (12.0, math.nan, (0.0, 0.0)),
        (12.0, math.inf, (0.0, 0.0)),
        (0.0, 4.0, (0.0, 0.0)),
        (12.0, 4.0, (0.0, 1.0)),
        (12.0, -1.0, (0.0, 0.0)),
    ],
)
def test_a_step_to_be_skipped_leaves_weights_and_state_as_they_were(
    weight, square_sum, bad_loss
) -> None:
    known = foreseen(_vector(weight, square_sum, bad_loss), 2, NOMINAL, 1.0)
    weights, state = _stepped(known)
    assert torch.equal(weights, torch.linspace(-1, 1, 5))
    assert float(state["step"]) == 0.0
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e3])
def test_gradients_are_scaled_as_the_host_would_scale_them(clip_norm) -> None:
    """By the labels that carry loss, and by the norm after that."""
    weight, square_sum = 8.0, 4.0
    factor = NOMINAL / weight
    norm = math.sqrt(square_sum) * factor
    clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    known = foreseen(_vector(weight, square_sum), 2, NOMINAL, clip_norm)
    _, state = _stepped(known)
    expected = torch.full((5,), 0.1 * 2.0 * factor * clip)
    torch.testing.assert_close(state["exp_avg"], expected)
    assert float(known.skips) == 0.0


def test_numbers_of_one_step_are_not_left_to_the_next() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weights], fused=True)
    with foreseen(_vector(12.0, 4.0), 2, NOMINAL, None).given_to(optimizer):
        pass
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_that_does_not_read_them_is_not_given_them() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    assert not can_be([torch.optim.AdamW([weights], foreach=True)])
    assert not can_be([torch.optim.AdamW([weights], fused=True), torch.optim.SGD([weights], lr=1)])


def _steps(accelerator, clip_norm, rule) -> tuple[float, list]:
    world = dataclasses.replace(lone(), accelerator=accelerator)
    driver = _scale_driver(world, {}, rule, clip_norm=clip_norm)
    assert driver._foresees != accelerator.on_host
    batches = [_microbatch([[0.0, math.nan]], [0]), _microbatch([[0.0, 2.0]], [0])]
    batches += [_microbatch([[0.0, math.nan]], [0])]
    batches += [_microbatch([[0.0, -1.0]] * 2, [0, 0])]
    found = [driver.step({0: each}, nominal_weight=2.0) for each in batches]
    (master,) = driver.applied.masters.values()
    return float(master.detach()), [(each.loss, each.grad_norm, each.reason) for each in found]


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("rule", [AdamW(lr=0.1), Adam(lr=0.1)], ids=repr)
def test_a_device_comes_to_what_the_host_comes_to(rule, clip_norm) -> None:
    """A skipped step leaves moments as they were, be it the first."""
    there, told = _steps(Behind(), clip_norm, rule)
    here, expected = _steps(HostAccelerator(), clip_norm, rule)
    assert there == pytest.approx(here, rel=1e-6)
    assert told == expected
    assert [reason is None for _, _, reason in told] == [False, True, False, True]


def test_the_update_is_asked_for_before_the_numbers_are_read(monkeypatch) -> None:
    """The device stood still from its backward pass until the host had read them."""
    happened = []
    step, read = torch.optim.AdamW.step, Agreed.read
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (happened.append("update"), step(self))
    )
    monkeypatch.setattr(
        Agreed, "read", staticmethod(lambda *given: (happened.append("read"), read(*given))[1])
    )
    world = dataclasses.replace(lone(), accelerator=Behind())
    driver = _scale_driver(world, {}, AdamW(lr=0.1))
    happened.clear()
    driver.step({0: _microbatch([[0.0, 2.0]], [0])}, nominal_weight=1.0)
    assert happened == ["update", "read"]
