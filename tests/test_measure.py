"""Measured profiles: what is run, what all processes agree on, what is refused."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
import torch
from torch import nn

from polyreme.cluster.accelerator import HostAccelerator, register, unregister
from polyreme.cluster.detect import detect
from polyreme.errors import RunError
from polyreme.graph.layer import Layer, LayerGraph
from polyreme.measure import layers as layer_times
from polyreme.measure import links, stand
from polyreme.measure.agree import largest, mean
from polyreme.measure.links import measure_links, measure_overlap
from polyreme.measure.measure import measure
from polyreme.profile.fit import Fit
from polyreme.profile.record import Profile
from polyreme.profile.saved import SavedBytes
from polyreme.profile.store import inputs_hash, load, save, valid, versions
from polyreme.runtime.mesh import World
from polyreme.sample import TensorSpec
from profile_toy import WIDTH, tiny_graph


def lone(accelerator: HostAccelerator | None = None) -> World:
    """A world of this process alone."""
    return World(
        rank=0,
        n_ranks=1,
        local_rank=0,
        n_local=1,
        device=torch.device("cpu"),
        accelerator=accelerator or HostAccelerator(),
    )


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_one_process_measures_every_kind(precision, tmp_path) -> None:
    graph = tiny_graph("linear", "linear-relu", "linear-relu", "relu")
    cluster = detect(HostAccelerator(), 1)
    profile = measure(graph, cluster, precision, lone(), 6, budget_s=0.05)
    assert set(profile.layers) == {"linear", "linear-relu", "relu"}
    for times in profile.layers.values():
        assert times.microbatch[0] == 1
        assert times.microbatch[-1] <= 6
        assert all(value > 0 for value in times.forward_s)
        assert all(value > 0 for value in times.backward_s)
    assert not profile.assumed
    assert profile.matmul_flops > 0
    assert profile.optimizer_s_per_byte > 0
    assert profile.context_bytes > 0
    assert Fit(profile).collective_s("all_reduce", 1, 100) == 0.0
    wanted = inputs_hash(graph, cluster, precision)
    assert valid(profile, wanted, 6, profile.hardware, versions()) == []
    assert len(valid(profile, wanted, 7, profile.hardware, versions())) == 1
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile


def test_layers_compute_in_the_precision_asked_for() -> None:
    stand = layer_times.Stand(
        tiny_graph("linear", "linear"), tiny_graph("linear").layers[0], "bf16", lone()
    )
    assert {weight.dtype for weight in stand.module.parameters()} == {torch.bfloat16}


class Sequence(nn.Module):
    """Embedding of tokens; more rows than two, so that the indices given must be known."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.positions = nn.Embedding(5, WIDTH)

    def forward(self, ids, mask, scale):
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        x = self.tokens(ids) + self.positions(torch.arange(5, device=ids.device))
        return x * mask.unsqueeze(-1) * scale.unsqueeze(-1), mask


