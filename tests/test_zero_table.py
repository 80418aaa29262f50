"""The memory model against a table that others published: ZeRO's, of model states by degree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner_toy import TOKENS, toy
from polyreme.plan.ir import Workload
from polyreme.planner.cost.memory import WIDTHS, Memory
from polyreme.planner.draft import Draft, Strategy

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_states_by_level_and_degree_are_those_that_zeros_table_prints(monkeypatch) -> None:
    """A state counted twice, left whole, or split that is not; each of 54 cells."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import zero_table

    table = json.loads(zero_table.DATA.read_text())
    found = list(zero_table.rows(table))
    assert len(found) == 54
    off = [
        (column, degree, printed, ours)
        for column, degree, printed, ours, _ in found
        if abs(ours - float(printed)) >= zero_table.unit_of(printed)
    ]
    assert not off


@pytest.mark.parametrize("shard", [2, 3])
def test_a_whole_gradient_takes_the_place_of_its_share(shard: int) -> None:
    """Both counted: a reduction frees the one as it makes the other."""
    graph = toy(2, tied=False)
    workload = Workload(global_batch=24, seq_len=TOKENS, precision="bf16", optimizer_states=2)
    memory = Memory(graph, workload)
    strategy = Strategy(shard=shard, level="optimizer")
    draft = Draft(
        strategies={layer.name: strategy for layer in graph.layers},
        microbatches=2,
        global_batch=24,
        bucket_bytes=0,
        overlap=True,
    )
    shares = memory.storage(draft, 0).gradients
    waiting = sum(
        memory.kept_bytes(layer.name, strategy, 2) - memory.kept_bytes(layer.name, strategy, 1)
        for layer in graph.layers
    )
    trained = sum(
        param.n_elements
        for layer in graph.layers
        for param in memory.classes.shapes[layer.name].params
        if param.trainable
    )
    assert shares + waiting == trained * WIDTHS["bf16"].gradient
