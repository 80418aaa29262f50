"""Every rule on the native path: over whole, sharded and mixed masters as in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch

from beside import beside
from polyreme.algo.optimizer import RuleOptimizer
from polyreme.algo.rule import (
    LAMB,
    LARS,
    SGD,
    SNGD,
    SNGM,
    Adam,
    AdamW,
    Lion,
    ProximalSGD,
    Rule,
    SignSGD,
    Signum,
    TruncatedGradient,
)
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.saver import Saver
from polyreme.runtime.state import materialise
from tiny import Case, Model, reference

torch.set_num_threads(1)

RULES = {
    "SGD": SGD(lr=0.2, momentum=0.9, weight_decay=0.01),
    "SGD, decoupled": SGD(lr=0.2, momentum=0.5, nesterov=True, weight_decay=0.01, decoupled=True),
    "Adam": Adam(lr=0.05, weight_decay=0.01),
    "AdamW": AdamW(lr=0.05),
    "LARS": LARS(lr=5.0, weight_decay=0.01),
    "LAMB": LAMB(lr=0.05, weight_decay=0.01),
    "SNGD": SNGD(lr=0.3, weight_decay=0.01),
    "SNGM": SNGM(lr=0.3, weight_decay=0.01),
    "SignSGD": SignSGD(lr=0.01, weight_decay=0.01),
    "Signum": Signum(lr=0.01, weight_decay=0.01),
    "Lion": Lion(lr=0.01, weight_decay=0.01),
    "ProximalSGD": ProximalSGD(lr=0.2, l1=0.01, weight_decay=0.01),
    "TruncatedGradient": TruncatedGradient(lr=0.2, gravity=0.01, period=2, threshold=0.5),
}
MODEL = Model(gain=True, frozen=True, branch="never")  # its gain stays whole, its branch unused
MIXED = {"embed": "none", "block.0": "params", "block.1": "optimizer", "head": "grads"}


@dataclass(frozen=True)
class Mixed(Case):
    """Layers may have levels of their own."""

    levels: dict = field(default_factory=dict)

    def job(self):
        job = super().job()
        layers = {
            name: msgspec.structs.replace(each, level=self.levels.get(name, each.level))
            for name, each in job.plan.layer_plans.items()
        }
        made = msgspec.structs.replace(job.plan, layer_plans=layers)
        return dataclasses.replace(job, plan=made)


ASKING = ("LARS", "LAMB", "SNGM")  # for sums; other rules see no layout
LAYOUTS = {
    "whole": (2, {"replica": 2}, {}),
    "optimizer": (2, {"shard": 2, "level": "optimizer"}, {}),
    "grads": (2, {"shard": 2, "level": "grads"}, {}),
    "params": (2, {"shard": 2, "level": "params"}, {}),
    "mixed": (2, {"shard": 2, "level": "params"}, MIXED),
    "both axes, mixed": (4, {"replica": 2, "shard": 2, "level": "grads"}, {"block.0": "none"}),
    "empty parts": (4, {"shard": 4, "level": "optimizer"}, {}),  # of biases with 6 entries
}
ALONE = (1, {}, {})


def _cases(layout, names=RULES, **settings):
    n, how, levels = layout
    made = [
        Mixed(MODEL, how, rule=RULES[name], levels=levels, clip_norm=0.8, **settings)
        for name in names
    ]
    return n, made


def _close(found, case):
    expected, _, _ = reference(case)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float(torch.linalg.vector_norm(found[name] - tensor))
        assert error <= 1e-9 * float(torch.linalg.vector_norm(tensor)), (case.rule, name)


def _train(world, cases):
    return [dict(full_parameters(loop.train(case.job(), world).state)) for case in cases]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slice(3)
def test_any_rule_moves_parameters_in_any_layout_as_in_one_process(pool, name):
    n, cases = _cases(LAYOUTS[name], RULES if name in ("mixed", "params") else ASKING)
    start, _, _ = reference(dataclasses.replace(cases[0], steps=0))
    for case, found in zip(cases, pool(n).run(_train, cases)[0], strict=True):
        _close(found, case)
        same = {each for each, tensor in found.items() if torch.equal(tensor, start[each])}
        unused = {f"block.1.branch.{each}" for each in ("weight", "bias")}
        assert same == unused | {f"block.0.up.{each}" for each in ("weight", "bias")}


def test_every_rule_is_among_them():
    assert {type(rule) for rule in RULES.values()} == set(get_args(Rule))


STEPS, STOP = 4, 2
STATEFUL = ("Adam", "LARS", "LAMB", "SNGM", "Lion")


def _part(world, cases, home: Path, until: int, resume: bool):
    """Weights after `until` steps of each case, each with a run folder of its own."""
    found = []
    for number, case in enumerate(cases):
        run, job = home / str(number), case.job()
        newest = checkpoints.newest(run) if resume else None
        asked = [STOP if resume else 0]

        def stop(asked=asked) -> bool:
            asked[0] += 1
            return asked[0] == until

        def load(state, newest=newest, job=job):
            return checkpoint.load(state, newest, graph=job.graph)

        saver = Saver(run, job.graph, world, keep=1)
        outcome = loop.train(job, world, stop=stop, save=saver, load=load if resume else None)
        assert outcome.steps == until
        found.append(dict(full_parameters(outcome.state)))
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [("mixed", None), (None, "params"), ("both axes, mixed", "whole"), ("whole", "mixed")],
)
@pytest.mark.slice("None-params")
def test_a_checkpoint_of_any_rule_is_resumed_in_another_layout(pool, tmp_path, before, after):
    n, cases = _cases(LAYOUTS[before] if before else ALONE, STATEFUL, steps=STEPS)
    pool(n).run(_part, cases, tmp_path, STOP, False)
    n, cases = _cases(LAYOUTS[after] if after else ALONE, STATEFUL, steps=STEPS)
    resumed = pool(n).run(_part, cases, tmp_path, STEPS, True)[0]
    for case, found in zip(cases, resumed, strict=True):
        _close(found, case)


def _beside(world, cases):
    return [beside(world, case) for case in cases]


def test_other_rules_are_verified_at_every_level(pool):
    layouts = [{"replica": 2}, *({"shard": 2, "level": level} for level in MIXED.values())]
    cases = [
        Case(MODEL, {**layout, "precision": precision}, rule=RULES[name], clip_norm=0.8)
        for layout in layouts
        for name in ("SNGM", "LAMB")
        for precision in (("fp64", "fp32") if layout == layouts[-1] else ("fp64",))
    ]
    for case, verdict in zip(cases, pool(2).run(_beside, cases)[0], strict=True):
        assert verdict.first is None, (case, verdict.first)
        assert verdict.steps == 3
        assert verdict.max_parameter_error < (1e-9 if case.plan["precision"] == "fp64" else 1e-4)


# In this process

SHAPES = [(3, 4), (4,), (), (0, 2), (1,)]


def _parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in SHAPES
    ]


def _steps(optimizer, parameters, n=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each)
        optimizer.step()


def _state_bytes(optimizer):
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    assert all(torch.is_tensor(entry) for entry in entries), "a checkpoint holds tensors alone"
    return sum(entry.nbytes for entry in entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("played", [False, True], ids=["as it is", "never torch's"])
@pytest.mark.parametrize("name", RULES)
def test_as_much_state_is_kept_as_the_plan_is_told(name, played, dtype):
    rule, parameters = RULES[name], _parameters(dtype)
    optimizer = RuleOptimizer(parameters, rule) if played else rule.optimizer(parameters)
    whole = sum(each.nbytes for each in parameters)
    told = rule.n_states * whole + 4 * rule.n_scalars * len(parameters)
    materialise(optimizer)
    assert _state_bytes(optimizer) == told
    _steps(optimizer, parameters)
    assert _state_bytes(optimizer) == told


@pytest.mark.parametrize("played", [False, True], ids=["as it is", "never torch's"])
@pytest.mark.parametrize("name", RULES)
def test_state_made_at_once_is_zero_moves_nothing_and_changes_no_step(name, played):
    rule, found = RULES[name], []
    for early in (True, False):
        parameters = _parameters()
        optimizer = RuleOptimizer(parameters, rule) if played else rule.optimizer(parameters)
        if early:
            materialise(optimizer)
            assert all(torch.equal(*pair) for pair in zip(parameters, _parameters(), strict=True))
            kept = [entry for state in optimizer.state.values() for entry in state.values()]
            assert len(kept) == (rule.n_states + rule.n_scalars) * len(parameters)
            assert not any(entry.any() for entry in kept)
        _steps(optimizer, parameters)
        found.append(parameters)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_torch_s_own_optimizer_does_what_the_rule_says(name):
    rule, one, other = RULES[name], _parameters(), _parameters()
    native = rule.native(one)
    assert native is not None
    assert type(native) is getattr(torch.optim, name)
    _steps(native, one)
    _steps(RuleOptimizer(other, rule), other)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_a_tensor_that_all_devices_hold_enters_sums_once():
    """Two devices that hold all: the second one's part is nothing, not the same again."""
    given = []

    def sums(partial):
        given.append(partial.clone())
        return partial

    parameters = _parameters()
    rule = SNGM(lr=0.1)
    optimizer = RuleOptimizer(parameters, rule, over_devices=sums, counts_whole=False)
    _steps(optimizer, parameters, n=1)
    assert [float(each) for each in given] == [0.0]


def test_nobody_is_asked_for_sums_where_nothing_has_a_gradient():
    parameters = _parameters()
    RuleOptimizer(parameters, SNGM(), over_devices=lambda _: pytest.fail("asked")).step()


@pytest.mark.parametrize("parameters", [[{"params": []}], None], ids=["none", "no gradient"])
@pytest.mark.parametrize(("name", "asked"), [("SNGM", 1), ("LAMB", 0)])
def test_a_stage_without_gradients_takes_part_in_the_sums_of_others(parameters, name, asked):
    """The others waited for it for ever."""
    given = []

    def sums(partial):
        given.append(float(partial))
        return partial + 4

    optimizer = RuleOptimizer(parameters or _parameters(), RULES[name], over_stages=sums)
    optimizer.step()
    assert given == [0.0] * asked
