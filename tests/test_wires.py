"""Messages between stages: what is sent is let go of while the step goes on."""

from __future__ import annotations

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from polyreme.runtime import loop
from polyreme.runtime.wires import Wires
from tiny import Case, Model

P, MICROBATCHES = 2, 12


def _alive(world, case):
    """How many of the tensors that this process has sent are in memory, at most and at the end."""
    sent, most = [], [0]
    start = Wires._start_send

    def noting(self, tensor, pipe):
        found = start(self, tensor, pipe)
        sent.append(StorageWeakRef(tensor.untyped_storage()))
        most[0] = max(most[0], sum(not each.expired() for each in sent))
        return found

    Wires._start_send = noting
    try:
        loop.train(case.job(), world)
    finally:
        Wires._start_send = start
    return most[0], sum(not each.expired() for each in sent), len(sent)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_memory_of_what_was_sent_does_not_grow_with_the_microbatches(pool, name):
    """All of a step's messages stayed until its end, and with them the peak of a capped order."""
    plan = {"pp": P, "order": name, "microbatches": MICROBATCHES}
    case = Case(model=Model(n_blocks=4), plan=plan, global_batch=MICROBATCHES, steps=1)
    for most, left, n_sent in pool(P).run(_alive, case):
        assert n_sent >= MICROBATCHES
        assert most <= 4 * P  # passes that an order has under way, of two stages
        assert left == 0
