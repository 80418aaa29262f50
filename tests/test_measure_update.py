"""Costs of a step beside passes of layers: gradients' sums, the update; passes in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from behind import Behind, Quick
from drawn import graph_of
from planner_toy import cluster, profile, toy, toy_draft, workload
from polyreme.cluster.accelerator import Timer
from polyreme.measure import device
from polyreme.measure import layers as layer_times
from polyreme.measure.passes import HeadStart, Passes, Ran, timed
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.profile.fit import Asked, Fit
from polyreme.profile.saved import saved_bytes
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


RESTED = 8  # passes before any that follow one another
WARMS_UP = 80


class Slow(Behind):
    """A device whose first pass takes a second, in which libraries begin, and any other 1 ms."""

    ran: list[int]

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
    head = HeadStart(lone())
    stand = layer_times.Stand(graph, graph.layers[0], "fp32", world, head=head)
    found = timed(world, [lambda: stand.warm(2)], head)
    assert found is not None
    assert found[0][:2] == pytest.approx([1e-3, 1e-3])
    assert len(entry.ran) // 2 - 2 > 10


class Warming:
    """Passes of 4 and 6 ms; after 0.8 s of them each takes a tenth longer."""

    def __init__(self, host_s: float) -> None:
        self.host_s, self.n = host_s, 0

    def __call__(self) -> Ran:
        self.n += 1
        longer = 1.0 if self.n <= RESTED + WARMS_UP else 1.1
        own = (Timer(seconds=longer * each_s) for each_s in (4e-3, 6e-3))
        return Ran(*own, self.host_s / 2, self.host_s / 2)


def test_a_device_is_timed_as_warm_whichever_way_waits_for_its_host() -> None:
    """Where the host held up one way, none was timed long enough to warm the device.

    A third of a second was not long enough for any: it takes most of one.
    """
    quick, held_up = Warming(1e-3), Warming(12e-3)
    found = timed(lone(), [lambda: quick, lambda: held_up], HeadStart(lone()))
    assert found is not None
    assert found[0][:2] == pytest.approx([4.4e-3, 6.6e-3])
    assert found[1][:2] == pytest.approx([4.4e-3, 6.6e-3])
    assert held_up.n == RESTED < quick.n


def test_sizes_that_wait_for_their_host_are_priced_as_of_a_warm_device() -> None:
    """A small microbatch looked faster than a large one, which alone was timed long enough."""
    passes = {1: Passes(1.0, 2.0, 9.0), 4: Passes(4.4, 8.8, 9.0, 1.1), 8: Passes(9.0, 18.0)}
    found = layer_times._lasting(passes)
    assert found[1] == (pytest.approx(1.1), pytest.approx(2.2), 9.0, 1.1)
    assert (found[4], found[8]) == (passes[4], passes[8])


class Queued:
    """A device whose host waits as long as the queue is full, with one pass in it."""

    def __init__(self) -> None:
        self.waiting = 0

    def __call__(self) -> Ran:
        host_s = 500.0 if self.waiting else 100.0
        self.waiting += 1
        return Ran(Through(self), Timer(seconds=9e-3), host_s, host_s)


class Through(Timer):
    """Known once the device is through."""

    def __init__(self, queue: Queued) -> None:
        super().__init__(seconds=9e-3)
        self.queue = queue

    def settle(self) -> float:
        self.queue.waiting = 0
        return super().settle()


def test_what_a_host_takes_does_not_hold_what_it_waits_for_a_full_queue() -> None:
    """Passes that the device is slow with were asked for all at once."""
    assert sum(HeadStart(lone()).host_s(lone(), Queued())) == pytest.approx(200.0, rel=0.1)


class Paced(Slow):
    """A forward pass takes 2 ms, a backward pass 3 ms, and 1 ms more where it computes again."""

    bodies: list[Any]

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        timer = Timer()
        yield timer
        self.ran.append(1)
        again = 1e-3 if self.bodies and self.bodies[-1].recompute else 0.0
        timer.seconds = 2e-3 if len(self.ran) % 2 else 3e-3 + again


def test_recomputation_is_priced_as_a_whole_forward_pass(monkeypatch) -> None:
    """Torch computes again only as far as it must; the host pays for its hooks."""
    entry = Paced()
    bodies: list[Any] = []
    object.__setattr__(entry, "ran", [])
    object.__setattr__(entry, "bodies", bodies)
    original = layer_times.Stand.__init__

    def made(self, *args, **how):
        original(self, *args, **how)
        bodies.append(self.body)
        entry.ran.clear()

    monkeypatch.setattr(layer_times.Stand, "__init__", made)
    monkeypatch.setattr(layer_times.Stand, "hold", lambda *_: None)
    world = dataclasses.replace(lone(), accelerator=entry)
    graph = tiny_graph("linear")
    saved = saved_bytes(graph, "fp32")
    (times,) = layer_times.measure_layers(graph, "fp32", world, saved, (1, 2), 9.0).values()
    assert times.recompute_shares == pytest.approx((0.5, 0.5))
    assert not bodies[0].recompute


def test_a_device_that_waits_for_its_host_is_not_priced_as_if_it_did_not(monkeypatch) -> None:
    monkeypatch.setattr(layer_times.Stand, "hold", lambda *_: None)
    seconds = {False: (3e-3, 5e-3), True: (3e-3, 9e-3)}
    monkeypatch.setattr(layer_times.Stand, "_in_a_row_s", lambda _, __, again: seconds[again])
    world = dataclasses.replace(lone(), accelerator=Quick())
    graph = tiny_graph("linear", "relu")
    saved = saved_bytes(graph, "fp32")
    found = layer_times.measure_layers(graph, "fp32", world, saved, (1, 2, 4), 9.0)
    for times in found.values():
        assert times.host_s is not None
        assert times.host_s.forward == pytest.approx(3e-3)
        assert times.host_s.backward >= 5e-3  # and what it takes for gradients of weights
        assert times.host_s.recompute == pytest.approx(4e-3, rel=0.3)
        assert times.forward_s == pytest.approx((1e-6,) * 3)
    priced = Fit(msgspec.structs.replace(profile(), layers=found))
    host = found["linear"].host_s
    assert host is not None
    assert sum(priced.asked("linear", 2).lasting) == pytest.approx(host.forward + host.backward)
    again_s = sum(priced.asked("linear", 2, recompute=True).lasting)
    assert again_s == pytest.approx(host.forward + host.backward + host.recompute)


def test_the_largest_microbatch_is_measured_where_seconds_run_out(monkeypatch) -> None:
    """Passes over 32 samples were taken for 32 times those over one, which are the host's."""
    monkeypatch.setattr(layer_times.Stand, "hold", lambda *_: None)
    world = dataclasses.replace(lone(), accelerator=Quick())
    graph = tiny_graph("linear")
    saved = saved_bytes(graph, "fp32")
    (times,) = layer_times.measure_layers(graph, "fp32", world, saved, (1, 2, 4, 8), 0.0).values()
    assert times.microbatch == (1, 8)
    assert len(times.recompute_shares) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_the_host_of_one_of_several_tensor_parts_is_timed(tp: int) -> None:
    """Parts hold what cannot be copied."""
    world = dataclasses.replace(lone(), accelerator=Quick())
    graph = graph_of("llama tied")
    layer = next(layer for layer in graph.layers if layer.kind == "block")
    stand = layer_times.Stand(graph, layer, "fp32", world, tp, head=HeadStart(world))
    assert stand.timed(2) is not None
    (asked,) = stand.asked_s
    assert len(asked) == (2 if tp == 1 else 1)  # a part is not timed recomputed
    assert min(asked[0]) > 0


