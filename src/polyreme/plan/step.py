"""The step of a plan file, played again with the costs that the file holds."""

from __future__ import annotations

import msgspec

from ..errors import ConfigError, Violation
from ..units import show_seconds
from .grid import Rows, grid_of, rows_of
from .ir import Action, Costs, Estimate, Plan
from .play import Played, Stuck, play

_ROUGH = 0.9  # batches that do not divide are played as if all microbatches were the mean
AGAIN = "a file that `polyreme plan SPEC --out FILE` writes"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Passes of each pipeline rank on the clock, and what of the step comes beside them."""

    rows: Rows
    played: Played
    estimate: Estimate

    @property
    def bubble(self) -> tuple[float, ...]:
        """Of each rank, the share of the makespan in which it plays nothing."""
        span_s = self.played.makespan_s
        ranks = range(len(self.rows.pipes))
        return tuple(max(0.0, self.played.bubble_s(rank) / span_s) for rank in ranks)

    @property
    def exchange_s(self) -> float:
        """Seconds of the step that are neither passes nor update: exchanges that nothing hides."""
        found = self.estimate.step_s - self.played.makespan_s - self.estimate.update_s
        return max(0.0, found)


def play_plan(plan: Plan) -> Step:
    """The step of one device of each pipeline rank.

    Raises:
        ConfigError: the plan has no estimate, one of an older version, or parts that do not go
            together; its order waits for ever.
    """
    estimate = plan.estimate
    if estimate is None:
        legal = "`polyreme plan SPEC --price PLAN --out FILE` makes one"
        raise _wrong("estimate", None, "is missing: the plan was never priced", legal)
    if estimate.stages is None or not estimate.capacity or not estimate.layers:
        rule = "lacks stages, capacity or layers: an older version wrote it"
        raise _wrong("estimate", None, rule, AGAIN)
    rows = _sound(plan, estimate, estimate.stages)
    ascending = sorted(rows.devices)
    order = [plan.order[ascending.index(row[0])] for row in rows.pipes]
    try:
        played = play(order, len(plan.stages), estimate.stages)
    except Stuck as stuck:
        raise _wrong("order", str(stuck), "is never played", "an order that goes on") from stuck
    if not played.makespan_s > 0:
        raise _wrong("estimate.stages", None, "makes a step of no time", AGAIN)
    if estimate.step_s < _ROUGH * played.makespan_s:
        rule = f"is less than its passes take, {show_seconds(played.makespan_s)}"
        raise _wrong("estimate.step_s", estimate.step_s, rule, AGAIN)
    return Step(rows=rows, played=played, estimate=estimate)


def _sound(plan: Plan, estimate: Estimate, costs: Costs) -> Rows:
    """The rows of a plan whose parts have one number of stages, devices and slices.

    Raises:
        ConfigError: they have not.
    """
    names = {name for stage in plan.stages for name in stage.layers}
    if missing := sorted(names - set(plan.layer_plans)):
        raise _wrong("layer_plans", missing[0], "is missing", "one for each layer of the stages")
    placed = all(stage.placements for stage in plan.stages)
    rows = (grid_of(plan) or rows_of(plan)) if placed else None
    if rows is None:
        raise _wrong("stages", None, "are not cut into equal parts", AGAIN)
    n_devices, n_stages = len(rows.devices), len(plan.stages)
    counts = {
        "order": (len(plan.order), n_devices),
        "estimate.memory": (len(estimate.memory), n_devices),
        "estimate.capacity": (sum(each.n_devices for each in estimate.capacity), n_devices),
        "estimate.stages.forward": (len(costs.forward), n_stages),
        "estimate.stages.inputs": (len(costs.inputs), n_stages),
        "estimate.stages.weights": (len(costs.weights), n_stages),
    }
    for field, (found, wanted) in counts.items():
        if found != wanted:
            rule = f"is for {found}, and the plan has {n_stages} stages on {n_devices} devices"
            raise _wrong(field, None, rule, f"{wanted} entries")
    orders = {id(own): own for own in plan.order}.values()
    for action in {each for own in orders for each in own}:
        if not _is_priced(action, n_stages, costs):
            rule = "is of a stage or a slice that has no cost"
            raise _wrong("order", f"{action.kind}{action.microbatch}", rule, AGAIN)
    if not estimate.step_s > 0:
        raise _wrong("estimate.step_s", estimate.step_s, "is not > 0", AGAIN)
    return rows


def _is_priced(action: Action, n_stages: int, costs: Costs) -> bool:
    slices = len(costs.slices) or action.token_slice + 1
    return 0 <= action.stage < n_stages and 0 <= action.token_slice < slices


def _wrong(field: str, value: object, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)])
