"""Rules as torch optimizers: against torch's own, against the rule on one vector, and by hand."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import nn

import polyreme as pr
from polyreme.algo import optimizer
from polyreme.algo.effects import alone, settled
from polyreme.algo.rule import Rule
from polyreme.algo.vector import Layout
from polyreme.errors import ConfigError

torch.set_num_threads(1)

NAMES = sorted(kind.__name__ for kind in get_args(Rule))
SHAPES = {"a": (3, 4), "b": (4,), "c": (), "d": (0, 2), "e": (1,)}


def _parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES.values()
    ]


def _gradients(dtype: torch.dtype = torch.float64, n: int = 5) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        yield [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in SHAPES.values()
        ]


def _run(optimizer: torch.optim.Optimizer, parameters: list[Any], steps: Iterator[Any]) -> None:
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def test_every_rule_is_there() -> None:
    assert dir(pr.optim) == NAMES
    assert all(issubclass(getattr(pr.optim, name), torch.optim.Optimizer) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_may_be_given_by_its_place(name: str) -> None:
    """As torch's own optimizers take it."""
    optimizer = getattr(pr.optim, name)(_parameters(), 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0].keys() == optimizer.defaults.keys() | {"params"}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_rule_on_one_vector_of_all_parameters(name: str) -> None:
    """A norm over one tensor, where it is over all, is seen here."""
    parameters = _parameters()
    optimizer = getattr(pr.optim, name)(parameters, lr=0.01, weight_decay=0.1)
    layout, rule = Layout.of(SHAPES), optimizer.kind(lr=0.01, weight_decay=0.1)
    w = torch.cat([p.detach().reshape(-1) for p in parameters])
    state = rule.init(w)
    for gradients in _gradients():
        _run(optimizer, parameters, iter([gradients]))
        g = torch.cat([each.reshape(-1) for each in gradients])
        delta, state = alone(settled(rule.update(g, state, w, lr=0.01, layout=layout)))
        w = w + delta
        found = torch.cat([p.detach().reshape(-1) for p in parameters])
        torch.testing.assert_close(found, w, rtol=0, atol=1e-12)


TORCH_S = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "AdamW": (torch.optim.AdamW, {"eps": 1e-4}),
}


@pytest.mark.parametrize("name", TORCH_S)
def test_groups_with_rates_and_decay_of_their_own_are_torch_s(name: str) -> None:
    theirs, options = TORCH_S[name]
    found = []
    for make in (getattr(pr.optim, name), theirs):
        parameters = _parameters()
        groups = [
            {"params": parameters[:2], "weight_decay": 0.3},
            {"params": parameters[2:], "lr": 0.05, "weight_decay": 0.0},
        ]
        optimizer = make(groups, lr=0.02, **options)
        _run(optimizer, parameters, _gradients())
        found.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_the_norm_of_sngm_is_over_all_groups() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = pr.optim.SNGM(
        [{"params": [first]}, {"params": [second], "lr": 1.0}], lr=0.5, momentum=0.5
    )
    first.grad, second.grad = torch.tensor([2.0, 0.0]), torch.tensor([-1.5])
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.tensor([-0.5 * 2 / 2.5, 0.0]))
    torch.testing.assert_close(second.detach(), torch.tensor([1.5 / 2.5]))


def test_no_step_of_sngm_is_longer_than_its_bound() -> None:
    w = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = pr.optim.SNGM([w], lr=0.1, momentum=0.9)
    lengths = []
    for _ in range(200):
        before, w.grad = w.detach().clone(), torch.ones(6, dtype=torch.float64)
        optimizer.step()
        lengths.append(float((w.detach() - before).norm()))
    assert lengths[0] == pytest.approx(0.1)
    assert max(lengths) <= 0.1 / (1 - 0.9) + 1e-12
    assert lengths[-1] == pytest.approx(1.0, rel=1e-6)


def test_a_gradient_of_zero_is_no_step() -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = pr.optim.SNGM([w], lr=0.1)
    w.grad = torch.zeros(3)
    optimizer.step()
    assert w.detach().tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows(bad: float) -> None:
    """A norm of NaN must not let all other entries go unscaled."""
    w = nn.Parameter(torch.ones(3))
    optimizer = pr.optim.SNGM([w], lr=0.1)
    w.grad = torch.tensor([1e6, bad, 1.0])
    optimizer.step()
    assert w.detach().isnan().any()
    assert not (w.detach().nan_to_num(0.0).abs() > 2).any()


# State


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_as_if_never_stopped(name: str) -> None:
    whole, cut = _parameters(), _parameters()
    make = getattr(pr.optim, name)
    options = {"lr": 0.01, "weight_decay": 0.1}
    _run(make(whole, **options), whole, _gradients())
    steps = list(_gradients())
    first = make(cut, **options)
    _run(first, cut, iter(steps[:3]))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(cut, lr=1.0)
    second.load_state_dict(torch.load(file, weights_only=True))
    _run(second, cut, iter(steps[3:]))
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_steps_alike(copied: Any) -> None:
    parameters = _parameters()
    optimizer = pr.optim.LAMB(parameters, lr=0.1, weight_decay=0.2)
    _run(optimizer, parameters, _gradients(n=2))
    other = copied(optimizer)
    (twins,) = (group["params"] for group in other.param_groups)
    _run(optimizer, parameters, _gradients(n=1))
    _run(other, twins, _gradients(n=1))
    for one, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(one, twin, rtol=0, atol=0)


