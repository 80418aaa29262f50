"""Whether a plan's order can be played: complete, in order on each device, free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice

from ..errors import Violation
from .ir import Action, Plan

_MOST = 8  # microbatches of a device that are named where all of them are missing
_Key = tuple[str, int, int, int]  # kind, stage, microbatch, token slice


def order_violations(plan: Plan) -> Iterator[Violation]:
    """What is wrong with the order of a plan whose stages and placements are sound."""
    stages_of: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for device in sorted({device for row in stage.placements for device in row}):
            stages_of.setdefault(device, []).append(index)
    used = sorted(stages_of)
    if len(plan.order) != len(used):
        rule = f"has actions for {len(plan.order)} devices, not {len(used)}"
        yield _wrong("order", len(plan.order), rule, f"{len(used)} entries, in device order")
        return
    seen: set[tuple[int, tuple[int, ...]]] = set()
    shared = {index for index, stage in enumerate(plan.stages) if len(stage.placements) > 1}
    complete = True
    for index, (device, actions) in enumerate(zip(used, plan.order, strict=True)):
        key = (id(actions), tuple(stages_of[device]))
        if key in seen:
            continue
        seen.add(key)
        for violation in _device_violations(
            index, actions, stages_of[device], shared, plan.microbatches
        ):
            complete = False
            yield violation
    if complete and len(plan.stages) > 1:
        yield from _deadlock(plan, dict(zip(used, plan.order, strict=True)))


def _device_violations(
    index: int,
    actions: Sequence[Action],
    stages: Sequence[int],
    shared: Container[int],
    microbatches: int,
) -> Iterator[Violation]:
    """Each microbatch forward, then backward (or its two halves), once a stage; then one update.

    Of `shared` stages, which have two placements, a device plays some microbatches only.
    """
    path = f"order[{index}]"
    for stage in sorted({action.stage for action in actions} - set(stages)):
        yield _wrong(path, stage, "is a stage that the device does not hold", f"{list(stages)}")
    for stage in stages:
        where = f"{path}, stage {stage}"
        own = [action for action in actions if action.stage == stage]
        place = {_key(action): number for number, action in enumerate(own)}
        for key, count in Counter(_key(action) for action in own).items():
            if count > 1:
                yield _wrong(where, _show(key), f"stands {count} times", "once")
        forward = {key[2] for key in place if key[0] == "F"}
        legal = "0" if microbatches <= 1 else f"0 (or any integer >= 0 and <= {microbatches - 1})"
        missing = (each for each in range(microbatches) if each not in forward)
        for microbatch in () if stage in shared else islice(missing, _MOST):
            yield _wrong(where, f"microbatch {microbatch}", "has no forward pass", "F, then B")
        for microbatch in sorted(each for each in forward if not 0 <= each < microbatches):
            rule = "is no microbatch of the plan"
            yield _wrong(where, f"microbatch {microbatch}", rule, legal)
        for key in [key for key in place if key[0] == "F"]:
            yield from _backward_violations(where, place, key)
        for key in [key for key in place if key[0] in "BIW" and ("F", *key[1:]) not in place]:
            yield _wrong(where, _show(key), "has no forward pass before it", "F first")
        updates = [number for key, number in place.items() if key[0] == "U"]
        if updates != [len(own) - 1]:
            rule = "must be the last action of the stage, once"
            yield _wrong(where, f"{len(updates)} updates", rule, "one U, at the end")


def _backward_violations(
    where: str, place: Mapping[_Key, int], forward: _Key
) -> Iterator[Violation]:
    whole, inputs, weights = (place.get((kind, *forward[1:])) for kind in "BIW")
    if whole is None and (inputs is None or weights is None):
        rule = "has no whole backward pass after it"
        yield _wrong(where, _show(forward), rule, "B, or I and W")
        return
    if whole is not None and (inputs is not None or weights is not None):
        yield _wrong(where, _show(forward), "has B and halves of it", "B, or I and W")
        return
    first = whole if whole is not None else inputs
    assert first is not None
    if first < place[forward]:
        yield _wrong(where, _show(forward), "comes after its backward pass", "F first")
    if weights is not None and inputs is not None and weights < inputs:
        yield _wrong(where, _show(forward), "has its W before its I", "F, I, W")


def _deadlock(plan: Plan, order: Mapping[int, Sequence[Action]]) -> Iterator[Violation]:
    """Play all devices until none can go on."""
    last = len(plan.stages) - 1
    position = dict.fromkeys(order, 0)
    holders = Counter(
        stage for stage, each in enumerate(plan.stages) for row in each.placements for _ in row
    )
    rows = [len(stage.placements) for stage in plan.stages]
    done: Counter[_Key] = Counter()

    def ready(action: Action) -> bool:
        kind, stage, *which = _key(action)
        if kind == "F" and stage > 0:
            return _all_done("F", stage - 1, which)
        if kind in ("B", "I") and stage < last:
            return _all_done("B", stage + 1, which) or _all_done("I", stage + 1, which)
        return True

    def _all_done(kind: str, stage: int, which: list[int]) -> bool:
        return done[(kind, stage, which[0], which[1])] >= holders[stage] // rows[stage]

    moved = True
    while moved:
        moved = False
        for device, actions in order.items():
            while position[device] < len(actions) and ready(actions[position[device]]):
                done[_key(actions[position[device]])] += 1
                position[device] += 1
                moved = True
    for index, (device, actions) in enumerate(order.items()):
        if position[device] < len(actions):
            waiting = _show(_key(actions[position[device]]))
            rule = f"waits for ever on device {device}"
            yield _wrong(f"order[{index}][{position[device]}]", waiting, rule, "no deadlock")


def _key(action: Action) -> _Key:
    return (action.kind, action.stage, action.microbatch, action.token_slice)


def _show(key: _Key) -> str:
    return f"{key[0]}{key[2]} of stage {key[1]}"


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
