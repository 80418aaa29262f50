"""Sums of gradients over tensor parts run beside the gradients of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyreme.runtime.apply.tensor import split
from polyreme.runtime.apply.tensor.beside import Entry
from polyreme.runtime.halves import Halves
from polyreme.runtime.timing import Traffic
from tensor_cases import CASES, B, T, parts

COLUMNS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
COLUMNS |= {"mlp.gate_proj", "mlp.up_proj"}


class Told(Traffic):
    """Tells when sums begin, and when they are waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def start(self, *given, **how):
        self._events.append("begins")
        work = super().start(*given, **how)
        wait = work.wait

        def told() -> bool:
            self._events.append("waits")
            return wait()

        work.wait = told
        return work


def _block(world, events: list[str], *, sp: bool):
    graph = CASES["llama"].graph()
    tp = replace(parts(world, 2, sp=sp), traffic=Told(events))
    module = graph.build("block.0").to_empty(device="cpu")
    graph.initialise("block.0", module, 0)
    split(module, graph.tensor_plan("block.0"), tp)
    hidden = torch.randn(B, T // 2 if sp else T, 32, requires_grad=True)
    return module, hidden


def _passes(world, sp: bool) -> tuple[list[str], set[str]]:
    """What happens in a backward pass, and whose gradients are made beside a sum."""
    events: list[str] = []
    module, hidden = _block(world, events, sp=sp)
    names = {id(p): name for name, p in module.named_parameters()}
    made, gradients = set(), Entry.gradients

    def told(self):
        events.append("weights")
        found = gradients(self)
        pairs = zip(self.weights, found, strict=True)
        made.update(names[id(weight)] for weight, each in pairs if each is not None)
        return found

    Entry.gradients = told
    try:
        module(hidden).sum().backward()
    finally:
        Entry.gradients = gradients
    assert all(p.grad is not None for p in module.parameters())
    return events, made


@pytest.mark.parametrize("sp", [False, True])
def test_gradients_of_weights_are_made_while_a_sum_is_under_way(pool, sp) -> None:
    """Each meeting of a backward pass was waited for with nothing beside it."""
    for events, made in pool(2).run(_passes, sp):
        assert events == ["begins", "weights", "waits"] * 2
        stems = {name.rpartition(".")[0] for name in made}
        assert {next(c for c in COLUMNS if stem.endswith(c)) for stem in stems} == COLUMNS


def _still(world) -> list[float]:
    """Gradients of weights that are used twice, frozen, or left for a half of their own."""
    events: list[str] = []
    module, hidden = _block(world, events, sp=False)
    whole, other = torch.randn(2, *hidden.shape, generator=torch.Generator().manual_seed(1))
    both = (module(hidden) * whole).sum() + (module(2 * hidden) * other).sum()
    both.backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    (module(hidden) * whole).sum().backward()
    (module(2 * hidden) * other).sum().backward()
    wrong = [_off(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True)]

    module.zero_grad()
    halves = Halves({id(p) for p in module.parameters()})
    with halves.watching():
        out = (module(hidden) * whole).sum() + (module(2 * hidden) * other).sum()
    begun = len(events)
    with halves.leaving("here"):
        out.backward()
    assert events[begun:] == []
    halves.play("here")
    wrong += [_off(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True)]

    module.zero_grad()
    module.requires_grad_(False)
    hidden.grad = None
    (module(hidden) * whole).sum().backward()
    frozen = hidden.grad.clone()
    module.requires_grad_(True)
    hidden.grad = None
    (module(hidden) * whole).sum().backward()
    wrong.append(_off(hidden.grad, frozen))
    with torch.no_grad():
        assert not module(hidden).requires_grad
    return wrong


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_weights_used_twice_frozen_or_halved_get_the_gradients_that_they_got(pool) -> None:
    for wrong in pool(2).run(_still):
        assert max(wrong) < 1e-5
