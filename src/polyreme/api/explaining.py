"""Why a plan: in words, as a page, as a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .. import runlog
from ..errors import ConfigError, Violation
from ..plan.check import check_alone
from ..plan.describe import describe
from ..plan.explain import text_of
from ..plan.step import play_plan
from ..plan.store import load_ranked
from ..plan.trace import chrome_trace
from .folders import writable
from .show import MOST_LOST


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in a line, why it won in words, and the files that were written."""

    plan: str
    text: str
    page: str | None = None
    trace: str | None = None


def explain(plan: Path | str, *, out: Path | None, trace: Path | None) -> Explanation:
    """Write the page and the trace of a plan file that are asked for, and say why it won.

    Raises:
        ConfigError: the file is no plan, has no estimate, or lacks what a page or a trace needs.
    """
    if not isinstance(plan, str | Path):
        rule, legal = "is no path", "that of a plan file, as `pr.plan(..., out=PATH)` writes it"
        kind = type(plan).__name__
        raise ConfigError([Violation(path="plan", value=kind, rule=rule, legal=legal)])
    plan = Path(plan)
    best, top = load_ranked(plan)
    if best.estimate is None:
        rule = "is missing: the plan was never priced"
        legal = "`polyreme plan SPEC --price PLAN --out FILE` makes one"
        raise ConfigError([Violation(path="plan.estimate", value=None, rule=rule, legal=legal)])
    for option, path in (("--out", out), ("--trace", trace)):
        if path is not None:
            writable(path, option)
            if path.resolve() == plan.resolve():
                rule, legal = "is the plan file itself", "another file"
                value = str(path)
                raise ConfigError([Violation(path=option, value=value, rule=rule, legal=legal)])
    step = play_plan(best) if out is not None or trace is not None else None
    if violations := check_alone(best, None, unlike=True):
        raise ConfigError(violations)
    if step is not None:
        if trace is not None:
            runlog.write_whole(trace, chrome_trace(best, step))
        if out is not None:
            from ..report.plan_page import render_plan

            render_plan(best, step, top, out)
    return Explanation(
        plan=describe(best),
        text=text_of(best, top, most_lost=MOST_LOST),
        page=None if out is None else str(out),
        trace=None if trace is None else str(trace),
    )
