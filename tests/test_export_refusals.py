"""Plans that another tool cannot express: named, with ways out; and the commands that export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import refusals
from exported import STACK, made
from polyreme.errors import ConfigError
from polyreme.plan import store
from polyreme.plan.export import TOOLS, export
from polyreme.plan.ir import Plan, Search

REFUSED = [  # tool, plan, what is said, what it is instead
    ("megatron", {"sizes": (4, 4), "order": "zb-h1"}, "is no order", {"order": "1f1b"}),
    ("megatron", {"sizes": (4, 4), "order": "gpipe"}, "is no order", {"order": "1f1b"}),
    (
        "megatron",
        {"sizes": (4, 4), "shard": 2, "level": "params"},
        "not for pipelines",
        {"level": "optimizer"},
    ),
    ("megatron", {"names": ("stem", "head")}, "no stack", {"names": STACK}),
    ("megatron", {"precision": "fp64"}, "no precision", {"precision": "bf16"}),
    ("torchtitan", {"shard": 2, "tp": 2, "level": "grads"}, "always split", {"sp": True}),
    (
        "torchtitan",
        {"replica": 2, "tp": 2, "sp": True},
        "goes with no other axis",
        {"replica": 1, "shard": 2, "level": "grads"},
    ),
    ("torchtitan", {"tp": 2, "sp": True}, "needs shards", {"precision": "fp32"}),
    (
        "torchtitan",
        {"sizes": (4, 4), "shard": 2, "level": "params"},
        "not for pipelines",
        {"level": "optimizer"},
    ),
    ("torchtitan", {"shard": 2, "level": "optimizer"}, "whole gradients", {"level": "grads"}),
    (
        "torchtitan",
        {"sizes": (4, 4), "order": "zb-h1", "shard": 2, "level": "optimizer"},
        "is no order",
        {"order": "gpipe"},
    ),
    ("torchtitan", {"names": ("stem", "head")}, "no stack", {"names": STACK}),
    (
        "deepspeed",
        {"replica": 2, "shard": 2, "level": "params"},
        "replicas of shards",
        {"replica": 1, "shard": 4},
    ),
    ("deepspeed", {"tp": 2, "sp": True}, "AutoTP leaves", {"sp": False}),
    ("deepspeed", {"shard": 2, "tp": 2, "level": "params"}, "stages 0 to 2", {"level": "grads"}),
    ("deepspeed", {"sizes": (4, 4), "tp": 2}, "no pipeline", {"tp": 1}),
    (
        "deepspeed",
        {"sizes": (4, 4), "shard": 2, "level": "grads"},
        "stages 0 and 1",
        {"level": "optimizer"},
    ),
    ("deepspeed", {"sizes": (5, 3)}, "deals out", {"sizes": (4, 4)}),
    ("deepspeed", {"sizes": (4, 4), "order": "gpipe"}, "is no order", {"order": "1f1b"}),
    ("deepspeed", {"recompute": ("block.0",)}, "all or none", {"recompute": STACK}),
    ("accelerate", {"sizes": (4, 4)}, "no pipeline", {"sizes": ()}),
    ("accelerate", {"tp": 2, "sp": True}, "does not do", {"sp": False}),
    (
        "accelerate",
        {"replica": 2, "tp": 2},
        "FSDP2 alone",
        {"replica": 1, "shard": 2, "level": "params"},
    ),
    ("accelerate", {"shard": 2, "level": "optimizer"}, "whole gradients", {"level": "params"}),
    ("accelerate", {"recompute": STACK}, "under FSDP2 alone", {"shard": 2, "level": "params"}),
]


@pytest.mark.parametrize(("tool", "how", "said", "instead"), REFUSED)
def test_what_is_refused_is_named_and_the_way_out_leads_out(tool, how, said, instead) -> None:
    """A refusal of another part, or one whose way out is refused too."""
    with pytest.raises(ConfigError) as caught:
        export(made(**how), TOOLS[tool])
    assert any(said in str(each) for each in caught.value.violations), caught.value
    assert all(each.path.startswith("plan.") and each.legal for each in caught.value.violations)
    assert export(made(**{**how, **instead}), TOOLS[tool]).text


def edited(what: str) -> Plan:
    """Plans that only a hand or another order makes."""
    plan = made(sizes=(4, 4), shard=2, level="optimizer")
    replace = msgspec.structs.replace
    whole = made(sizes=(4, 4), tp=2)
    if what == "levels":
        first = replace(plan.layer_plans["block.0"], level="params")
        return replace(plan, layer_plans={**plan.layer_plans, "block.0": first})
    if what == "tokens":
        first = replace(whole.layer_plans["block.0"], sp=True)
        return replace(whole, layer_plans={**whole.layer_plans, "block.0": first})
    if what == "width":
        wide = made(sizes=(4, 4), shard=4, level="optimizer")
        ours = {name: plan.layer_plans[name] for name in plan.stages[0].layers}
        others = {name: wide.layer_plans[name] for name in wide.stages[1].layers}
        return replace(plan, stages=(plan.stages[0], wide.stages[1]), layer_plans=ours | others)
    if what == "unused":
        search = Search(
            solver="exact",
            objective_s=1,
            bound_s=1,
            proved=True,
            search_s=1,
            candidates=1,
            unused_devices=(4,),
        )
        return replace(plan, search=search)
    if what == "batch":
        return replace(plan, global_batch=plan.global_batch + 1)
    if what == "actions":
        swapped = (plan.order[0][1], plan.order[0][0], *plan.order[0][2:])
        return replace(plan, order=(swapped, swapped, *plan.order[2:]))
    if what == "slices":
        return replace(plan, token_slices=(64, 64))
    first = replace(plan.layer_plans["block.0"], offload=frozenset({"optimizer"}))
    return replace(plan, layer_plans={**plan.layer_plans, "block.0": first})


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("levels", "differ by layer"),
        ("tokens", "all or none"),
        ("width", "one width"),
        ("unused", "stay unused"),
        ("batch", "microbatches of one size"),
        ("actions", "other actions"),
        ("slices", "which no tool has"),
        ("offload", "not exported"),
    ],
)
def test_no_tool_takes_what_none_can_express(tool, what, said) -> None:
    """A plan that differs by layer or device, written as if it did not."""
    with pytest.raises(ConfigError, match=said):
        export(edited(what), TOOLS[tool])


SPEC = """
model = { kind = "mlp", hidden = [32] }
data = { kind = "digits" }
parallel = { shard = 4, level = "params", microbatch = 4 }
[train]
steps = 4
global_batch = 64
precision = "bf16"
[data_parallel]
rule = { kind = "AdamW", lr = 1e-3 }
"""


def test_commands_write_the_plan_for_another_tool(tmp_path: Path, monkeypatch: Any) -> None:
    """The same plan by `plan` and, from its file, by `explain`; notes stay off stdout."""
    (tmp_path / "spec.toml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    plan = ("plan", "spec.toml", "--assume", "--cluster", "preset:4xH100")
    assert refusals.command((*plan, "--out", "plan.json")).code == 0
    at_once = refusals.command((*plan, "--export", "deepspeed"))
    assert at_once.code == 0
    assert json.loads(at_once.out)["zero_optimization"]["stage"] == 3
    assert "polyreme: deepspeed: 4 processes" in at_once.err
    later = ("explain", "plan.json", "--export", "deepspeed")
    assert refusals.command((*later, "--out", "ds.json")).code == 0
    assert Path("ds.json").read_text() == at_once.out
    said = json.loads(refusals.command((*later, "--json")).out)
    assert said["text"] == at_once.out
    assert "4 shards (params)" in refusals.command(("explain", "plan.json")).out


def test_an_unknown_tool_and_a_refusal_end_like_other_faults(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusals.command(("plan", "absent.toml", "--export", "megatrom", "--json"))
    assert not refusals.complaints(said, ["--export"])
    store.save(edited("unused"), tmp_path / "plan.json")
    said = refusals.command(("explain", "plan.json", "--export", "megatron", "--json"))
    assert not refusals.complaints(said, ["plan.search.unused_devices"])