def test_options_that_a_state_lacks_are_the_optimizer_s() -> None:
    parameters = _parameters()
    state = torch.optim.SGD(parameters, lr=0.3).state_dict()
    for group in state["param_groups"]:
        del group["momentum"]
    optimizer = pr.optim.SNGM(parameters, lr=0.1, momentum=0.7)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0]["momentum"] == 0.7


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_and_state_keep_their_type(name: str, dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    before = [p.detach().clone() for p in parameters]
    optimizer = getattr(pr.optim, name)(parameters, lr=10.0)  # LARS: a hundredth of the weights
    _run(optimizer, parameters, _gradients(dtype))
    kept = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name not in optimizer.kind().counts
    ]
    assert {each.dtype for each in [*parameters, *kept]} == {dtype}
    assert not torch.equal(parameters[0].detach(), before[0])


def test_half_precision_is_near_to_whole() -> None:
    half, whole = _parameters(torch.bfloat16), _parameters(torch.float32)
    for parameters in (half, whole):
        steps = _gradients(parameters[0].dtype, n=3)
        _run(pr.optim.SNGM(parameters, lr=0.1), parameters, steps)
    for one, other in zip(half, whole, strict=True):
        torch.testing.assert_close(one.float(), other.detach(), rtol=0, atol=0.03)


# torch's ways


@pytest.mark.parametrize(
    "scheduled",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=6),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 4),
    ],
)
def test_schedulers_of_torch_move_rates_and_momentum(scheduled: Any) -> None:
    found = []
    for make in (pr.optim.SGD, torch.optim.SGD):
        parameters = _parameters()
        optimizer = make(parameters, lr=0.1, momentum=0.9)
        scheduler = scheduled(optimizer)
        for gradients in _gradients():
            _run(optimizer, parameters, iter([gradients]))
            scheduler.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_a_closure_is_called_with_gradients_and_its_loss_given_back() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    optimizer = pr.optim.SGD([w], lr=0.25)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert w.item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_gradient_stays_and_so_does_its_state(name: str) -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = getattr(pr.optim, name)([first, second], lr=0.1, weight_decay=0.5)
    _run(optimizer, [first, second], iter([[torch.ones(2), None]]))
    assert second.detach().tolist() == [1, 1]
    assert not optimizer.state.get(second)
    assert first.detach().tolist() != [1, 1]


def test_no_gradient_at_all_is_no_step() -> None:
    w = nn.Parameter(torch.ones(2))
    pr.optim.SNGM([w], lr=0.1).step()
    assert w.detach().tolist() == [1, 1]


def test_a_step_that_overflows_is_skipped_under_a_scaler() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = pr.optim.SNGM([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(w.detach(), torch.full((2,), 1 - 0.1 / math.sqrt(2)))


# What is refused


def _w() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def test_an_unknown_option_is_named_with_those_that_are_known() -> None:
    with pytest.raises(TypeError, match=r"SNGM has no option 'momentm'. Legal: lr, weight_decay"):
        pr.optim.SNGM([_w()], lr=0.1, momentm=0.9)
    with pytest.raises(TypeError, match=r"group has no option 'betas'. Legal: lr, weight_decay, m"):
        pr.optim.SNGM([{"params": [_w()], "betas": (0.9, 0.99)}], lr=0.1)


def test_an_unknown_rule_is_named_with_those_that_are_known() -> None:
    with pytest.raises(AttributeError, match=r"no 'SGDM'\. There are: SGD, SNGM, SNGD, Adam"):
        _ = pr.optim.SGDM


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"lr": -0.1}, "SNGM.lr"),
        ({"lr": math.nan}, "SNGM.lr"),
        ({"lr": "fast"}, "SNGM.lr"),
        ({"momentum": 1.0}, "SNGM.momentum"),
        ({"weight_decay": -1.0}, "SNGM.weight_decay"),
    ],
)
def test_a_value_that_is_not_legal_is_refused(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pr.optim.SNGM([_w()], **options)
    (violation,) = caught.value.violations
    assert violation.path == path
    assert violation.legal


def test_groups_are_checked_as_the_whole_is() -> None:
    with pytest.raises(ConfigError, match="weight_decay"):
        pr.optim.SNGM([{"params": [_w()], "weight_decay": -1.0}], lr=0.1)
    with pytest.raises(ConfigError, match="nesterov"):
        pr.optim.SGD([_w()], lr=0.1, nesterov=True)


def test_what_rules_are_not_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="is complex"):
        pr.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = pr.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="is sparse"):
        optimizer.step()


def _late_gradients(n: int = 4) -> Iterator[list[torch.Tensor | None]]:
    """The second parameter has its first gradient a step later, the last one none."""
    for step, gradients in enumerate(_gradients(n=n)):
        missing = {1} if step == 0 else set()
        yield [
            None if i in missing | {len(SHAPES) - 1} else gradient
            for i, gradient in enumerate(gradients)
        ]


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), ("ProximalSGD", {"group_l1": 0.1, "group_size": 3})],
)
def test_small_tensors_are_updated_as_one_vector(name: str, options: dict, monkeypatch) -> None:
    """Tensor by tensor a step takes kernels by the thousand; what comes out is the same."""
    ends, n_updates = [], []
    for entries in (0, 1 << 20):
        monkeypatch.setattr(optimizer, "_ENTRIES", entries)
        parameters = _parameters()
        made = getattr(pr.optim, name)(parameters, **options)
        rule, calls = type(made._rule(made.param_groups[0])), []
        plain = rule.update

        def update(self, *given, plain=plain, calls=calls, **how):
            calls.append(1)
            return plain(self, *given, **how)

        with monkeypatch.context() as patched:
            patched.setattr(rule, "update", update)
            _run(made, parameters, _late_gradients())
        ends.append([each.detach() for each in parameters])
        n_updates.append(len(calls))
    assert n_updates[0] == 15
    assert n_updates[1] <= 7  # the one that came late counts steps of its own
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-16)
