"""Random legal plans compute what one process computes, and go on from each other."""

from __future__ import annotations

import pytest
from safetensors import deserialize

from beside import beside
from drawn import draw, graph_of
from polyreme.algo.rule import AdamW
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.driver import Driver
from polyreme.runtime.making import apply
from polyreme.runtime.saver import Saver
from polyreme.runtime.state import State
from polyreme.runtime.weights import import_weights
from polyreme.runtime.weights_export import export_weights
from polyreme.runtime.weights_names import named
from test_weights import contents, saved
from tiny import plan, save

N_PLANS, N_PAIRS, N_ROUND_TRIPS = 120, 30, 18
BATCH = 8


@pytest.mark.slice("39", "53", "63", "77")  # of few processes
@pytest.mark.parametrize("seed", range(N_PLANS))
def test_a_random_plan_computes_what_one_process_does(pool, seed):
    drawn = draw(seed)
    verdicts = pool(drawn.n_processes).run(
        beside, drawn.case(clip_norm=0.5), None, 2, timeout_s=120
    )
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0].first is None, (drawn, verdicts[0].first)
    assert verdicts[0].steps == 2


def _losses(world, case, run, until, resume=False):
    """Losses of the steps up to `until`; a checkpoint is left at the end."""
    job, losses = case.job(), []
    newest = checkpoints.newest(run) if resume else None
    asked = [checkpoint.read_meta(newest).progress.step if newest else 0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == until

    loop.train(
        job,
        world,
        stop=stop,
        save=Saver(run, job.graph, world, keep=1),
        load=(lambda state: checkpoint.load(state, newest, graph=job.graph)) if newest else None,
        progress=lambda loss, **_: losses.append(loss),
    )
    return losses


@pytest.mark.slice("19")
@pytest.mark.parametrize("seed", range(N_PAIRS))
def test_a_checkpoint_of_any_plan_goes_on_under_any_other(pool, tmp_path, seed):
    before = draw(1000 + seed, global_batch=BATCH)
    after = draw(2000 + seed, family=before.family, global_batch=BATCH)
    more = {"steps": 4, "rule": AdamW(lr=0.01), "clip_norm": 0.5, "plan": {"precision": "fp32"}}
    case = before.case(**more)
    unbroken = pool(before.n_processes).run(_losses, case, tmp_path / "a", 4)[0]
    pool(before.n_processes).run(_losses, case, tmp_path / "b", 2)
    other = after.case(**more)
    found = pool(after.n_processes).run(_losses, other, tmp_path / "b", 4, True)[0]
    assert found == pytest.approx(unbroken[2:], rel=1e-5), (before, after)


def _through(world, drawn, run, to):
    """Weights of a run laid out by the plan, and written again from there."""
    graph = graph_of(drawn.family)
    laid = plan(graph, **{**drawn.plan, "precision": "fp32"})
    applied = apply(graph, laid, world, seed=3)
    state = State(applied, Driver(applied, world, AdamW()).optimizers, world)
    state.restored(checkpoint.load(state, checkpoints.newest(run), graph=graph))
    save(state, to, graph=graph, keep=1)


@pytest.mark.slice("16")
@pytest.mark.parametrize("seed", range(N_ROUND_TRIPS))
def test_hugging_faces_weights_come_back_from_any_plan_as_they_were(pool, tmp_path, seed):
    drawn = draw(3000 + seed)
    graph = graph_of(drawn.family)
    saved(drawn.family, tmp_path / "source")
    import_weights(graph, tmp_path / "source", tmp_path / "run")
    pool(drawn.n_processes).run(_through, drawn, tmp_path / "run", tmp_path / "laid")
    export_weights(graph, tmp_path / "laid", tmp_path / "back")
    before, back = (_tensors(tmp_path / name, graph) for name in ("source", "back"))
    assert before == back, drawn


def _tensors(folder, graph) -> dict[str, tuple]:
    """Form and bytes of each tensor by its name in a checkpoint: the library renames keys."""
    found = dict(deserialize(contents(folder)["model.safetensors"]))
    names = named(list(found), graph)
    return {names[k]: (t["dtype"], t["shape"], bytes(t["data"])) for k, t in found.items()}
