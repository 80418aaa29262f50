"""Losses and gradients that are not finite: who is named, what is kept, when a run ends."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from polyreme.algo.train import Train
from polyreme.data.order import Order
from polyreme.errors import RunError
from polyreme.runtime import checkpoints, loop, tensorfile
from polyreme.runtime.saver import Saver
from test_runtime import Record
from test_runtime_oddities import PAIRS, OneLayer, Poisoned, Scale, _scale_graph
from tiny import Case, plan

STEPS, BATCH = 4, 4


class Root(Scale):
    """Its value at 0 is finite, its slope is not."""

    def forward(self, x):
        return (x * self.weight).sqrt()


class RootLayer(OneLayer):
    def build(self, layer):
        with torch.device("meta"):
            return Root()


def _order():
    return Order(n_samples=40, global_batch=BATCH, seed=0, tail="drop")


def _train(world, layout, poisoned, folder=None, max_skipped=20, save=None):
    """The error, or the record of the first rank."""
    graph = _scale_graph(RootLayer())
    job = replace(
        Case().job(),
        graph=graph,
        plan=plan(graph, **layout, global_batch=BATCH),
        source=Poisoned(poisoned, poison=0.0),
        train=Train(
            steps=STEPS,
            global_batch=BATCH,
            max_skipped=max_skipped,
            tail="drop",
            checkpoint_every=None if save is None else 2,
        ),
        folder=folder,
    )
    record = Record()
    try:
        outcome = loop.train(job, world, log=record, save=save)
    except RunError as error:
        return str(error)
    finite = all(torch.isfinite(t).all().item() for t in outcome.state.tensors().values())
    return finite, [(e.reason, e.rank, e.sample_ids) for e in record.events]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_a_gradient_that_is_not_finite_names_its_rank(pool, layout):
    poisoned = [int(_order().local(1, 1, 2)[0])]
    (finite, events), _ = pool(2).run(_train, layout, poisoned)
    assert finite
    named = ("gradient norm is not finite", 1, tuple(_order().batch(1).tolist()))
    assert events == [(None, None, None), named, (None, None, None), (None, None, None)]


def test_a_lone_process_names_itself(pool):
    poisoned = [int(_order().batch(2)[3])]
    [(finite, events)] = pool(1).run(_train, {}, poisoned)
    assert finite
    assert [event[:2] for event in events].index(("gradient norm is not finite", 0)) == 2


def test_the_samples_that_ended_a_run_are_kept(pool, tmp_path):
    poisoned = [int(_order().local(step, 1, 2)[1]) for step in (1, 2)]
    first, second = pool(2).run(_train, {"replica": 2}, poisoned, tmp_path, 1)
    assert first == second
    assert "step 3: 2 steps in a row" in first
    assert "on rank 1; their samples are in" in first
    assert first.endswith(
        "try a lower data_parallel.rule.lr (it is 0.2) or train.clip_norm (it is not set)"
    )
    [path] = (tmp_path / "nonfinite").iterdir()
    assert path.name == "step-3.rank-1.safetensors"
    ids = _order().local(2, 1, 2)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["sample_ids"]) == [ids.tolist()]
        features = file.get_tensor("0.features")
    assert torch.equal(features, Poisoned(poisoned, poison=0.0).train(ids)["features"])


def test_samples_that_find_no_room_are_an_error_on_all_ranks(pool, tmp_path):
    (tmp_path / "nonfinite").write_text("a file is in the way")
    poisoned = [int(_order().local(step, 1, 2)[1]) for step in (1, 2)]
    first, second = pool(2).run(_train, {"replica": 2}, poisoned, tmp_path, 1)
    assert first == second
    assert "on rank 1; their samples could not be kept: " in first
    assert "File exists" in first


def _with_checkpoint(world, poisoned, run):
    """What becomes of a checkpoint that is under way when the run ends as not finite."""
    write, writing, go = tensorfile.write, threading.Event(), threading.Event()

    def slow(path, *args):
        if "rank-" in path.name and world.rank == 0:
            writing.set()
            assert go.wait(30)
        return write(path, *args)

    gather = type(world).gather

    def releasing(self, value):  # steps gather nothing: the run is ending
        if writing.is_set():
            go.set()
        return gather(self, value)

    graph = _scale_graph(RootLayer())
    saver = Saver(run, graph, world, keep=1)
    tensorfile.write, type(world).gather = slow, releasing
    try:
        said = _train(world, {"replica": 2}, poisoned, run, 1, save=saver)
    finally:
        tensorfile.write, type(world).gather = write, gather
    return said, checkpoints.newest(run)


def test_a_checkpoint_under_way_is_completed_before_a_run_ends(pool, tmp_path):
    poisoned = [int(_order().local(step, 1, 2)[1]) for step in (1, 2)]
    for said, newest in pool(2).run(_with_checkpoint, poisoned, tmp_path):
        assert "2 steps in a row" in said
        assert newest is not None
        assert newest.name == "step-2"


def _said(world, poisoned):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        _train(world, {"replica": 2}, poisoned)
    return said.getvalue()


def test_only_the_first_of_skipped_steps_in_a_row_is_said(pool):
    order = _order()
    poisoned = [int(order.local(step, 1, 2)[0]) for step in (0, 1, 3)]
    poisoned.append(int(order.local(3, 0, 2)[0]))
    said = "polyreme: step {} is skipped: gradient norm is not finite on rank {}\n".format
    assert pool(2).run(_said, poisoned) == [said(1, "1") + said(4, "0, 1"), ""]


def test_a_run_without_one_finite_step_does_not_end_as_done(pool, tmp_path):
    first, _ = pool(2).run(_train, {"replica": 2}, list(range(40)), tmp_path)
    assert "every step of the run was skipped" in first
    assert len(list((tmp_path / "nonfinite").iterdir())) == 2
