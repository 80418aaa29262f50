"""Measured profiles of compiled layers: what is compiled, for which sizes, and when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from behind import Quick
from polyreme.cluster.accelerator import HostAccelerator, Timer
from polyreme.cluster.detect import detect
from polyreme.measure import layers as layer_times
from polyreme.measure.measure import measure
from polyreme.measure.passes import HeadStart
from polyreme.runtime.compiled import compile_layer
from profile_toy import MODULES, WIDTH, tiny_graph
from test_measure import lone

KINDS = ("wide", "relued")


class Wide(nn.Module):
    """Of one class, in many widths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return 2 * self.linear(x)


class Relued(Wide):
    """Another class; torch's own modules are not compiled by themselves."""

    def forward(self, x):
        return self.linear(x).relu()


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[torch.Size]]:
    """Shapes of the samples that are compiled for, in place of a compiler that takes seconds."""
    found: list[torch.Size] = []

    def backend(module, examples):
        if any("cross_entropy" in str(node.target) for node in module.graph.nodes):
            return module.forward  # the loss, with the last layer
        found.append([each.shape for each in examples if each.dim() == 2][-1])
        return module.forward

    monkeypatch.setitem(MODULES, "wide", lambda: Wide(WIDTH))
    monkeypatch.setitem(MODULES, "relued", lambda: Relued(WIDTH))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


class Telling(HostAccelerator):
    """Its seconds say how often something was compiled while they were taken."""

    found: list[torch.Size]

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        timer, before = Timer(), len(self.found)
        yield timer
        timer.seconds = 1e-6 + len(self.found) - before


def telling(found: list[torch.Size]) -> Telling:
    entry = Telling()
    object.__setattr__(entry, "found", found)
    return entry


def test_compiled_layers_are_measured_compiled_and_others_are_not(compiled) -> None:
    graph, cluster = tiny_graph(*KINDS), detect(HostAccelerator(), 1)
    plain = measure(graph, cluster, "fp32", lone(), 8, budget_s=0.5)
    assert not plain.compiled
    assert not compiled
    made = measure(graph, cluster, "fp32", lone(), 8, budget_s=0.5, compiled=True)
    assert made.compiled
    assert {times.microbatch for times in made.layers.values()} == {(1, 4, 8)}
    assert sorted(shape[0] for shape in compiled) == sorted([1, 4, 8] * 2)  # no size stands open


def test_few_sizes_are_compiled_for_the_largest_that_fits_among_them(compiled) -> None:
    graph = tiny_graph("wide")
    sample = WIDTH * 4 * 2  # input and output
    have = int(200 * sample / layer_times.MEMORY_SHARE)
    tight = HostAccelerator(name="tight", memory_limit_bytes=have)
    made = measure(graph, detect(tight, 1), "fp32", lone(tight), 512, budget_s=5.0, compiled=True)
    sizes = made.layers["wide"].microbatch
    assert len(sizes) == layer_times.COMPILED_SIZES
    assert sizes[0] == 1
    assert sizes[-1] in (128, 256)
    assert len(compiled) == len(sizes)


def test_no_time_holds_what_compiling_took(compiled) -> None:
    """The first pass of a size counted, or a backward pass that is compiled after it."""
    entry = telling(compiled)
    made = measure(
        tiny_graph(*KINDS), detect(entry, 1), "fp32", lone(entry), 8, budget_s=5.0, compiled=True
    )
    assert compiled
    for times in made.layers.values():
        assert all(value < 1 for value in (*times.forward_s, *times.backward_s))


def test_compiling_ends_no_ladder_of_sizes(compiled, monkeypatch) -> None:
    """Seconds of compiling, of backward passes too, were taken from those for passes."""
    begun: list[float] = []

    def slowly(module, examples):
        del examples
        begun.append(time.perf_counter())
        time.sleep(0.3)
        return make_boxed_func(module.forward)

    monkeypatch.setattr(
        torch, "compile", partial(torch.compile.func, backend=aot_autograd(fw_compiler=slowly))
    )
    made = measure(
        tiny_graph("wide"),
        detect(HostAccelerator(), 1),
        "fp32",
        lone(),
        8,
        budget_s=0.5,
        compiled=True,
    )
    assert len(made.layers["wide"].microbatch) == layer_times.COMPILED_SIZES
    assert len(begun) >= 2 * layer_times.COMPILED_SIZES  # the loss is compiled too
    assert not compiled


def test_nothing_that_was_measured_compiled_is_left_for_training(compiled) -> None:
    measure(
        tiny_graph("wide"),
        detect(HostAccelerator(), 1),
        "fp32",
        lone(),
        2,
        budget_s=0.5,
        compiled=True,
    )
    before = len(compiled)
    module = Wide(WIDTH)
    compile_layer(module)
    module(torch.zeros(2, WIDTH))
    assert len(compiled) == before + 1


def test_all_kinds_of_a_class_are_compiled_however_many_there_are(compiled) -> None:
    """After eight forms of one forward function torch ran the rest as they are."""
    widths = range(1, 21)
    modules = [Wide(width) for width in widths]
    for module in modules:
        compile_layer(module)
    for module, width in zip(modules, widths, strict=True):
        module(torch.zeros(3, width))
    assert [shape[-1] for shape in compiled] == list(widths)
    for width in widths:  # one more of each kind finds what its like has compiled
        again = Wide(width)
        compile_layer(again)
        again(torch.zeros(3, width))
    assert len(compiled) == len(widths)


def test_the_host_of_compiled_layers_is_timed_in_a_row_of_them(compiled) -> None:
    """One alone took its host longer than one among others; none is compiled again."""
    head = HeadStart(lone())
    world = dataclasses.replace(lone(), accelerator=Quick())
    graph = tiny_graph("wide", "relu")
    stand = layer_times.Stand(graph, graph.layers[0], "fp32", world, compiled=True, head=head)
    assert stand.timed(2) is not None
    n_compiled = len(compiled)
    assert n_compiled > 0
    assert len(stand._others()) == 3
    stand._in_a_row_s(2, recompute=False)
    assert len(compiled) == n_compiled
