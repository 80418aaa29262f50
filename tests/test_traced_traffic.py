"""What a step exchanges is what the planner's account says, message by message."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from drawn import Drawn, draw
from polyreme.plan.grid import grid_of
from polyreme.plan.ir import Workload
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.message import Messages
from polyreme.planner.cost.traffic import Traffic
from polyreme.planner.draft import read_draft
from traced import step_heard

N_PLANS = 20
PRECISIONS = ("fp64", "fp32", "bf16")


def accounts(case, ranks) -> list[Messages]:
    """What the planner says that each of these ranks exchanges."""
    job = case.job()
    plan = job.plan
    workload = Workload(
        global_batch=plan.global_batch,
        seq_len=plan.seq_len,
        precision=plan.precision,
        optimizer_states=1,
    )
    draft, grid = read_draft(plan), grid_of(plan)
    traffic = Traffic(Memory(job.graph, workload, draft.strategy.tp))
    return [traffic(draft, grid.cell(rank)) for rank in ranks]


def _plain(account: Messages) -> Counter:
    found: Counter = Counter()
    for message, count in account.items():
        found[message.operation, message.n_ranks, message.n_bytes] += count
    return found


def _held(pool, drawn: Drawn, precision: str, seed: int) -> None:
    """A rank of each stage, of any place in it, exchanges what the account says in each step."""
    rng = random.Random(seed)
    pp = drawn.plan["pp"]
    n_inside = drawn.n_processes // pp
    ranks = [pipe * n_inside + rng.randrange(n_inside) for pipe in range(pp)]
    case = drawn.case(plan={"precision": precision})
    heard = pool(1).run(step_heard, case, drawn.n_processes, ranks, timeout_s=240)[0]
    for rank, account, (steps, counted) in zip(ranks, accounts(case, ranks), heard, strict=True):
        said = _plain(account)
        for step in steps:
            assert step - said == said - step == Counter(), (rank, case.plan)
        n_bytes = sum(message.sent_bytes * count for message, count in account.items())
        assert counted == [n_bytes] * len(steps), (rank, case.plan)


@pytest.mark.slice(1)
@pytest.mark.parametrize("seed", range(N_PLANS))
def test_a_traced_step_exchanges_what_the_cost_model_says(pool, seed):
    _held(pool, draw(seed), PRECISIONS[seed % 3], seed)


def _staged(family: str, level: str, **how) -> Drawn:
    plan = {"pp": 2, "shard": 2, "level": {"": level}, "microbatches": 4, **how}
    return Drawn(family=family, plan=plan, global_batch=11)


@pytest.mark.parametrize(
    "drawn",
    [
        _staged("llama", "params", order="1f1b"),
        _staged("phi3", "grads", order="interleaved", cuts=[1, 1, 1, 1]),
        _staged("t5", "optimizer", order="interleaved", cuts=[3, 2, 2, 1]),
        _staged("llama tied", "params", order="zb-v", cuts=[1, 1, 1, 1]),
        _staged("gpt2", "params", order="gpipe", replica=2),
    ],
    ids=lambda drawn: f"{drawn.family}, {drawn.plan['level']['']}, {drawn.plan['order']}",
)
@pytest.mark.slice("llama, params, 1f1b", "phi3, grads, interleaved")
def test_a_pass_of_a_stage_neither_gathers_in_vain_nor_reduces_what_is_not_its_own(pool, drawn):
    """FSDP2 by itself did, and so the step exchanged more than the account says."""
    _held(pool, drawn, "bf16", 0)
