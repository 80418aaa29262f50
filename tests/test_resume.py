"""A run that stops and resumes is the run that never stopped; its weights come out whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.schedule import Cosine
from polyreme.errors import ConfigError, RunError
from polyreme.runtime import checkpoint, checkpoints, final, loop, tensorfile
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.saver import Saver
from test_runtime_oddities import Poisoned, _scale_graph
from tiny import MOMENTUM, Case, Model, plan

STEPS, STOP = 5, 2


def _run(world, case: Case, run: Path, until: int = STEPS, resume: bool = False):
    """Weights after `until` of STEPS steps; a stopped run leaves a checkpoint."""
    job = dataclasses.replace(case, steps=STEPS).job()
    newest = checkpoints.newest(run) if resume else None
    asked = [checkpoint.read_meta(newest).progress.step if newest else 0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == until

    outcome = loop.train(
        job,
        world,
        stop=stop,
        save=Saver(run, job.graph, world, keep=2),
        load=(lambda state: checkpoint.load(state, newest, graph=job.graph)) if newest else None,
    )
    assert outcome.steps == until
    return dict(full_parameters(outcome.state)), outcome.final_loss


@pytest.mark.parametrize("rule", [MOMENTUM, AdamW(lr=0.05)])
@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (1, {}),
        (2, {"replica": 2, "precision": "bf16"}),
        (2, {"shard": 2, "level": "params", "precision": "fp32"}),
    ],
)
def test_resuming_is_bitwise_the_unbroken_run(pool, tmp_path, rule, n, layout):
    schedule = {"schedule": Cosine(warmup=1)}
    case = Case(Model(tied=True, gain=True), layout, rule=rule, settings=schedule)
    unbroken, unbroken_loss = pool(n).run(_run, case, tmp_path / "a")[0]
    pool(n).run(_run, case, tmp_path / "b", STOP)
    resumed, resumed_loss = pool(n).run(_run, case, tmp_path / "b", STEPS, True)[0]
    assert resumed_loss == unbroken_loss
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, {"replica": 2, "shard": 2, "level": "grads"}), (1, {})),
        ((2, {"replica": 2}), (3, {"shard": 3, "level": "params"})),
        ((4, {"replica": 4}), (2, {"replica": 2})),
        ((4, {"shard": 4, "level": "optimizer"}), (3, {"replica": 3})),
        ((1, {}), (4, {"replica": 2, "shard": 2, "level": "params"})),
    ],
)
@pytest.mark.slice(1)
def test_another_layout_goes_on_with_the_same_run(pool, tmp_path, before, after):
    model = Model(tied=True, gain=True, frozen=True)
    first, second = (Case(model, layout, rule=AdamW(lr=0.05)) for _, layout in (before, after))
    unbroken, loss = pool(1).run(_run, Case(model, rule=AdamW(lr=0.05)), tmp_path / "a")[0]
    pool(before[0]).run(_run, first, tmp_path / "b", STOP)
    _, next_loss = pool(1).run(_run, Case(model, rule=AdamW(lr=0.05)), tmp_path / "c", STOP + 1)[0]
    shutil.copytree(tmp_path / "b", tmp_path / "d")
    _, found = pool(after[0]).run(_run, second, tmp_path / "d", STOP + 1, True)[0]
    assert found == pytest.approx(next_loss, rel=1e-12)
    resumed, found = pool(after[0]).run(_run, second, tmp_path / "b", STEPS, True)[0]
    assert found == pytest.approx(loss, rel=1e-9)
    for name, tensor in unbroken.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-9, atol=1e-12)


def test_another_rule_is_refused_by_the_state_it_lacks(pool, tmp_path):
    pool(1).run(_run, Case(rule=SGD(lr=0.1)), tmp_path, STOP)
    (failure,) = pool(1).outcomes(_run, Case(rule=AdamW()), tmp_path, STEPS, True)
    assert isinstance(failure.error, ConfigError)
    assert "optimizer/embed.weight/exp_avg is not in it" in str(failure.error)


def _skipping(world, run: Path, until: int | None):
    """What ends a run whose samples are all not finite, or how far it came."""
    case = Case(steps=8, global_batch=4, settings={"max_skipped": 3})
    job = dataclasses.replace(case.job(), source=Poisoned(list(range(40))), graph=_scale_graph())
    job = dataclasses.replace(job, plan=plan(job.graph, global_batch=4))
    newest, asked = checkpoints.newest(run), [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == until

    try:
        loop.train(
            job,
            world,
            stop=stop,
            save=Saver(run, job.graph, world, keep=2),
            load=(lambda state: checkpoint.load(state, newest, graph=job.graph))
            if newest
            else None,
        )
    except RunError as error:
        return str(error)
    return checkpoint.read_meta(checkpoints.newest(run)).progress


def test_steps_skipped_in_a_row_are_counted_across_a_break(pool, tmp_path):
    """The fourth is one too many, though the run was broken off after the second."""
    (progress,) = pool(1).run(_skipping, tmp_path, 2)
    assert (progress.step, progress.skipped_in_row) == (2, 2)
    (said,) = pool(1).run(_skipping, tmp_path, None)
    assert said.startswith("step 4: 4 steps in a row were skipped")


def _final(world, case: Case, run: Path, limit_bytes: int | None = final.LIMIT_BYTES):
    job = case.job()
    outcome = loop.train(job, world)
    path = final.save_final(outcome.state, run, graph=job.graph, limit_bytes=limit_bytes)
    return path, dict(full_parameters(outcome.state))


@pytest.mark.parametrize(
    ("n", "layout"), [(1, {}), (2, {"shard": 2, "level": "params", "precision": "bf16"})]
)
def test_the_final_file_holds_the_whole_model_once(pool, tmp_path, n, layout):
    case = Case(Model(tied=True, gain=True, batch_norm=True), layout, steps=1)
    (path, weights), *others = pool(n).run(_final, case, tmp_path)
    assert [other[0] for other in others] == [path] * (n - 1)
    found = load_file(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert found["embed.weight"].dtype == (torch.float32 if layout else torch.float64)
    assert "block.0.norm.num_batches_tracked" in found
    assert "head.weight" not in found
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["tied"]) == {"embed.weight": ["head"]}
    assert [file.name for file in tmp_path.iterdir()] == ["final.safetensors"]


def test_a_final_file_above_the_limit_is_left_out(pool, tmp_path):
    path, weights = pool(1).run(_final, Case(steps=1), tmp_path, 100)[0]
    assert path is None
    assert not list(tmp_path.iterdir())
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert pool(1).run(_final, Case(steps=1), tmp_path, n_bytes)[0][0] is not None


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    like = {name: tensorfile.entry(tensor) for name, tensor in tensors.items()}
    total = tensorfile.write(
        path, like, map(tensorfile.content, tensors.values()), {"format": "pt"}
    )
    assert total == tensorfile.checksum(path)


def test_every_dtype_and_shape_survives_the_file(tmp_path):
    dtypes = list(tensorfile.NAMES)
    tensors = {str(dtype): torch.tensor([[0, 1, 1]]).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "turned": torch.eye(3).T}
    path = tmp_path / "x.safetensors"
    _write(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_transformers_reads_the_final_file(tmp_path):
    """Names are those of the library, so its own loader takes the file as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    owned = dict(model.named_parameters())  # ties once
    config.save_pretrained(tmp_path)
    _write(tmp_path / "model.safetensors", owned)
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)
