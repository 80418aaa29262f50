"""The seconds of exchanges are those of the account of what a step exchanges."""

from __future__ import annotations

import msgspec
import pytest

from drawn import draw, graph_of
from planner_toy import cluster, profile, toy, toy_draft, workload
from polyreme.plan.grid import Cell
from polyreme.plan.ir import Workload
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.pipeline import StepCost
from polyreme.planner.draft import Draft, Strategy, read_draft
from polyreme.planner.replay import saved_after
from polyreme.profile.record import CollectiveTimes, Profile
from tiny import plan

replace = msgspec.structs.replace


def _by_bytes(kinds) -> Profile:
    """Collectives take a nanosecond a byte of their tensor, whatever their group."""
    some = profile()
    groups = tuple(
        CollectiveTimes(n_devices=n, n_hosts=1, size_bytes=(1, 2**30), seconds=(1e-9, 2**30 * 1e-9))
        for n in range(2, 9)
    )
    return replace(
        some,
        layers=dict.fromkeys(kinds, some.layers["block"]),
        collectives=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), groups),
    )


def _cost(graph, drawn_plan: Draft, batch: int, precision="fp32") -> StepCost:
    work = Workload(global_batch=batch, seq_len=1, precision=precision, optimizer_states=1)
    memory = Memory(graph, work, drawn_plan.strategy.tp)
    kinds = {layer.kind for layer in graph.layers}
    return StepCost(DataCost(memory, _by_bytes(kinds), cluster(8)))


@pytest.mark.slice(6)
@pytest.mark.parametrize("seed", range(40))
def test_seconds_of_communication_are_of_the_bytes_of_the_account(seed):
    drawn = draw(seed)
    graph = graph_of(drawn.family)
    draft = read_draft(plan(graph, global_batch=drawn.global_batch, **drawn.plan))
    cost = _cost(graph, draft, drawn.global_batch)
    draft = replace(draft, actions=cost.ordered(draft).actions)
    found = []
    for pipe in range(draft.pp):
        account = cost.traffic(draft, Cell(pipe=pipe))
        sizes = [
            (2 if message.operation == "send" else 1) * message.n_bytes * count
            for message, count in account.items()
            if message.over != "all"
        ]
        found.append(sum(sizes) * 1e-9)
    assert cost(draft).comm_s == pytest.approx(max(found))


def test_a_unit_is_recomputed_if_one_of_its_layers_is():
    """Then its backward pass reads the tables, which the first of two that are tied does not."""
    graph = graph_of("t5 gated, untied")
    names = [layer.name for layer in graph.layers]
    strategy = Strategy(shard=2, level="params")
    how = dict.fromkeys(names, strategy) | {"decoder.embed": replace(strategy, recompute=True)}
    draft = Draft(strategies=how, microbatches=1, global_batch=2, bucket_bytes=100, overlap=True)
    cost = _cost(graph, draft, 2)
    account = cost.traffic(draft, Cell())
    n_bytes = sum(m.n_bytes * n for m, n in account.items() if m.over != "all")
    assert cost(draft).comm_s == pytest.approx(n_bytes * 1e-9)


def test_a_step_of_shards_and_microbatches_by_hand():
    """The toy: units of embed and head (35 + 7 elements), and two blocks of 65 and one scale.

    Over two shards rows are padded: 8 x 5 + 8, and 4 x 5 + 2 x 5 + 6 x 5 + 6 + 6 + 6 of a block,
    of which the first 20 are frozen. A batch norm's ten elements stay whole.
    """
    draft = toy_draft(microbatches=3, replica=2, shard=2, level="grads")
    memory = Memory(toy(), workload())
    account = DataCost(memory, profile(), cluster(4)).traffic(draft, Cell())
    by = {
        (message.operation, message.over, message.n_bytes // 4): count
        for message, count in account.items()
        if message.over != "all"
    }
    ends, block, normed = 40 + 8, 10 + 30 + 6 + 12, 10 + 30 + 6
    assert by == {
        ("all_gather", "shards", ends): 1,
        ("all_gather", "shards", 20 + block): 1,
        ("all_gather", "shards", 20 + normed): 1,
        ("reduce_scatter", "shards", ends): 3,
        ("reduce_scatter", "shards", block): 3,
        ("reduce_scatter", "shards", normed): 3,
        ("all_reduce", "replicas", ends // 2): 1,
        ("all_reduce", "replicas", block // 2): 1,
        ("all_reduce", "replicas", normed // 2): 1,
        ("all_reduce", "data", 1 + 1 + 10): 1,
    }


@pytest.mark.parametrize(
    ("family", "layer", "path", "saved"),
    [
        ("llama", "block.0", "block.mlp.down_proj", False),  # only a residual comes behind it
        ("llama", "block.0", "block.self_attn.o_proj", True),
        ("bert", "block.0", "block.output.dense", True),  # a norm does
        ("gpt2", "embed", "wte", True),  # the table of positions
        ("llama", "embed", "embed_tokens", False),
    ],
)
def test_recomputation_ends_with_the_last_saved_tensor(family, layer, path, saved):
    graph = graph_of(family)
    assert dict(graph.build(layer).named_modules()).keys() & {path}
    assert (path in saved_after(graph, layer)) == saved
