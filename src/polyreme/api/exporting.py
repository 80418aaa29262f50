"""A plan as another tool's flags or configuration, written to a file or printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, Violation, nearest_first

if TYPE_CHECKING:
    from ..plan.export.kind import Exported
    from ..plan.ir import Plan


def known_tool(name: str | None) -> str | None:
    """The name of a tool that plans are exported for, or none at all.

    Raises:
        ConfigError: there is no such tool.
    """
    from ..plan.export import TOOLS

    if name is not None and name not in TOOLS:
        rule, legal = "is no tool that plans are exported for", nearest_first(name, list(TOOLS))
        raise ConfigError(
            [Violation(path="--export", value=name, rule=rule, legal=", ".join(legal))]
        )
    return name


def _sound(plan: Path) -> Plan:
    """The plan of a file.

    Raises:
        ConfigError: the file is no plan, or what it says does not hold together.
    """
    from ..plan.check import check_alone
    from ..plan.store import load

    found = load(plan)
    named = [name for stage in found.stages for name in stage.layers]
    without = [name for name in named if name not in found.layer_plans]
    if violations := [*map(_unplanned, without), *check_alone(found, None, unlike=True)]:
        raise ConfigError(violations)
    return found


def export(plan: Plan | str | Path, tool: str, *, out: str | Path | None = None) -> Exported:
    """The plan, or that of a file, in the words of a tool; written to `out` if it is given.

    Raises:
        ConfigError: there is no such tool, or it cannot express the plan.
    """
    from ..plan.export import TOOLS
    from ..plan.export import export as exported
    from .folders import writable

    name = known_tool(tool)
    assert name is not None, "a tool was named"
    if out is not None:
        writable(Path(out))
    found = exported(_sound(Path(plan)) if isinstance(plan, str | Path) else plan, TOOLS[name])
    if out is not None:
        Path(out).write_text(found.text)
    return found


def _unplanned(layer: str) -> Violation:
    rule, legal = "has no layer plan", "one for each layer"
    return Violation(path="plan.layer_plans", value=layer, rule=rule, legal=legal)