class Head(nn.Module):
    """Logits from two inputs, one of which nothing depends on."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 11)

    def forward(self, hidden, mask):
        return self.out(hidden)


class SequenceBuilder:
    def build(self, layer):
        with torch.device("meta"):
            return {"embed": Sequence, "head": Head}[layer.kind]()

    def initialise(self, layer, module, seed):
        for weight in module.parameters():
            nn.init.normal_(weight)


def sequence_graph() -> LayerGraph:
    hidden, mask = TensorSpec((5, WIDTH)), TensorSpec((5,), "bool")
    return LayerGraph(
        name="sequence",
        layers=(
            Layer(
                name="embed",
                kind="embed",
                inputs=("batch:ids", "batch:mask", "batch:scale"),
                outputs={"hidden": hidden, "mask": mask},
                params={},
                param_count=16 * WIDTH,
                flops=0.0,
            ),
            Layer(
                name="head",
                kind="head",
                inputs=("embed.hidden", "embed.mask"),
                outputs={"logits": TensorSpec((5, 11))},
                params={},
                param_count=11 * WIDTH + 11,
                flops=2.0 * 5 * WIDTH * 11,
            ),
        ),
        inputs={
            "ids": TensorSpec((5,), "int64"),
            "mask": mask,
            "scale": TensorSpec((5,), "float32"),
        },
        output="head.logits",
        builder=SequenceBuilder(),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tokens_masks_and_several_outputs_are_played(precision) -> None:
    graph = sequence_graph()
    profile = measure(graph, detect(HostAccelerator(), 1), precision, lone(), 64, budget_s=0.05)
    assert set(profile.layers) == {"embed", "head"}
    assert all(value > 0 for times in profile.layers.values() for value in times.backward_s)


def test_the_loss_is_timed_with_the_layer_that_gives_the_logits() -> None:
    graph = sequence_graph()
    calls = []
    original = stand.cross_entropy

    def counted(logits, labels):
        calls.append(logits.shape)
        return original(logits, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand, "cross_entropy", counted)
        layer_times.Stand(graph, graph.layers[1], "fp32", lone()).play(3)()
        assert set(calls) == {(3, 5, 11)}
        calls.clear()
        layer_times.Stand(graph, graph.layers[0], "fp32", lone()).play(3)()
        assert not calls


def _out_of_memory_from(limit: int):
    original = layer_times.Stand.play

    def play(self, microbatch, *more, **how):
        if microbatch >= limit:
            raise torch.OutOfMemoryError("full")
        return original(self, microbatch, *more, **how)

    return play


def test_memory_that_runs_out_ends_the_ladder(monkeypatch) -> None:
    monkeypatch.setattr(layer_times.Stand, "play", _out_of_memory_from(4))
    profile = measure(
        tiny_graph("linear"), detect(HostAccelerator(), 1), "fp32", lone(), 64, budget_s=5.0
    )
    assert profile.layers["linear"].microbatch == (1, 2)


def test_a_layer_that_does_not_fit_is_named(monkeypatch) -> None:
    monkeypatch.setattr(layer_times.Stand, "play", _out_of_memory_from(1))
    with pytest.raises(RunError, match=r'"layer\.0"'):
        measure(tiny_graph("linear"), detect(HostAccelerator(), 1), "fp32", lone(), 64)


def test_microbatches_stop_before_memory_does() -> None:
    graph = tiny_graph("linear")
    tight = HostAccelerator(name="tight", memory_limit_bytes=1000)
    profile = measure(graph, detect(tight, 1), "fp32", lone(tight), 64, budget_s=5.0)
    largest_size = profile.layers["linear"].microbatch[-1]
    assert largest_size * WIDTH * 4 <= 1000 * layer_times.MEMORY_SHARE


def test_a_lone_process_agrees_with_itself() -> None:
    world = lone()
    assert mean(world, [1.5, 2.5]) == (1.5, 2.5)
    assert largest(world, 3.0) == 3.0
    assert measure_overlap(world) == 0.0
    assert measure_links(world, 1.0) == {"all_reduce": (), "all_gather": (), "reduce_scatter": ()}


# Several processes


def _measured(world, kinds, precision):
    graph = tiny_graph(*kinds)
    cluster = detect(world.accelerator, world.n_ranks)
    return measure(graph, cluster, precision, world, 64, budget_s=0.2)


def _without_date(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, date="")


def test_all_processes_return_the_same_profile(pool) -> None:
    one, two = pool(2).run(_measured, ("linear", "relu"), "fp32")
    assert _without_date(one) == _without_date(two)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        (times,) = one.collectives[op]
        assert times.n_devices == 2
        assert all(math.isfinite(value) and value > 0 for value in times.seconds)
    assert 0.0 <= one.overlap <= 1.0


def _uneven(world):
    if world.rank == 1:
        layer_times.Stand.play = _out_of_memory_from(2)
    try:
        return layer_times.measure_layers(
            tiny_graph("linear"),
            "fp32",
            world,
            {"linear": SavedBytes(saved=32, recompute=32, again=0)},
            (1, 2, 4, 8),
            5.0,
        )
    finally:
        if world.rank == 1:
            layer_times.Stand.play = _ORIGINAL_PLAY


_ORIGINAL_PLAY = layer_times.Stand.play


def test_memory_that_runs_out_on_one_process_ends_it_on_all(pool) -> None:
    results = pool(2).run(_uneven)
    assert [times["linear"].microbatch for times in results] == [(1,), (1,)]


def _links(world):
    links.SIZES = (4096, 32768)
    return measure_links(world, 0.2)


def _dealt(world):
    links.SIZES = (4096, 32768)
    return measure_links(world, 0.2, (*links.OPS, "all_to_all"))


def test_exchanges_from_all_to_all_are_measured_where_they_are_asked_for(pool) -> None:
    results = pool(2).run(_dealt)
    assert results[0] == results[1]
    (times,) = results[0]["all_to_all"]
    assert times.size_bytes[0] == 4096
    assert all(math.isfinite(value) and value > 0 for value in times.seconds)


def test_groups_of_neighbours_are_measured_too(pool) -> None:
    results = pool(4).run(_links)
    assert all(result == results[0] for result in results)
    assert [times.n_devices for times in results[0]["all_reduce"]] == [4, 2]
    assert {times.n_hosts for times in results[0]["all_gather"]} == {1}


def test_sizes_divide_by_groups_that_are_no_power_of_two(pool) -> None:
    (times,) = pool(3).run(_links)[0]["reduce_scatter"]
    assert all(size % 12 == 0 for size in times.size_bytes)


def _on_toy(world):
    from polyreme.cluster.accelerator import detect as detect_accelerator

    toy = HostAccelerator(name="toy", memory_limit_bytes=10**8)
    register(toy)
    try:
        found = detect_accelerator()
        world = dataclasses.replace(world, accelerator=found)
        cluster = detect(found, world.n_ranks)
        profile = measure(tiny_graph("linear"), cluster, "fp32", world, 64, budget_s=0.1)
        return found.name, cluster.type_of(0).memory_bytes, len(profile.layers)
    finally:
        unregister("toy")


def test_an_accelerator_of_ones_own_is_measured_like_any_other(pool) -> None:
    assert pool(2).run(_on_toy) == [("toy", 10**8, 1)] * 2
