"""Rules against optax's outputs (tests/golden/optax.json says how) and against plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from polyreme.algo.effects import alone, settled
from polyreme.algo.rule import (
    LAMB,
    LARS,
    SGD,
    SNGD,
    SNGM,
    Adam,
    AdamW,
    Lion,
    ProximalSGD,
    Rule,
    SignSGD,
    Signum,
    TruncatedGradient,
)
from polyreme.algo.vector import Layout

torch.set_num_threads(1)

FOLDER = Path(__file__).parent / "golden"
OPTAX = {k: torch.from_numpy(v) for k, v in np.load(FOLDER / "optax.npz").items()}
SHAPES = {name: tuple(OPTAX[f"p0/{name}"].shape) for name in "wbz"}
LAYOUT = Layout.of(SHAPES)
THEIRS = {
    "lars_lr0.1_wd1e-4_m0.9_tc1e-3": LARS(lr=0.1, weight_decay=1e-4),
    "lars_nesterov": LARS(lr=0.1, weight_decay=1e-4, nesterov=True),
    "lamb_lr0.01_wd0.01": LAMB(lr=0.01, weight_decay=0.01),
    "lamb_lr0.01_wd0": LAMB(lr=0.01),
    "sgdm": SGD(lr=0.1, momentum=0.9),
    "sngd_lr0.1": SNGD(lr=0.1),
    "sngm_lr0.1_b0.9": SNGM(lr=0.1, momentum=0.9),
    "sign_sgd_lr0.1": SignSGD(lr=0.1),
    "lion": Lion(lr=0.01, betas=(0.9, 0.99), weight_decay=1e-3),
}


def _flat(name: str, step: int | None = None) -> torch.Tensor:
    found = {key: OPTAX[f"{name}/{key}"] for key in SHAPES}
    return LAYOUT.flat(found if step is None else {k: v[step] for k, v in found.items()})


def _path(rule: Rule, w: torch.Tensor, gradients: list[torch.Tensor], layout: Layout) -> list:
    state, seen = rule.init(w), []
    for gradient in gradients:
        update = rule.update(gradient, state, w, lr=rule.lr, layout=layout)
        delta, state = alone(settled(update))
        w = w + delta
        seen.append(w)
    return seen


@pytest.mark.parametrize("name", THEIRS)
def test_steps_are_optax_s(name: str) -> None:
    """One of the three tensors and its first gradient are zero: no ratio is taken of it."""
    gradients = [_flat("grads", step) for step in range(6)]
    found = _path(THEIRS[name], _flat("p0"), gradients, LAYOUT)
    tolerance = 1e-7 if name.startswith("sng") else 1e-12  # optax adds 1e-6 to that norm
    for step, w in enumerate(found):
        torch.testing.assert_close(w, _flat(name, step), rtol=0, atol=tolerance)


def test_every_golden_array_is_told_and_tested() -> None:
    told = [name.removesuffix("*").rstrip("/") for name in json.loads(_told())]
    names = {name.split("/")[0] for name in OPTAX}
    assert names - {"grads", "p0"} == set(THEIRS)
    assert all(any(name.startswith(each) for each in told) for name in names)


def _told() -> str:
    return (FOLDER / "optax.json").read_text()


# by hand, entry after entry --------------------------------------------------------------------


def _norm(xs: list[float]) -> float:
    return math.sqrt(sum(x * x for x in xs))


def _sign(x: float) -> float:
    return float(x > 0) - float(x < 0)


def _soft(x: float, by: float) -> float:
    return _sign(x) * max(0.0, abs(x) - by)


def _by_hand(rule: Rule, w: list[float], grads: list[list[float]]) -> list[float]:
    """The last weights, of one tensor."""
    m, v = [0.0] * len(w), [0.0] * len(w)
    wd, lr = rule.weight_decay, rule.lr
    for t, grad in enumerate(grads, start=1):
        coupled = [g + wd * x for g, x in zip(grad, w, strict=True)]
        match rule:
            case SGD():
                g = grad if rule.decoupled else coupled
                m = [rule.momentum * a + b for a, b in zip(m, g, strict=True)]
                way = m
                if rule.nesterov:
                    way = [b + rule.momentum * a for a, b in zip(m, g, strict=True)]
                off = wd if rule.decoupled else 0.0
                step = [a + off * x for a, x in zip(way, w, strict=True)]
            case SNGM():
                length = _norm(coupled)
                m = [rule.momentum * a + b / length for a, b in zip(m, coupled, strict=True)]
                step = m
            case Signum():
                m = [
                    rule.momentum * a + (1 - rule.momentum) * b
                    for a, b in zip(m, coupled, strict=True)
                ]
                step = [_sign(a) for a in m]
            case SignSGD():
                step = [_sign(b) for b in coupled]
            case Lion():
                one, two = rule.betas
                step = [
                    _sign(one * a + (1 - one) * g) + wd * x
                    for a, g, x in zip(m, grad, w, strict=True)
                ]
                m = [two * a + (1 - two) * g for a, g in zip(m, grad, strict=True)]
            case LARS():
                ratio = rule.trust * _norm(w) / _norm(coupled)
                own = [ratio * b for b in coupled]
                m = [rule.momentum * a + b for a, b in zip(m, own, strict=True)]
                step = m
                if rule.nesterov:
                    step = [b + rule.momentum * a for a, b in zip(m, own, strict=True)]
            case Adam() | AdamW() | LAMB():
                g = coupled if isinstance(rule, Adam) else grad
                one, two = rule.betas
                m = [one * a + (1 - one) * b for a, b in zip(m, g, strict=True)]
                v = [two * a + (1 - two) * b * b for a, b in zip(v, g, strict=True)]
                step = [
                    (a / (1 - one**t)) / (math.sqrt(b / (1 - two**t)) + rule.eps)
                    for a, b in zip(m, v, strict=True)
                ]
                if not isinstance(rule, Adam):
                    step = [s + wd * x for s, x in zip(step, w, strict=True)]
                if isinstance(rule, LAMB):
                    ratio = _norm(w) / _norm(step)
                    step = [ratio * s for s in step]
            case ProximalSGD() | TruncatedGradient():
                step = coupled
        w = [x - lr * s for x, s in zip(w, step, strict=True)]
        match rule:
            case ProximalSGD():
                w = [_soft(x, lr * rule.l1) for x in w]
                for at in range(0, len(w), rule.group_size):
                    group = w[at : at + rule.group_size]
                    left = max(0.0, 1 - lr * rule.group_l1 / (_norm(group) or 1.0))
                    w[at : at + rule.group_size] = [left * x for x in group]
            case TruncatedGradient() if t % rule.period == 0:
                pull = lr * rule.period * rule.gravity
                w = [_soft(x, pull) if abs(x) <= rule.threshold else x for x in w]
    return w


RULES = [
    SGD(lr=0.1, momentum=0.8, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1, decoupled=True),
    SGD(lr=0.1, weight_decay=0.1, decoupled=True),
    Adam(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
    AdamW(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
    LARS(lr=5.0, trust=0.01, momentum=0.8, weight_decay=0.1),
    LARS(lr=5.0, trust=0.01, momentum=0.8, nesterov=True),
    LAMB(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
    SNGD(lr=0.1, weight_decay=0.1),
    SNGM(lr=0.1, momentum=0.8, weight_decay=0.1),
    SignSGD(lr=0.1, weight_decay=0.1),
    Signum(lr=0.1, momentum=0.8, weight_decay=0.1),
    Lion(lr=0.1, betas=(0.7, 0.9), weight_decay=0.1),
    ProximalSGD(lr=0.1, l1=0.7, group_l1=0.4, group_size=3, weight_decay=0.1),
    TruncatedGradient(lr=0.1, gravity=0.9, period=3, threshold=0.6, weight_decay=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_are_those_of_plain_loops(rule: Rule) -> None:
    random = np.random.default_rng(1)
    start, grads = random.normal(size=7), random.normal(size=(8, 7))
    layout = Layout.of({"w": (7,)})
    found = _path(rule, torch.from_numpy(start), list(torch.from_numpy(grads)), layout)[-1]
    expected = torch.tensor(_by_hand(rule, start.tolist(), grads.tolist()), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_every_rule_has_its_loop() -> None:
    assert {type(rule) for rule in RULES} == set(get_args(Rule))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_each_tensor_s_step_is_as_long_as_its_own_weights_say(kind: type) -> None:
    rule = kind(lr=0.1, **({"momentum": 0.0, "trust": 0.5} if kind is LARS else {}))
    w = torch.tensor([3.0, 4.0, 0.06, 0.08, 0.0, 0.0, 5.0], dtype=torch.float64)
    g = torch.tensor([1.0, 9.0, 1e6, 1e5, 2.0, 1.0, 0.0], dtype=torch.float64)
    layout = Layout.of({"a": (2,), "b": (2,), "new": (2,), "still": (), "none": (0, 3)})
    step = layout.views(_path(rule, w, [g], layout)[0] - w)
    trust = 0.5 if kind is LARS else 1.0
    assert float(step["a"].norm()) == pytest.approx(0.1 * trust * 5.0)
    assert float(step["b"].norm()) == pytest.approx(0.1 * trust * 0.1)
    whole = math.sqrt(5) if kind is LARS else math.sqrt(2)  # the ratio is 1
    assert float(step["new"].norm()) == pytest.approx(0.1 * whole, rel=1e-4)
    assert float(step["still"]) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_entry_that_is_not_finite_makes_a_normalised_gradient_so(bad, dtype) -> None:
    """An infinite norm must not have all other entries look like zeros."""
    w, layout = torch.ones(3, dtype=dtype), Layout.of({"w": (3,)})
    moved = _path(SNGM(), w, [torch.tensor([1.0, bad, 2.0], dtype=dtype)], layout)[0]
    assert moved.isnan().all()


@pytest.mark.parametrize(
    ("size", "n", "dtype"),
    [
        (3e38, 2, torch.float32),
        (1e-40, 2, torch.float32),
        (1e3, 10_000, torch.float16),
        (1e38, 9, torch.bfloat16),
    ],
)
def test_a_norm_beyond_the_type_of_its_entries_is_no_zero_step(size, n, dtype) -> None:
    w, layout = torch.zeros(n, dtype=dtype), Layout.of({"w": (n,)})
    moved = _path(SNGD(lr=1.0), w, [torch.full((n,), size, dtype=dtype)], layout)[0]
    expected = torch.full((n,), -math.sqrt(1 / n), dtype=dtype)
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=0)
