"""Whether a plan's order can be played: complete, in order on each device, free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ..errors import Violation
from .ir import Action, Plan
from .play import Costs, Key, Stuck, key, play, show

_MOST = 8  # microbatches of a device that are named where all of them are missing
_Lane = tuple[int, int]  # stage, copy


def order_violations(plan: Plan) -> Iterator[Violation]:
    """What is wrong with the order of a plan whose stages and placements are sound.

    An update that names the weight version it makes is one microbatch's: then each microbatch of
    each stage has its own, and its passes keep to one version.
    """
    lanes: dict[int, list[_Lane]] = {}
    for index, stage in enumerate(plan.stages):
        for copy, row in enumerate(stage.placements):
            for device in row:
                lanes.setdefault(device, []).append((index, copy))
    used = sorted(lanes)
    if len(plan.order) != len(used):
        rule = f"has actions for {len(plan.order)} devices, not {len(used)}"
        yield _wrong("order", len(plan.order), rule, f"{len(used)} entries, in device order")
        return
    seen: set[tuple[int, tuple[_Lane, ...]]] = set()
    complete = True
    for index, (device, actions) in enumerate(zip(used, plan.order, strict=True)):
        same = (id(actions), tuple(lanes[device]))
        if same in seen:
            continue
        seen.add(same)
        for violation in _device_violations(f"order[{index}]", actions, lanes[device], plan):
            complete = False
            yield violation
    if complete:
        dealt = list(_dealt(plan, {device: plan.order[n] for n, device in enumerate(used)}))
        yield from dealt
        if not dealt and len(plan.stages) > 1:
            yield from _deadlock(plan, used)


def _device_violations(
    path: str, actions: Sequence[Action], lanes: Sequence[_Lane], plan: Plan
) -> Iterator[Violation]:
    """Each microbatch forward, then backward (or its two halves), once a stage; then one update.

    Of stages with two placements a device plays some microbatches only.
    """
    held = sorted({stage for stage, _ in lanes})
    for stage in sorted({action.stage for action in actions} - set(held)):
        yield _wrong(path, stage, "is a stage that the device does not hold", f"{held}")
    played = {(action.stage, action.copy) for action in actions if action.stage in held}
    for stage, copy in sorted(played - set(lanes)):
        legal = ", ".join(str(each) for of, each in lanes if of == stage)
        rule = "is a copy that the device does not hold"
        yield _wrong(f"{path}, stage {stage}", copy, rule, legal)
    updated = any(action.kind == "U" and action.weight_version for action in actions)
    for stage, copy in lanes:
        where = f"{path}, stage {stage}"
        own = [action for action in actions if (action.stage, action.copy) == (stage, copy)]
        place = {key(action): number for number, action in enumerate(own)}
        for name, count in Counter(map(key, own)).items():
            if count > 1:
                yield _wrong(where, show(name), f"stands {count} times", "once")
        shared = len(plan.stages[stage].placements) > 1
        yield from _microbatch_violations(where, place, plan.microbatches, shared)
        for name in [name for name in place if name[0] == "F"]:
            yield from _backward_violations(where, place, name)
        for name in [name for name in place if name[0] in "BIW" and ("F", *name[1:]) not in place]:
            yield _wrong(where, show(name), "has no forward pass before it", "F first")
        yield from _slice_violations(where, place)
        if updated:
            yield from _version_violations(where, own)
        else:
            yield from _update_violations(where, own)


def _microbatch_violations(
    where: str, place: Mapping[Key, int], microbatches: int, shared: bool
) -> Iterator[Violation]:
    forward = {name[2] for name in place if name[0] == "F"}
    legal = "0" if microbatches <= 1 else f"0 (or any integer >= 0 and <= {microbatches - 1})"
    missing = (each for each in range(microbatches) if each not in forward)
    for microbatch in () if shared else islice(missing, _MOST):
        legal_passes = (
            f"F{microbatch}, and later B{microbatch} (or I{microbatch} and W{microbatch})"
        )
        yield _wrong(where, f"microbatch {microbatch}", "has no forward pass", legal_passes)
    for microbatch in sorted(each for each in forward if not 0 <= each < microbatches):
        rule = "is no microbatch of the plan"
        yield _wrong(where, f"microbatch {microbatch}", rule, legal)


def _backward_violations(where: str, place: Mapping[Key, int], forward: Key) -> Iterator[Violation]:
    whole, inputs, weights = (place.get((kind, *forward[1:])) for kind in "BIW")
    if whole is None and (inputs is None or weights is None):
        rule = "has no whole backward pass after it"
        yield _wrong(where, show(forward), rule, "B, or I and W")
        return
    if whole is not None and (inputs is not None or weights is not None):
        yield _wrong(where, show(forward), "has B and halves of it", "B, or I and W")
        return
    first = whole if whole is not None else inputs
    assert first is not None
    if first < place[forward]:
        yield _wrong(where, show(forward), "comes after its backward pass", "F first")
    if weights is not None and inputs is not None and weights < inputs:
        yield _wrong(where, show(forward), "has its W before its I", "F, I, W")


def _slice_violations(where: str, place: Mapping[Key, int]) -> Iterator[Violation]:
    """Token slices go forward one after another, for attention to those before, and come back."""
    forward, back = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for kind, _, microbatch, piece in sorted(place, key=lambda name: place[name]):
        if kind == "F":
            forward[microbatch].append(piece)
        elif kind in "BI":
            back[microbatch].append(piece)
    for microbatch, pieces in forward.items():
        if pieces != list(range(len(pieces))):
            legal = "0, 1, ..."
            yield _wrong(where, pieces, f"are the slices of F{microbatch} in order", legal)
    for microbatch, pieces in back.items():
        if pieces != sorted(pieces, reverse=True):
            legal = "the last slice first"
            yield _wrong(where, pieces, f"are the slices of B{microbatch} in order", legal)


def _update_violations(where: str, own: Sequence[Action]) -> Iterator[Violation]:
    updates = [number for number, action in enumerate(own) if action.kind == "U"]
    if updates != [len(own) - 1]:
        rule = "must be the last action of the stage, once"
        yield _wrong(where, f"{len(updates)} updates", rule, "one U, at the end")
    for action in own:
        if action.weight_version:
            rule = f"reads weights {action.weight_version}, which no update of the plan makes"
            yield _wrong(where, show(key(action)), rule, "weight_version 0")


def _version_violations(where: str, own: Sequence[Action]) -> Iterator[Violation]:
    """An update after each microbatch's backward pass; passes read one version that is made."""
    read: dict[tuple[int, int], int] = {}
    made, due = 0, list[int]()
    for action in own:
        name, version = show(key(action)), action.weight_version
        if action.kind == "U":
            made += 1
            if version != made:
                yield _wrong(where, name, f"makes weights {version}", f"{made}, one an update")
            if action.microbatch not in due:
                yield _wrong(where, name, "is before its backward pass", "F, B, U")
            due = [each for each in due if each != action.microbatch]
        elif action.kind == "F":
            read[action.microbatch, action.token_slice] = version
            if not 0 <= version <= made:
                rule = f"reads weights {version}, which are not made yet"
                yield _wrong(where, name, rule, f"0 to {made}")
        else:
            forward = read.get((action.microbatch, action.token_slice))
            if forward is not None and version != forward:
                rule = f"reads weights {version}, not those of its forward pass"
                yield _wrong(where, name, rule, f"{forward}")
            if action.kind in "BW":
                due.append(action.microbatch)
    for microbatch in dict.fromkeys(due):
        yield _wrong(where, f"microbatch {microbatch}", "has no update after it", "F, B, U")


