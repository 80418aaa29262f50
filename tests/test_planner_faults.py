"""Faults of other planners: layers that vanish, and layers that no device holds."""

from __future__ import annotations

import pytest

from planner_toy import cluster, profile, toy, workload
from polyreme.errors import Infeasible
from polyreme.plan.check import check
from polyreme.plan.options import Parallel
from polyreme.planner.search import search
from polyreme.units import show_bytes


@pytest.mark.parametrize(("n_blocks", "pp"), [(27, 4), (27, 7), (10, 3), (1, 4)])
def test_layers_that_the_stages_do_not_divide_are_all_planned(n_blocks, pp):
    """30 layers on 4 stages trained as 28."""
    graph, machines = toy(n_blocks, tied=False), cluster(pp)
    (plan,) = search(graph, machines, profile(), workload(12), Parallel(pp=pp), top=1)
    assert [name for stage in plan.stages for name in stage.layers] == [
        layer.name for layer in graph.layers
    ]
    sizes = [len(stage.layers) for stage in plan.stages]
    assert len(sizes) == pp
    assert min(sizes) > 0
    assert check(plan, graph, machines, workload(12)) == []


@pytest.mark.slice(2)
@pytest.mark.parametrize("fixed", [Parallel(), Parallel(pp=2), Parallel(shard=4, level="params")])
@pytest.mark.parametrize("memory", [40, 400])
def test_a_layer_larger_than_every_device_is_named_with_its_bytes(fixed, memory):
    graph = toy(3, tied=False)
    with pytest.raises(Infeasible) as raised:
        search(graph, cluster(4, memory_bytes=memory), profile(), workload(12), fixed, top=1)
    found = raised.value
    assert found.layer in {layer.name for layer in graph.layers}
    assert found.have_bytes == memory
    assert sum(found.need_bytes.values()) > memory
    assert found.ways_out
    said = str(found)
    assert f'"{found.layer}"' in said
    assert f"which has {show_bytes(memory)}" in said
    assert f"needs {show_bytes(sum(found.need_bytes.values()))}" in said
    assert found.layer_bytes > 0
    assert found.plan in said
