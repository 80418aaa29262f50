"""Orders in plans: what can be played is accepted, what cannot is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polyreme.plan.check_order import order_violations
from polyreme.plan.ir import Action, LayerPlan, Leaf, Plan, Stage
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import Order, plan_order
from polyreme.plan.play import Costs


def _plan(
    ranks: Sequence[Sequence[Action]], placements: Sequence[Sequence[int]], microbatches: int
) -> Plan:
    """Each rank of the pipeline is one device."""
    return Plan(
        stages=tuple(
            Stage(layers=(f"block.{stage}",), placements=tuple((rank,) for rank in ranks_of))
            for stage, ranks_of in enumerate(placements)
        ),
        layer_plans={f"block.{n}": LayerPlan(split=Leaf(0)) for n in range(len(placements))},
        order=tuple(map(tuple, ranks)),
        microbatches=microbatches,
        global_batch=microbatches,
        seq_len=8,
        precision="fp32",
    )


def _planned(order: Order, p: int, m: int) -> Plan:
    ranks = plan_order(order, p, m, Costs.equal(p * order.chunks))
    return _plan(ranks, order.placements(p), m)


def _actions(text: str) -> tuple[Action, ...]:
    """``0F0 1B2 1U``: stage, kind, microbatch; then ``.slice``, ``:version`` and ``/copy``."""
    found = []
    for word in text.split():
        word, _, copy = word.partition("/")
        word, _, version = word.partition(":")
        word, _, piece = word.partition(".")
        found.append(
            Action(
                stage=int(word[0]), kind=word[1], microbatch=int(word[2:] or 0),
                token_slice=int(piece or 0), weight_version=int(version or 0), copy=int(copy or 0),
            )
        )  # fmt: skip
    return tuple(found)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_accepted(name: str) -> None:
    for p, m in ((2, 4), (4, 8), (6, 12)):
        assert list(order_violations(_planned(ORDERS[name], p, m))) == []


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            ("0F0 0B0 0F1 0B1 0U", "1F0 1F1 1B0 1B1 1U"),
            [
                "order[0], device 0: B0 of stage 0 waits for B0 of stage 1, which device 1 plays",
                "order[1], device 1: F1 of stage 1 waits for F1 of stage 0, which device 0 plays",
            ],
        ),
        (  # three in a circle, and a fourth that waits for it
            (
                "0F0 0I0 0W0 0F1 0B1 0U",
                "1F0 1F1 1I0 1W0 1B1 1U",
                "2F0 2F1 2B0 2B1 2U",
                "3F0 3F1 3B0 3B1 3U",
            ),
            [
                "order[0], device 0: I0 of stage 0 waits for I0 of stage 1, which device 1 plays",
                "order[1], device 1: F1 of stage 1 waits for F1 of stage 0, which device 0 plays",
            ],
        ),
        (  # a rank that waits for itself: its second stage before its first
            ("2F0 0F0 2B0 0B0 0U 2U", "1F0 1B0 1U"),
            [
                "order[0], device 0: F0 of stage 2 waits for F0 of stage 1, which device 1 plays",
                "order[1], device 1: F0 of stage 1 waits for F0 of stage 0, which device 0 plays",
            ],
        ),
    ],
)
def test_a_circle_is_named(ranks: Sequence[str], said: Sequence[str]) -> None:
    order = [_actions(text) for text in ranks]
    n_stages = 1 + max(action.stage for own in order for action in own)
    held = [
        [r for r, own in enumerate(order) if s in {a.stage for a in own}] for s in range(n_stages)
    ]
    m = 1 + max(action.microbatch for own in order for action in own)
    found = [
        f"{fault.path.removeprefix('plan.')}: {fault.value} {fault.rule}"
        for fault in order_violations(_plan(order, held, m))
    ]
    assert len(found) == len(said)
    assert all(text.startswith(wanted) for text, wanted in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    ("ranks", "rule"),
    [
        (("0F0 0B0 0F1/1 0B1/1 0U", "0F1/1 0B1/1 0U/1"), "is a copy that the device does not hold"),
        (("0F0 0B0 0U", "0F0/1 0B0/1 0U/1"), "goes through 2 copies of stage 0"),
        (("0F0 0B0 0U", "0F2/1 0B2/1 0U/1"), "goes through 0 copies of stage 0"),
        (("0F0 0F2 0B0 0B2 0U", "0F1/1 0B1/1 0U/1"), None),
        (("0F0 0B0 0F1 0B1 0F2 0B2 0U", "0U/1"), None),
    ],
)
def test_copies_share_out_the_microbatches(ranks: Sequence[str], rule: str | None) -> None:
    plan = _plan([_actions(text) for text in ranks], [(0, 1)], 3)
    rules = {fault.rule for fault in order_violations(plan)}
    assert rules == set() if rule is None else rule in rules


def test_a_microbatch_keeps_to_its_direction() -> None:
    first = _actions("0F0 0B0 0U 1F0/1 1B0/1 1U/1")
    second = _actions("0U/1 1U")
    faults = list(order_violations(_plan([first, second], [(0, 1), (1, 0)], 1)))
    assert [fault.rule for fault in faults] == [
        "goes through copy 1, and through copy 0 of stage 0"
    ]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0F0.0 0F0.1 0B0.1 0B0.0 0U", None),
        ("0F0.1 0F0.0 0B0.1 0B0.0 0U", "are the slices of F0 in order"),
        ("0F0.0 0F0.1 0B0.0 0B0.1 0U", "are the slices of B0 in order"),
        ("0F0 0B0 0U0:1 0F1:1 0B1:1 0U1:2", None),
        ("0F0 0F1 0B0 0U0:1 0B1 0U1:2", None),
        ("0F0 0F1 0B0 0U0:1 0B1:1 0U1:2", "reads weights 1, not those of its forward pass"),
        ("0F0 0F1:1 0B0 0U0:1 0B1:1 0U1:2", "reads weights 1, which are not made yet"),
        ("0F0 0F1 0B0 0U0:1 0B1 0U1:1", "makes weights 1"),
        ("0F0 0B0 0U0:1 0F1:1 0B1:1", "has no update after it"),
        ("0F0 0U0:1 0B0 0F1:1 0B1:1 0U1:2", "is before its backward pass"),
        ("0F0 0B0 0F1:1 0B1:1 0U", "reads weights 1, which no update of the plan makes"),
    ],
)
def test_slices_and_weight_versions_are_in_order(text: str, rule: str | None) -> None:
    actions = _actions(text)
    plan = _plan([actions], [(0,)], 1 + max(action.microbatch for action in actions))
    rules = {fault.rule for fault in order_violations(plan)}
    assert rules == set() if rule is None else rule in rules
