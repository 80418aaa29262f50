"""An algorithm's program gives the same bits in processes and on the virtual clock."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from both_clocks import in_processes, job_of, on_the_clock
from polyreme.algo import compress, feedback, rule, sync, topology
from polyreme.algo.compose import DataParallel
from polyreme.data.order import arrange
from polyreme.errors import ConfigError
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.feed import Feed, Seat
from polyreme.runtime.gradients import Gradients
from polyreme.runtime.making import alone, apply

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


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_processes_and_the_virtual_clock_end_with_the_same_bits_and_bytes(pool, name, precision):
    """Evaluations between steps leave workers as they are."""
    n = 3
    case = job_of(ALGORITHMS[name], n)
    settings = {"eval_every": 2}
    case = dataclasses.replace(case, plan={**case.plan, "precision": precision}, settings=settings)
    virtual, sent = pool(1).run(on_the_clock, case, n)[0]
    real = pool(n).run(in_processes, case)
    weights = real[0][0]
    assert weights.keys() == virtual.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, virtual[key]), key
    assert [wire for _, _, wire in real] == sent


def test_the_general_path_of_plain_training_is_the_native_one_within_rounding(pool):
    case = dataclasses.replace(job_of(PLAIN, 2), plan={"replica": 2, "precision": "fp64"})
    general = pool(2).run(in_processes, case)[0][0]
    native = pool(2).run(in_processes, dataclasses.replace(case, general=False))[0][0]
    for key, tensor in native.items():
        torch.testing.assert_close(general[key], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sparse", "local"])
def test_microbatches_of_a_worker_are_exchanged_once_a_step(pool, name):
    """Each worker gives the mean of its microbatches, once."""
    found = []
    for n_microbatches in (1, 2):
        case = job_of(ALGORITHMS[name], 2, global_batch=8)
        plan = {"replica": 2, "precision": "fp64", "microbatches": n_microbatches}
        model = dataclasses.replace(case.model, batch_norm=False)
        case = dataclasses.replace(case, model=model, plan=plan)
        found.append(pool(2).run(in_processes, case)[0])
    (whole, _, sent), (halves, _, as_many) = found
    assert sent == as_many
    for key, tensor in whole.items():
        torch.testing.assert_close(halves[key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resuming_an_algorithm_is_bitwise_the_unbroken_run(pool, tmp_path, name):
    case = job_of(ALGORITHMS[name], 2)
    case = dataclasses.replace(case, settings={"checkpoint_every": 2, "eval_every": 2})
    unbroken, steps, _ = pool(2).run(in_processes, case, tmp_path / "a")[0]
    _, stopped, _ = pool(2).run(in_processes, case, tmp_path / "b", 1)[0]
    assert stopped < steps
    resumed, _, _ = pool(2).run(in_processes, case, tmp_path / "b", 0, True)[0]
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


def _still_reading(world, case) -> list[str]:
    on_the_clock(world, case, 1)
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_nothing_is_read_ahead_after_the_last_step(pool):
    """A thread that reads on while the process ends can end it with an abort."""
    assert pool(1).run(_still_reading, job_of(PLAIN, 1)) == [[]]


def test_processes_go_on_with_a_simulation_as_if_they_had_begun_it(pool, tmp_path):
    case = job_of(SPARSE, 2)
    unbroken, steps, _ = pool(2).run(in_processes, case)[0]
    pool(1).run(on_the_clock, case, 2, tmp_path, 1)
    resumed, done, _ = pool(2).run(in_processes, case, tmp_path, 0, True)[0]
    assert done == steps
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_residuals_become_their_mean_where_the_number_of_workers_changes(
    pool, tmp_path, before, after
):
    first = job_of(SPARSE, before)
    pool(before).run(in_processes, first, tmp_path, 1)
    newest = checkpoints.newest(tmp_path)
    errors = pool(1).run(_errors, newest, before)[0]
    found = pool(after).run(_taken, job_of(SPARSE, after), newest)
    for each in found:
        torch.testing.assert_close(each, errors.double().mean(0).float(), rtol=1e-6, atol=0)
    weights, steps, _ = pool(after).run(in_processes, job_of(SPARSE, after), tmp_path, 0, True)[0]
    assert steps == 6
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_workers_begin_with_the_statistics_of_a_checkpoint_that_has_none_of_workers(pool, tmp_path):
    """They kept those of the model as it was made."""
    plain = DataParallel(rule=rule.SGD(lr=0.2))
    native = dataclasses.replace(job_of(plain, 2), general=False)
    pool(2).run(in_processes, native, tmp_path, 1)
    newest = checkpoints.newest(tmp_path)
    for own, shared in pool(2).run(_statistics, job_of(plain, 2), newest):
        assert all(torch.equal(mine, each) for mine, each in zip(own, shared, strict=True))
        assert any(each.abs().sum() > 0 for each in shared)


def _statistics(world, case, folder):
    found = []

    def load(state):
        progress = checkpoint.load(state, folder, graph=case.job().graph)
        start = f"worker/{world.rank}/buffers/"
        own = [each.clone() for name, each in state.own().items() if name.startswith(start)]
        shared = [each.clone() for name, each in state.tensors().items() if "buffer/" in name]
        found.append((own, shared))
        return progress

    loop.train(case.job(), world, load=load)
    return found[0]


@pytest.mark.parametrize("n", [2, 3])
def test_states_of_another_algorithm_are_refused_however_many_workers_go_on(pool, tmp_path, n):
    """What was missing or left over was passed over in silence."""
    pool(2).run(in_processes, job_of(PLAIN, 2), tmp_path, 1)
    newest = checkpoints.newest(tmp_path)
    said = pool(n).run(_refused, job_of(LOCAL, n), newest)[0]
    assert "worker/0/exchange/feedback/error is not in it" in said
    said = pool(n).run(_refused, job_of(DataParallel(rule=rule.SGD(lr=0.2)), n), newest)[0]
    assert "worker/0/rule/" in said
    assert "is unknown here" in said


def test_plain_training_and_an_algorithm_do_not_go_on_with_each_other_and_say_so(pool, tmp_path):
    native = dataclasses.replace(job_of(PLAIN, 2), general=False)
    pool(2).run(in_processes, native, tmp_path / "a", 1)
    pool(2).run(in_processes, job_of(PLAIN, 2), tmp_path / "b", 1)
    said = pool(2).run(_refused, job_of(PLAIN, 2), checkpoints.newest(tmp_path / "a"))[0]
    assert "it is of plain training, and this run is of an algorithm's workers" in said
    said = pool(2).run(_refused, native, checkpoints.newest(tmp_path / "b"))[0]
    assert "it is of an algorithm's 2 workers, and this run is plain training" in said


def _refused(world, case, folder):
    job = case.job()
    with pytest.raises(ConfigError) as caught:
        loop.train(job, world, load=lambda state: checkpoint.load(state, folder, graph=job.graph))
    return str(caught.value)


def _errors(_, folder, n):
    from polyreme.runtime import pieces

    index = checkpoint.read_index(folder)
    reader = pieces.Reader(folder, index)
    rows = []
    for rank in range(n):
        name = f"worker/{rank}/exchange/feedback/error"
        row = torch.empty(index.tensors[name].shape)
        reader.fill(pieces.whole(name, row))
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


def _one_by_one_and_together(world, case, apart: float, poisoned: bool):
    """Gradients, losses and buffers of three workers, computed alone and in one pass.

    Their parameters are `apart`: equal ones enter the pass once.
    """
    job = case.job()
    order = arrange(job.source, None, n_workers=3, global_batch=6, seed=0, tail="drop")
    applied = apply(job.graph, alone(job.plan), world)
    applied.stage.train()
    found, start = [], None
    begun = [slot.tensor.clone() for slot in applied.buffers]
    for maps in (False, True):
        feeds = {
            rank: Feed(
                source=job.source,
                order=order,
                graph=job.graph,
                seat=Seat(worker=rank, n_workers=3),
                device=world.device,
                n_microbatches=1,
            )
            for rank in range(3)
        }
        gradients = Gradients(applied, feeds, seed=0)
        gradients.maps = maps
        gradients.buffers = {rank: [each.clone() for each in begun] for rank in range(3)}
        start = gradients.start() if start is None else start
        asked = [(rank, start + apart * rank, 0) for rank in range(3)]
        if poisoned:
            asked[1] = (1, start * torch.nan, 0)
        found.append((gradients.together(asked), gradients.buffers, set(gradients.bad)))
    return found


@pytest.mark.parametrize(("apart", "poisoned"), [(0.01, False), (0.0, False), (0.01, True)])
def test_workers_computed_in_one_pass_get_what_they_get_alone(pool, apart, poisoned):
    case = dataclasses.replace(job_of(PLAIN, 3), plan={"replica": 3, "precision": "fp64"})
    (alone_, buffers, bad), (mapped, others, bad_too) = pool(1).run(
        _one_by_one_and_together, case, apart, poisoned
    )[0]
    assert bad == bad_too == ({1} if poisoned else set())
    for one, other in zip(alone_, mapped, strict=True):
        near = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
        torch.testing.assert_close(other.gradient, one.gradient, **near)
        assert other.numbers[1:] == one.numbers[1:]
        assert other.loss == pytest.approx(one.loss, rel=1e-12, nan_ok=True)
    for rank, mine in buffers.items():
        for one, other in zip(mine, others[rank], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