def test_layers_that_find_no_room_together_are_timed_alone(monkeypatch) -> None:
    """Four tables of a large vocabulary are more than some devices hold."""
    graph = graph_of("llama tied")
    layer = graph.layers[0]
    for share, others in ((0.5, 0), (1.0, 0), (3.0, 2), (1e6, 3)):
        world = dataclasses.replace(lone(), accelerator=Quick())
        stand = layer_times.Stand(graph, layer, "fp32", world, head=HeadStart(lone()))
        own_bytes = sum(weight.nbytes for weight in stand.module.parameters())
        free = share * 2 * own_bytes / 0.4
        monkeypatch.setattr(Quick, "free_bytes", lambda _, free=free: int(free) + 1)
        assert len(stand._others()) == others


def test_a_long_layer_hides_what_the_host_takes_for_short_ones() -> None:
    """Each layer was taken to start when its host had asked for all of it."""
    short, long = Asked(1.0, 1.0, 2.0, 3.0), Asked(10.0, 20.0, 1.0, 1.0)
    assert sum(short.plus(long).lasting) == 32.0 < sum(short.lasting) + sum(long.lasting)
    assert sum(long.plus(short, 20).lasting) == 102.0


def test_recomputation_of_a_size_between_is_priced_as_either() -> None:
    times = next(iter(profile().layers.values()))
    sizes = times.microbatch[:2]
    found = msgspec.structs.replace(
        times,
        microbatch=sizes,
        forward_s=times.forward_s[:2],
        backward_s=times.backward_s[:2],
        recompute_shares=(2.0, 1.0),
    )
    middle = sum(sizes) / 2
    assert found.recomputed(middle) == pytest.approx(1.5)
    assert [found.recomputed(n) for n in (sizes[0] / 2, sizes[0], sizes[1], 99)] == [2, 2, 1, 1]
    assert times.recomputed(middle) == 1.0


def test_a_plan_that_recomputes_is_priced_by_what_was_measured() -> None:
    bare = profile()
    half = msgspec.structs.replace(
        bare,
        layers={
            kind: msgspec.structs.replace(
                times, recompute_shares=tuple(0.5 for _ in times.microbatch)
            )
            for kind, times in bare.layers.items()
        },
    )
    plain, whole, found = (
        DataCost(Memory(toy(), workload()), costs, cluster(2))(draft).compute_s
        for costs, draft in (
            (bare, toy_draft(microbatches=1)),
            (bare, toy_draft(microbatches=1, recompute=True)),
            (half, toy_draft(microbatches=1, recompute=True)),
        )
    )
    assert found - plain == pytest.approx((whole - plain) / 2)
