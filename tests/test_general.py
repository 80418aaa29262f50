"""An algorithm's program gives the same bits in processes and on the virtual clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from polyreme.algo import compress, feedback, rule, sync, topology
from polyreme.algo.compose import DataParallel
from polyreme.api.virtual import Virtual
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.saver import Saver
from polyreme.runtime.state import full_parameters
from polyreme.sim.options import Simulate
from tiny import Case, Model

PLAIN = DataParallel(rule=rule.SGD(lr=0.2, momentum=0.9))
SPARSE = DataParallel(
    rule=rule.SGD(lr=0.2),
    compress=compress.TopK(ratio=0.1),
    feedback=feedback.GMC(momentum=0.9),
)
LOCAL = DataParallel(
    rule=rule.SNGM(lr=0.05),
    sync=sync.LocalSteps(every=2),
    compress=compress.QSGD(levels=4),
    feedback=feedback.ErrorFeedback(),
)
GOSSIP = DataParallel(rule=rule.SGD(lr=0.1, momentum=0.5), topology=topology.Gossip())
ALGORITHMS = {"plain": PLAIN, "sparse": SPARSE, "local": LOCAL, "gossip": GOSSIP}


def _case(algorithm: DataParallel, n: int, **more) -> Case:
    more = {"steps": 6, "global_batch": 6, **more}
    layout = {"replica": n, "precision": "fp32", "microbatches": 1}
    model = Model(tied=True, gain=True, batch_norm=True)
    return Case(model, layout, algorithm=algorithm, general=True, **more)


def _run(world, case: Case, run: Path | None = None, until: int = 0, resume: bool = False):
    job = case.job()
    newest = checkpoints.newest(run) if resume else None
    outcome = loop.train(
        job,
        world,
        stop=(lambda: True) if until else None,
        save=None if run is None else Saver(run, job.graph, world, keep=2),
        load=(lambda state: checkpoint.load(state, newest, graph=job.graph)) if newest else None,
    )
    return dict(full_parameters(outcome.state)), outcome.steps, outcome.wire_bytes


def _virtual(world, case: Case, n: int, run: Path | None = None, until: int = 0):
    routes: list[Virtual] = []

    def make_route(*args, **more):
        routes.append(Virtual(Simulate(workers=n), *args, **more))
        return routes[0]

    job = case.job()
    outcome = loop.train(
        job,
        world,
        stop=(lambda: True) if until else None,
        save=None if run is None else Saver(run, job.graph, world, keep=2),
        make_route=make_route,
    )
    return dict(full_parameters(outcome.state)), routes[0].simulation.sent_bytes


@pytest.mark.parametrize("name", ALGORITHMS)
def test_processes_and_the_virtual_clock_end_with_the_same_bits_and_bytes(pool, name):
    n = 3
    case = _case(ALGORITHMS[name], n)
    virtual, sent = pool(1).run(_virtual, case, n)[0]
    real = pool(n).run(_run, case)
    weights = real[0][0]
    assert weights.keys() == virtual.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, virtual[key]), key
    assert [wire for _, _, wire in real] == sent


def test_the_general_path_of_plain_training_is_the_native_one_within_rounding(pool):
    case = dataclasses.replace(_case(PLAIN, 2), plan={"replica": 2, "precision": "fp64"})
    general = pool(2).run(_run, case)[0][0]
    native = pool(2).run(_run, dataclasses.replace(case, general=False))[0][0]
    for key, tensor in native.items():
        torch.testing.assert_close(general[key], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resuming_an_algorithm_is_bitwise_the_unbroken_run(pool, tmp_path, name):
    case = _case(ALGORITHMS[name], 2)
    case = dataclasses.replace(case, settings={"checkpoint_every": 2, "eval_every": 2})
    unbroken, steps, _ = pool(2).run(_run, case, tmp_path / "a")[0]
    _, stopped, _ = pool(2).run(_run, case, tmp_path / "b", 1)[0]
    assert stopped < steps
    resumed, _, _ = pool(2).run(_run, case, tmp_path / "b", 0, True)[0]
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


def test_processes_go_on_with_a_simulation_as_if_they_had_begun_it(pool, tmp_path):
    case = _case(SPARSE, 2)
    unbroken, steps, _ = pool(2).run(_run, case)[0]
    pool(1).run(_virtual, case, 2, tmp_path, 1)
    resumed, done, _ = pool(2).run(_run, case, tmp_path, 0, True)[0]
    assert done == steps
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_residuals_become_their_mean_where_the_number_of_workers_changes(
    pool, tmp_path, before, after
):
    first = _case(SPARSE, before)
    pool(before).run(_run, first, tmp_path, 1)
    newest = checkpoints.newest(tmp_path)
    errors = pool(1).run(_errors, newest, before)[0]
    found = pool(after).run(_taken, _case(SPARSE, after), newest)
    for each in found:
        torch.testing.assert_close(each, errors.double().mean(0).float(), rtol=1e-6, atol=0)
    weights, steps, _ = pool(after).run(_run, _case(SPARSE, after), tmp_path, 0, True)[0]
    assert steps == 6
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def _errors(_, folder, n):
    from polyreme.runtime import pieces

    index = checkpoint.read_index(folder)
    reader = pieces.Reader(folder, index)
    rows = []
    for rank in range(n):
        name = f"worker/{rank}/exchange/feedback/error"
        row = torch.empty(index.tensors[name].shape)
        reader.fill(pieces.held(name, row))
        rows.append(row)
    return torch.stack(rows)


def _taken(world, case, folder):
    taken = []

    def load(state):
        progress = checkpoint.load(state, folder, graph=case.job().graph)
        taken.append(state.own()[f"worker/{world.rank}/exchange/feedback/error"].clone())
        return progress

    loop.train(case.job(), world, load=load)
    return taken[0]
