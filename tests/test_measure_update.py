"""Costs of a step beside passes of layers: gradients' sums, the update; passes in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from planner_toy import cluster, profile, toy, toy_draft, workload
from polyreme.cluster.accelerator import HostAccelerator, Timer
from polyreme.measure import device
from polyreme.measure import layers as layer_times
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from profile_toy import tiny_graph
from test_measure import lone

SEEN = ("foreach_norm", "copy_", "foreach_copy_", "add_", "fused_adamw")


@contextmanager
def operators() -> Iterator[list[str]]:
    """Names of operators that ran."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            del types
            found.append(func.overloadpacket.__name__.lstrip("_"))
            return func(*args, **(kwargs or {}))

    with Noting():
        yield found


@pytest.mark.parametrize(("precision", "copies"), [("fp32", False), ("bf16", True)])
def test_an_update_is_measured_with_its_norm_and_copies(precision, copies) -> None:
    """The optimizer alone was measured."""
    with operators() as ran:
        assert device.optimizer_s_per_byte(lone(), precision) > 0
    assert ran.count("foreach_norm") == ran.count("fused_adamw_") > 1
    assert ("foreach_copy_" in ran) == copies


@pytest.mark.parametrize(("precision", "taken"), [("fp32", True), ("bf16", False), ("fp64", True)])
def test_a_lone_process_takes_first_gradients_as_they_come(precision, taken) -> None:
    """Where layers compute in the master's dtype; else they are cast into a sum."""
    first, more = device.gradients_s_per_byte(lone(), precision)
    assert (first == 0.0) == taken
    assert more > 0


def _update_s(profile, microbatches: int, **how) -> float:
    draft = toy_draft(microbatches=microbatches, **how)
    memory = Memory(toy(), workload())
    return DataCost(memory, profile, cluster(2))(draft).update_s


@pytest.mark.parametrize(
    ("how", "first", "more"),
    [
        ({}, 1, 3),
        ({"replica": 2}, 1, 3),
        ({"shard": 2, "level": "optimizer"}, 1, 3),
        ({"shard": 2, "level": "grads"}, 4, 0),
        ({"shard": 2, "level": "params"}, 4, 0),
    ],
)
def test_each_microbatch_pays_for_the_sums_of_gradients(how, first, more) -> None:
    """No microbatch did; or all were added, though levels reduce theirs one by one."""
    bare = profile()
    costs = msgspec.structs.replace(bare, gradient_s_per_byte=1e-6, more_gradient_s_per_byte=1e-3)
    elements, whole = {}, 0  # scalars and batch norms stay whole, their gradients add up
    for layer in toy().layers:
        for name, weight in toy().build(layer.name).named_parameters():
            if weight.requires_grad and layer.params[name] not in elements:
                elements[layer.params[name]] = weight.numel()
                stays = weight.dim() == 0 or (layer.kind == "normed" and name.startswith("norm"))
                whole += stays * weight.numel()
    split = sum(elements.values()) - whole
    expected = 4 * split * (first * 1e-6 + more * 1e-3) + 4 * whole * (1e-6 + 3e-3)
    assert _update_s(costs, 4, **how) == pytest.approx(expected)
    assert _update_s(bare, 4, **how) == 0.0


class Slow(HostAccelerator):
    """A device whose first pass takes a second, in which libraries begin, and any other 1 ms."""

    ran: list[int]

    @property
    def on_host(self) -> bool:
        return False

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        timer = Timer()
        yield timer
        self.ran.append(1)
        timer.seconds = 1.0 if len(self.ran) <= 2 else 1e-3


def test_a_first_pass_in_which_libraries_begin_leaves_others_their_seconds() -> None:
    """Seconds of the first pass said how often it is repeated: once."""
    entry = Slow()
    object.__setattr__(entry, "ran", [])
    graph = tiny_graph("linear")
    world = dataclasses.replace(lone(), accelerator=entry)
    found = layer_times._time(layer_times._Stand(graph, graph.layers[0], "fp32", world), 2)
    assert found == pytest.approx([1e-3, 1e-3])
    assert len(entry.ran) // 2 - 2 > 10
