"""Our executor gives the gradients that torch.distributed.pipelining gives, order by order."""

from __future__ import annotations

import numpy as np
import pytest

from peer import SCHEDULES, peer
from polyreme.data.order import arrange
from polyreme.runtime import loop
from polyreme.runtime.halves import Halves
from tiny import Case, Model

P, MICROBATCHES = 2, 4


def _case(name):
    plan = {"pp": P, "order": name, "microbatches": MICROBATCHES}
    return Case(model=Model(gain=True, n_blocks=4), plan=plan, steps=1, global_batch=8)


def _ours(job, world):
    """The loss of a step, and its gradients on this process."""
    found = {}

    def keep(gradients, *, loss, weight):
        found["loss"] = loss
        found.update({name: each.numpy().copy() for name, each in gradients.items()})

    loop.train(job, world, on_gradients=keep)
    return found


def _theirs(job, world, name):
    made = peer(job, world, name)
    order = arrange(
        job.source, job.partition, n_workers=1, global_batch=8, seed=job.train.seed, tail="drop"
    )
    batch = job.source.train(order.batch(0))
    loss = made.step(batch["input_ids"], batch["labels"])
    found = {name: each.grad.numpy() for name, each in made.parameters.items()}
    return found if loss is None else found | {"loss": loss.item()}


def _both(world, name, fault=None):
    job = _case(name).job()
    theirs, play = _theirs(job, world, name), Halves.play
    if fault is not None:
        Halves.play = fault(play)
    try:
        return _ours(job, world), theirs
    finally:
        Halves.play = play


def _errors(ranks):
    """Relative differences by name; each process compares what it holds."""
    found = {}
    for ours, theirs in ranks:
        assert ours.keys() | {"loss"} == theirs.keys() | {"loss"}
        for name, known in theirs.items():
            scale = np.linalg.norm(known)
            assert scale > 0, name
            found[name] = float(np.linalg.norm(ours[name] - known) / scale)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_peer(pool, name):
    ranks = pool(P).run(_both, name)
    errors = _errors(ranks)
    names = {name for layer in _case(name).job().graph.layers for name in layer.params.values()}
    assert errors.keys() == names | {"loss"}
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize(("name", "held"), [("interleaved", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])])
def test_stages_lie_where_the_peer_has_them(name, held):
    """Stage d and stage 2p - 1 - d are on one rank of a V."""
    stages = _case(name).job().plan.stages
    assert [stage.placements for stage in stages] == [((rank,),) for rank in held]


def _losing(play):
    calls = []

    def losing(self, key):
        calls.append(key)
        if len(calls) == 2:
            self._kept.pop(key)
        else:
            play(self, key)

    return losing


def test_a_lost_weight_half_is_seen(pool):
    errors = _errors(pool(P).run(_both, "zb-v", _losing))
    assert max(errors.values()) > 1e-3
