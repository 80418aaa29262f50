"""Every model family under every level on 1 to 3 processes is what one plain process computes."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import msgspec
import pytest

from beside import Family, beside
from polyreme.algo.rule import SGD, AdamW
from polyreme.graph.options import MLP, CharLSTM, Python, ResNet20
from polyreme.sample import SampleSpec, TensorSpec
from test_graph_huggingface import CASES as LIBRARY
from test_graph_huggingface import IMAGE, TEXT
from tiny import Case, Model

FEATURES = SampleSpec(
    fields={"features": TensorSpec((6,), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=3,
)
FAMILIES = {
    **LIBRARY,
    "resnet": (ResNet20(width=4, blocks=1), IMAGE),
    "resnet, group norm": (ResNet20(width=4, blocks=2, norm="group"), IMAGE),
    "lstm": (CharLSTM(embed=3, hidden=5, layers=2, dropout=0.5), TEXT),
    "mlp": (MLP(hidden=(8, 7)), FEATURES),
    "linear": (MLP(hidden=(), bias=False), FEATURES),
    "mlp on images": (MLP(hidden=(8,)), IMAGE),
}
LAYOUTS = [
    {"microbatches": 2},
    {"replica": 2},
    {"shard": 2, "level": "optimizer"},
    {"shard": 2, "level": "grads", "microbatches": 2},
    {"shard": 2, "level": "params", "recompute": True},
    {"shard": 3, "level": "params"},
    {"replica": 3, "microbatches": 2},
    {"shard": 2, "level": "none"},
]
TURNS = dict(zip(FAMILIES, itertools.cycle(LAYOUTS), strict=False))


def _processes(layout):
    return layout.get("replica", 1) * layout.get("shard", 1)


def _verified(pool, case, n_steps=3):
    verdicts = pool(_processes(case.plan)).run(beside, case, None, n_steps, timeout_s=120)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


def _dropping(options):
    """The same options with every rate of dropout set that there is."""
    rates = {
        "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        "phi": ("attention_dropout", "embd_pdrop", "resid_pdrop"),
        "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
        "t5": ("dropout_rate",),
        "vit": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
        "swin": ("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"),
    }.get(options.model_type, ("attention_dropout",))
    config = {**options.config, **dict.fromkeys(rates, 0.5)}
    return msgspec.structs.replace(options, config=config)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slice("llama tied", "gpt2", "bert sentence", "t5", "vit", "mlp on images")
def test_a_family_is_computed_as_its_plain_model(pool, name):
    options, sample = FAMILIES[name]
    if name in LIBRARY:
        options = _dropping(options)
    case = Family(options=options, sample=sample, plan=TURNS[name], rule=AdamW(lr=1e-3))
    found = _verified(pool, case)
    assert found.first is None, found.first
    assert found.steps == 3
    assert found.max_grad_error < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_under_every_layout(pool, name, layout):
    options, sample = FAMILIES[name]
    for precision in ("fp64", "fp32"):
        how = {**layout, "precision": precision}
        case = Family(options=options, sample=sample, plan=how, rule=AdamW(lr=1e-3))
        found = _verified(pool, case)
        assert found.first is None, (precision, found.first)


@pytest.mark.parametrize(
    "layout",
    [
        {"replica": 2, "shard": 2, "level": "grads", "microbatches": 2},
        {"replica": 2, "shard": 2, "level": "params"},
        {"shard": 3, "level": "optimizer", "microbatches": 3},
        {"replica": 3},
    ],
    ids=str,
)
@pytest.mark.slice(1)
def test_a_short_tail_leaves_some_ranks_without_samples(pool, layout):
    model = Model(tied=True, gain=True, frozen=True, branch="positive")
    case = Case(model=model, plan=layout, tail="short", n_train=14, clip_norm=0.1)
    found = _verified(pool, case)  # batches of 6, 6 and 2
    assert found.first is None, found.first
    assert found.steps == 3


def test_float32_is_held_to_its_own_tolerance(pool):
    case = Case(plan={"shard": 3, "level": "grads", "precision": "fp32"}, clip_norm=0.5)
    found = _verified(pool, case)
    assert found.first is None, found.first
    assert 1e-12 < found.max_grad_error < 1e-4


def test_the_reference_imports_nothing_of_the_runtime():
    code = (
        "import sys; import polyreme.reference.loop, polyreme.reference.model; "
        "print(*[name for name in sys.modules if name.startswith('polyreme.')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    rooms = {name.split(".")[1] for name in loaded.stdout.split()}
    assert {"reference", "graph", "data"} <= rooms
    assert rooms.isdisjoint({"runtime", "plan", "api", "measure"})


def test_a_user_s_module_is_run_whole(pool, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    options = Python(factory=f"{file}:make")
    case = Family(options=options, sample=FEATURES, plan={"shard": 2, "level": "grads"})
    found = _verified(pool, case)
    assert found.first is None, found.first


def test_float32_runs_that_part_by_rounding_are_not_taken_for_a_fault(pool):
    layout = {"replica": 3, "precision": "fp32"}
    case = Family(options=ResNet20(width=4, blocks=2), sample=IMAGE, plan=layout, rule=SGD(lr=0.5))
    found = _verified(pool, dataclasses.replace(case, steps=8), n_steps=8)
    assert found.first is None, found.first
    assert found.max_grad_error < 1e-5