def _dealt(plan: Plan, order: Mapping[int, Sequence[Action]]) -> Iterator[Violation]:
    """Of stages with several copies each microbatch goes through one, the same in all of them."""
    first: dict[int, tuple[int, int]] = {}
    for index, stage in enumerate(plan.stages):
        if len(stage.placements) < 2:
            continue
        copies: dict[int, list[int]] = {each: [] for each in range(plan.microbatches)}
        for copy, row in enumerate(stage.placements):
            for device in row:
                for action in order[device]:
                    if (action.stage, action.copy, action.kind) == (index, copy, "F"):
                        copies[action.microbatch].append(copy)
        path = f"stages[{index}].placements"
        for microbatch, through in copies.items():
            value = f"microbatch {microbatch}"
            whole = [copy for copy, row in enumerate(stage.placements) for _ in row]
            copy, of = first.setdefault(microbatch, (through[0] if through else 0, index))
            if not through or set(through) != {through[0]}:
                rule = f"goes through {len(set(through))} copies of stage {index}"
                yield _wrong(path, value, rule, "one copy")
            elif through.count(through[0]) % whole.count(through[0]):
                rule = f"is not played by all devices of copy {through[0]}"
                yield _wrong(path, value, rule, "all of them")
            elif through[0] != copy:
                rule = f"goes through copy {through[0]}, and through copy {copy} of stage {of}"
                yield _wrong(path, value, rule, "one copy")


def _deadlock(plan: Plan, used: Sequence[int]) -> Iterator[Violation]:
    """Who waits for whom where the order, played on a clock, comes to a stand.

    Sends and receives are derived from the order as it is played, so between two devices they
    match by themselves: this is all that can stand.
    """
    try:
        play(plan.order, len(plan.stages), Costs.equal(len(plan.stages)))
    except Stuck as stuck:
        for wait in stuck.circle or stuck.waits.values():
            giver = None if wait.giver is None else used[wait.giver]
            path = f"order[{wait.rank}], device {used[wait.rank]}"
            rule = wait.said("device", giver)
            legal = (
                "one of these actions earlier (or a plan made anew)"
                if stuck.circle
                else "each stage in as many slices"
            )
            yield _wrong(path, show(key(wait.action)), rule, legal)


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
