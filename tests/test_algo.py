"""Rules and schedules against closed forms and torch's own schedulers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from polyreme.algo.rule import SGD, AdamW, Rule
from polyreme.algo.schedule import Constant, Cosine, Linear, Schedule

torch.set_num_threads(1)


def _torch_rates(scheduler_of, n_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = scheduler_of(optimizer)
    rates = []
    for _ in range(n_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("n_steps", [2, 3, 100])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_without_warmup_is_torch_s(n_steps: int, final: float) -> None:
    anneal = torch.optim.lr_scheduler.CosineAnnealingLR
    expected = _torch_rates(lambda o: anneal(o, T_max=n_steps - 1, eta_min=final), n_steps)
    factors = [Cosine(final=final).factor(step, n_steps) for step in range(n_steps)]
    assert factors == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n_steps", [2, 3, 100])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_linear_without_warmup_is_torch_s(n_steps: int, final: float) -> None:
    line = torch.optim.lr_scheduler.LinearLR
    expected = _torch_rates(
        lambda o: line(o, start_factor=1.0, end_factor=final, total_iters=n_steps - 1), n_steps
    )
    factors = [Linear(final=final).factor(step, n_steps) for step in range(n_steps)]
    assert factors == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [2, 10])
def test_warmup_rises_as_torch_s_and_reaches_one(warmup: int) -> None:
    line = torch.optim.lr_scheduler.LinearLR
    expected = _torch_rates(
        lambda o: line(o, start_factor=1 / warmup, total_iters=warmup - 1), warmup + 3
    )
    factors = [Constant(warmup=warmup).factor(step, warmup + 3) for step in range(warmup + 3)]
    assert factors == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_warmup_of_at_most_one_step_is_none(warmup: int) -> None:
    assert [Constant(warmup=warmup).factor(step, 3) for step in range(3)] == [1, 1, 1]


def test_cosine_falls_from_the_end_of_the_warmup() -> None:
    schedule, n_steps = Cosine(warmup=10, final=0.2), 61
    for step in range(10, n_steps):
        share = (step - 10) / 50
        expected = 0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2
        assert schedule.factor(step, n_steps) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine])
def test_one_step_runs_at_the_full_rate(kind: type[Schedule]) -> None:
    assert kind().factor(0, 1) == 1.0


@pytest.mark.parametrize("schedule", [Linear(final=0.1), Cosine(final=0.1, warmup=3)])
def test_steps_beyond_the_end_stay_at_the_final_rate(schedule: Schedule) -> None:
    assert schedule.factor(9, 10) == pytest.approx(0.1, abs=1e-12)
    assert schedule.factor(50, 10) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize("schedule", [Constant(warmup=5), Linear(warmup=5), Cosine(warmup=5)])
def test_no_step_of_a_warmup_has_rate_zero(schedule: Schedule) -> None:
    assert [schedule.factor(step, 6) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])


def _sgd(rule: SGD, w: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    velocity = None
    for grad in grads:
        g = grad + rule.weight_decay * w
        if rule.momentum:
            velocity = g if velocity is None else rule.momentum * velocity + g
            g = g + rule.momentum * velocity if rule.nesterov else velocity
        w = w - rule.lr * g
    return w


def _adamw(rule: AdamW, w: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    b1, b2 = rule.betas
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        root = np.sqrt(v / (1 - b2**t)) + rule.eps
        w = w - rule.lr * rule.weight_decay * w - rule.lr * (m / (1 - b1**t)) / root
    return w


RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    AdamW(),
    AdamW(lr=1e-2, betas=(0.0, 0.0), eps=1e-3, weight_decay=0.0),
    AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
]


def _devices() -> Iterator[str]:
    yield "cpu"
    if torch.accelerator.is_available():
        yield str(torch.accelerator.current_accelerator())


@pytest.mark.parametrize("device", list(_devices()))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 5)])
def test_updates_are_the_formulas(
    rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, device: str
) -> None:
    random = np.random.default_rng(0)
    start = random.normal(size=shape)
    grads = [np.asarray(random.normal(size=shape)) for _ in range(6)]
    param = torch.tensor(start, dtype=dtype, device=device, requires_grad=True)
    optimizer = rule.optimizer(iter([param]))
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=dtype, device=device)
        optimizer.step()
    by_hand = _sgd if isinstance(rule, SGD) else _adamw
    expected = by_hand(rule, np.asarray(start), grads)
    np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_states_of_a_parameter_s_size_are_as_many_as_stated(rule: Rule) -> None:
    param = torch.ones(3, 2, requires_grad=True)
    optimizer = rule.optimizer([param])
    param.grad = torch.ones(3, 2)
    optimizer.step()
    kept = [each for each in optimizer.state[param].values() if torch.is_tensor(each)]
    assert sum(each.shape == param.shape for each in kept) == rule.n_states


@pytest.mark.parametrize("rule", RULES)
def test_meta_parameters_have_an_optimizer_too(rule: Rule) -> None:
    param = torch.ones(3, device="meta", requires_grad=True)
    optimizer = rule.optimizer([param])
    param.grad = torch.ones(3, device="meta")
    optimizer.step()


def test_adamw_is_fused_where_it_can_be() -> None:
    optimizer = AdamW().optimizer([torch.ones(3, requires_grad=True)])
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("rule", [RULES[2], RULES[5]])
def test_sharded_parameters_move_like_plain_ones(rule: Rule) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.arange(6.0).reshape(3, 2).requires_grad_()
        parts = distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]).requires_grad_()
        for param in (plain, parts):
            optimizer = rule.optimizer([param])
            for _ in range(3):
                optimizer.zero_grad()
                (param * param).sum().backward()
                optimizer.step()
        torch.testing.assert_close(parts.full_tensor(), plain, rtol=0, atol=0)
    finally:
        distributed.destroy_process_group()
